"""Gates over the steps of a training run, as `GateMonitor` saw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gated_attn.codec import Checked, Record
from gated_attn.records.diagnosis import GateReading


@dataclass(frozen=True, kw_only=True)
class GateHealth(Checked):
    """One gate after one step. `weight_norm` is of all that the gate learns; None where the step did not tell.

    `change` is the root mean square of g - g0, g0 what the gate's first weights give on the same tokens.
    """

    reading: GateReading
    weight_norm: float | None = None
    grad_norm: float | None = None
    change: float | None = None


@dataclass(frozen=True, kw_only=True)
class HealthPoint(Checked):
    """Every gate after one optimizer step."""

    step: int
    gates: tuple[GateHealth, ...]


@dataclass(frozen=True, kw_only=True)
class HealthRecord(Record):
    """Every measured step of a run, and what was warned of: (step, sentence)."""

    FORMAT: ClassVar[str] = "gated-attn.health"
    VERSION: ClassVar[int] = 1

    points: tuple[HealthPoint, ...]
    warnings: tuple[tuple[int, str], ...] = ()
