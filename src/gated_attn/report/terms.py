"""What the numbers of a diagnosis are called, how they are written, and which definition they go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gated_attn.report.table import DASH

SIZE = "size"
"""The format of numbers without a natural scale: four digits, or whole thousands."""


@dataclass(frozen=True)
class Term:
    """A number: the field it is in, its name, its format, and the key of its definition if that is another."""

    key: str
    title: str
    form: str = ".3f"
    defined: str = ""

    @property
    def definition_key(self) -> str:
        """Where its definition is, in a record or in `OWN`."""
        return self.defined or self.key


SUMMARY = (
    Term("first_token_share", "Attention on the first token"),
    Term("sink_rate", "Sink rate"),
    Term("strongest_early_share", "Strongest early key"),
    Term("entropy", "Attention entropy"),
    Term("max_abs", "Largest activation", SIZE),
    Term("m_act", "Largest activation, mean over layers (M-Act)", SIZE),
    Term("inf_norm", "Infinity norm", SIZE),
    Term("kurtosis", "Kurtosis", SIZE),
    Term("gate_mean", "Gate mean"),
)

HEADS = (
    Term("first_token_share", "Attention on the first token"),
    Term("sink_rate", "Sink rate"),
    Term("entropy", "Attention entropy"),
    Term("output_norm", "What a head adds (output norm)", SIZE),
)
"""Drawn per layer and head; `MORE_HEADS` too, one click away."""

MORE_HEADS = (
    Term("first_token_share_all", "Attention on the first token, query 0 counted"),
    Term("sink_share", "Attention on the first token, first queries only"),
    Term("strongest_share", "Strongest key"),
    Term("strongest_early_share", "Strongest early key"),
    Term("effective_rank", "Effective rank", SIZE),
)

GATES = (Term("mean", "Gate mean", defined="gate_mean"),)
MORE_GATES = (
    Term("median", "Gate median", defined="gate_median"),
    Term("below_01", "Gate below 0.1", defined="gate_below_01"),
    Term("below_005", "Gate below 0.05", defined="gate_below_01"),
    Term("above_095", "Gate above 0.95", defined="gate_below_01"),
    Term("largest", "Largest |gate|", defined="gate_largest"),
    Term("token_entropy", "Gate entropy over tokens", defined="gate_token_entropy"),
)

STREAMS = (
    Term("max_abs", "Largest activation", SIZE),
    Term("kurtosis", "Kurtosis", SIZE),
    Term("massive", "Massive activations", ",d"),
    Term("token_norm_ratio", "Largest token norm over the median", SIZE),
)
"""Drawn by layer; the table of the residual stream has `MORE_STREAMS` too."""

MORE_STREAMS = (
    Term("token_norm_position", "Position of that token", "d"),
    Term("median_abs", "Median activation", SIZE),
    Term("inf_norm", "Infinity norm", SIZE),
)

LAYERS = (
    Term("queries", "Queries", ",d"),
    Term("first_token_share", "First token"),
    Term("first_token_share_all", "\u2026 with query 0"),
    Term("sink_share", "First queries on it"),
    Term("sink_rate", "Sink rate"),
    Term("strongest_share", "Strongest key"),
    Term("strongest_early_share", "Strongest early"),
    Term("entropy", "Entropy"),
    Term("effective_rank", "Rank", ".1f"),
    Term("output_norm", "Output norm", SIZE),
    Term("dead_heads", "Dead heads", "d", defined="dead"),
    Term("max_abs", "Max |x|", SIZE),
    Term("kurtosis", "Kurtosis", SIZE),
    Term("massive", "Massive", ",d"),
    Term("gate_mean", "Gate mean"),
    Term("gate_below_01", "Gate < 0.1", ".1%"),
)
"""The columns of the per-layer table, means over the heads of a module."""

OWN = {
    "queries": "queries counted, over all sequences",
    "gate_largest": "largest |g| over tokens and channels",
    "strongest_position": "where the strongest key most often was, counted from its sequence's first token, 0; of the head whose "
    "strongest_share is largest",
    "token_norm_position": "where in its sequence the token of token_norm_ratio was, counted from 0",
    "pattern": "A[t, s], the weight of query t on key s, before any gate, over the first tokens of the first sequence",
    "view_gates": "the gate's value on each of the first tokens of the first sequence, a mean over channels; where no head is "
    "chosen, a mean over heads, and where no layer is chosen, over layers",
    "view_first": "A[t, 0], the share of attention that each of the first tokens of the first sequence gives to the first, before "
    "any gate; a mean over heads and layers where none is chosen. Under a causal mask the first token sees only itself",
}
"""Definitions of what only the report shows; a record's own come first."""


def definition(key: str, recorded: Mapping[str, str]) -> str:
    """What a number is, or that nobody said."""
    return recorded.get(key) or OWN.get(key) or "this record does not define it"


def written(value: float | None, form: str, *, signed: bool = False) -> str:
    """A number in a term's format, or a dash."""
    if value is None:
        return DASH
    if form == SIZE:
        form = ",.0f" if abs(value) >= 1000 else ".4g"
    return format(value, "+" + form if signed else form)
