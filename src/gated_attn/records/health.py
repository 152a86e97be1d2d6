"""Gates over the steps of a training run, as `GateMonitor` saw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gated_attn.codec import Checked, Record
from gated_attn.errors import RecordError


@dataclass(frozen=True, kw_only=True)
class GateHealth(Checked):
    """One gate after one step. `mean`, `below` and `above` are per head, and empty where values are known inside attention only.

    `change` is the root mean square of g - g0, g0 what the gate's first weights give on the same tokens. What the step did not
    tell is None.
    """

    name: str
    spec: str
    mean: tuple[float, ...] = ()
    below: tuple[float, ...] = ()
    above: tuple[float, ...] = ()
    weight_norm: float | None = None
    grad_norm: float | None = None
    change: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.mean) == len(self.below) == len(self.above):
            raise RecordError(
                f"GateHealth of {self.name} has {len(self.mean)} means, {len(self.below)} below and {len(self.above)} above: one "
                "of each per head is wanted"
            )


@dataclass(frozen=True, kw_only=True)
class HealthPoint(Checked):
    """Every gate after one optimizer step."""

    step: int
    gates: tuple[GateHealth, ...]


@dataclass(frozen=True, kw_only=True)
class HealthWarning(Checked):
    """What was warned of after a step."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class HealthRecord(Record):
    """Every measured step of a run, and what was warned of.

    `below` counts |g| < `low`, `above` |g| > `high` times the largest value of the gate's activation, over the step's real tokens.
    """

    FORMAT: ClassVar[str] = "gated-attn.health"
    VERSION: ClassVar[int] = 1

    low: float
    high: float
    points: tuple[HealthPoint, ...] = ()
    warnings: tuple[HealthWarning, ...] = ()

    def until(self, step: int) -> HealthRecord:
        """What was known after this step: what a run that is resumed there goes on from."""
        return HealthRecord(
            low=self.low,
            high=self.high,
            points=tuple(point for point in self.points if point.step <= step),
            warnings=tuple(one for one in self.warnings if one.step <= step),
        )
