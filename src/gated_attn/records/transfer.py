"""A sink transfer: what a model's sinks were, the gates they became, and the same measures before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gated_attn.codec import Checked, Record
from gated_attn.errors import RecordError

NUMBERS = (
    "first_token_share", "sink_rate", "strongest_early_share", "max_abs", "kurtosis", "unrounded_perplexity",
    "w8a8_static_perplexity", "w8a8_dynamic_perplexity", "w4a16_perplexity", "kv8_perplexity", "kv4_perplexity",
    "streaming_perplexity", "streaming_keep4_perplexity",
)  # fmt: skip
"""The measures of an `Evidence` beside its perplexities; None where one was not taken."""

SINK = 0.05
"""A head whose mean share on one token, over queries from 64 on, is larger has a sink there."""


@dataclass(frozen=True, kw_only=True)
class Evidence(Record):
    """What a model does on held-out text. `TransferRecord.definitions` says what each number is.

    `perplexity` is by kind of text, and over all kinds under `all`.
    """

    FORMAT: ClassVar[str] = "gated-attn.evidence"
    VERSION: ClassVar[int] = 1

    perplexity: dict[str, float]
    first_token_share: float | None = None
    sink_rate: float | None = None
    strongest_early_share: float | None = None
    max_abs: float | None = None
    kurtosis: float | None = None
    unrounded_perplexity: float | None = None
    w8a8_static_perplexity: float | None = None
    w8a8_dynamic_perplexity: float | None = None
    w4a16_perplexity: float | None = None
    kv8_perplexity: float | None = None
    kv4_perplexity: float | None = None
    streaming_perplexity: float | None = None
    streaming_keep4_perplexity: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "all" not in self.perplexity:
            raise RecordError("Evidence needs the perplexity over all kinds of text, under 'all'")


@dataclass(frozen=True, kw_only=True)
class SinkLayer(Checked):
    """One attention module: each head's mean share on the sink, and how well the gate's logit was told from the hidden state.

    `source` is what its gate reads, `hidden` or `lse`, None for no gate; `r2` is None where nothing was fitted.
    """

    name: str
    layer: int
    share: tuple[float, ...]
    source: str | None
    r2: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class TransferRecord(Record):
    """One transfer.

    Fields:
        tier: exact or hidden; sink: number and text of the token that stood in front of the original's input.
        texts: kind of text -> what it is; tokens: calibration tokens read; steps: of distillation; losses: (step, divergence).
        layers: every attention module; others: heads whose strongest key is not the sink, as "module, head: token at position".
        before, after: on the same held-out tokens.
    """

    FORMAT: ClassVar[str] = "gated-attn.transfer"
    VERSION: ClassVar[int] = 1

    model: str
    tier: str
    spec: str | None
    sink: int | None
    sink_text: str
    texts: dict[str, str]
    tokens: int
    held_out_tokens: int
    steps: int
    losses: tuple[tuple[int, float], ...]
    layers: tuple[SinkLayer, ...]
    others: tuple[str, ...]
    parameters: int
    added_parameters: int
    seconds: float
    before: Evidence
    after: Evidence
    definitions: dict[str, str]
    environment: dict[str, Any]

    @property
    def sinks(self) -> int:
        """How many heads have a sink: a share above `SINK` on it."""
        return sum(share > SINK for layer in self.layers for share in layer.share)

    @property
    def gated(self) -> bool:
        """Whether any head had a sink that became a gate."""
        return any(layer.source is not None for layer in self.layers)

    def rows(self) -> list[tuple[str, float | None, float | None]]:
        """(measure, before, after), perplexities first."""
        kinds = [kind for kind in self.before.perplexity if kind in self.after.perplexity]
        told = [(f"perplexity, {kind}", self.before.perplexity[kind], self.after.perplexity[kind]) for kind in kinds]
        return [*told, *((name, getattr(self.before, name), getattr(self.after, name)) for name in NUMBERS)]

    def __str__(self) -> str:
        """The measures before and after, as a table that fits a terminal."""
        lines = [f"{'':28} {'before':>12} {'after':>12}"]
        for name, before, after in self.rows():
            if before is not None or after is not None:
                lines.append(f"{name.replace('_', ' '):28} {_shown(before)} {_shown(after)}")
        heads = sum(len(layer.share) for layer in self.layers)
        lines.append(f"{self.sinks} of {heads} heads have a sink; {self.added_parameters:,} parameters added "
                     f"({self.added_parameters / max(self.parameters, 1):.2%}) in {self.seconds:.0f} s")  # fmt: skip
        return "\n".join(lines)


def _shown(value: float | None) -> str:
    if value is None:
        return f"{'-':>12}"
    return f"{value:>12,.0f}" if abs(value) >= 1000 else f"{value:>12.2f}" if abs(value) >= 10 else f"{value:>12.4f}"
