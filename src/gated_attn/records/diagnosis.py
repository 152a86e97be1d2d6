"""What a model's attention, residual stream and gates were seen to do on a text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from gated_attn.codec import Checked, Record
from gated_attn.errors import MissingExtraError, RecordError
from gated_attn.records.runs import SampleGates


@dataclass(frozen=True, kw_only=True)
class HeadStat(Checked):
    """One head's attention; None where nothing could be counted (a sequence too short). `Diagnosis.definitions` says the rest."""

    head: int
    first_token_share: float | None
    first_token_share_all: float | None
    sink_share: float | None
    sink_rate: float | None
    strongest_share: float | None
    strongest_position: int
    """Where the strongest key most often was, counted from its sequence's first token; -1 if nowhere."""
    strongest_token: str | None
    strongest_early_share: float | None
    entropy: float | None
    effective_rank: float
    output_norm: float | None
    dead: bool


@dataclass(frozen=True, kw_only=True)
class AttentionStat(Checked):
    """One attention module: its name, its layer counted from 0, `self` or `cross`, and its heads."""

    name: str
    layer: int
    kind: str
    queries: int
    """Queries counted, over all sequences."""
    heads: tuple[HeadStat, ...]


@dataclass(frozen=True, kw_only=True)
class StreamStat(Checked):
    """The residual stream behind one layer, over all real tokens."""

    name: str
    layer: int
    max_abs: float
    median_abs: float
    massive: int
    inf_norm: float
    kurtosis: float
    token_norm_ratio: float
    token_norm_position: int


@dataclass(frozen=True, kw_only=True)
class GateReading(Checked):
    """One gate, per head (one entry for a gate that all heads share); `by_class` is the mean per class of tokens."""

    name: str
    layer: int
    spec: str
    mean: tuple[float, ...]
    median: tuple[float, ...]
    below_01: tuple[float, ...]
    below_005: tuple[float, ...]
    above_095: tuple[float, ...]
    largest: tuple[float, ...]
    token_entropy: tuple[float | None, ...]
    by_class: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pattern(Checked):
    """The weights of one head over the first tokens of the sample: `weights[query][key]`."""

    name: str
    layer: int
    head: int
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class TokenView(Checked):
    """The first tokens of the first sequence, one by one.

    `gates` are the gates' values, `first` the shares of attention on the first token, each `values[layer][head][token]`.
    """

    tokens: tuple[str, ...]
    gates: SampleGates | None = None
    first: SampleGates | None = None
    patterns: tuple[Pattern, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Record):
    """What `diagnose` saw. Every number's definition, with its T, queries and tokens, is in `definitions`.

    Example:
        >>> print(Diagnosis.load("diagnosis.json"))
    """

    FORMAT: ClassVar[str] = "gated-attn.diagnosis"
    VERSION: ClassVar[int] = 1

    model: str
    text: str
    """What was read: a file or a sample's name, and a hash of the tokens."""
    sequences: int
    tokens: int
    """Real tokens, padding left out."""
    shortest: int
    longest: int
    """Real tokens of the shortest and the longest sequence."""
    parameters: int
    attn_implementation: str
    dtype: str
    sink_tokens: int
    sink_eps: float
    attention: tuple[AttentionStat, ...]
    streams: tuple[StreamStat, ...]
    gates: tuple[GateReading, ...] = ()
    view: TokenView | None = None
    definitions: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None
    plain_seconds: float | None = None
    peak_extra_bytes: int | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def first_token_share(self) -> float | None:
        """Mean over layers and heads; so are the next four."""
        return self._over_heads(lambda head: head.first_token_share)

    @property
    def sink_rate(self) -> float | None:
        """Share of sequences, layers and heads that are sinks."""
        return self._over_heads(lambda head: head.sink_rate)

    @property
    def strongest_early_share(self) -> float | None:
        """Largest share on any one early token."""
        return self._over_heads(lambda head: head.strongest_early_share)

    @property
    def entropy(self) -> float | None:
        """Normalised attention entropy."""
        return self._over_heads(lambda head: head.entropy)

    @property
    def max_abs(self) -> float | None:
        """Largest absolute value in the residual stream behind any layer."""
        return max((stream.max_abs for stream in self.streams), default=None)

    @property
    def m_act(self) -> float | None:
        """Mean over layers of the largest absolute value ("M-Act")."""
        return mean(stream.max_abs for stream in self.streams)

    @property
    def kurtosis(self) -> float | None:
        """Mean over layers."""
        return mean(stream.kurtosis for stream in self.streams)

    @property
    def inf_norm(self) -> float | None:
        """Largest over layers of the mean over sequences of the largest absolute value."""
        return max((stream.inf_norm for stream in self.streams), default=None)

    @property
    def gate_mean(self) -> float | None:
        """Mean over gates and heads; None without gates."""
        return mean(value for gate in self.gates for value in gate.mean)

    def _over_heads(self, value: Callable[[HeadStat], float | None]) -> float | None:
        return mean(value(head) for module in self.attention for head in module.heads)

    def summary(self) -> dict[str, float | None]:
        """The numbers of the whole model by name."""
        return {name: getattr(self, name) for name in SUMMARY}

    def rows(self) -> list[dict[str, Any]]:
        """One row per attention module: means over its heads, and the layer's residual stream and gate beside it."""
        rows = []
        for module in self.attention:
            around = [stream for stream in self.streams if _holds(stream.name, module.name)]
            stream = max(around, key=lambda one: len(one.name)) if around else None
            gates = [gate for gate in self.gates if _holds(module.name, gate.name)]
            heads = {name: mean(getattr(head, name) for head in module.heads) for name in HEAD_NUMBERS}
            place = strongest_of(module)
            rows.append({
                "name": module.name, "layer": module.layer, "kind": module.kind, **heads,
                "strongest_position": place[0], "strongest_token": place[1],
                "dead_heads": sum(head.dead for head in module.heads),
                "max_abs": None if stream is None else stream.max_abs,
                "kurtosis": None if stream is None else stream.kurtosis,
                "massive": None if stream is None else stream.massive,
                "gate_mean": mean(value for gate in gates for value in gate.mean),
                "gate_below_01": mean(value for gate in gates for value in gate.below_01),
            })  # fmt: skip
        return rows

    def to_pandas(self) -> Any:
        """A DataFrame with one row per attention module and head; needs pandas."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise MissingExtraError("pandas", "pandas", "to_pandas()") from error
        rows = []
        for module in self.attention:
            gate = next((gate for gate in self.gates if _holds(module.name, gate.name)), None)
            for head in module.heads:
                row = {"name": module.name, "layer": module.layer, "kind": module.kind}
                row |= {part.name: getattr(head, part.name) for part in fields(head)}
                if gate is not None and head.head < len(gate.mean) > 1:
                    row["gate_mean"] = gate.mean[head.head]
                rows.append(row)
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        return table(self)


def _holds(outer: str, inner: str) -> bool:
    """Whether a module is another or is inside it, both in the same of their calls (`name#1`)."""
    (place, _, call), (name, _, other) = outer.partition("#"), inner.partition("#")
    return call == other and (name == place or name.startswith(f"{place}."))


SUMMARY = (
    "first_token_share", "sink_rate", "strongest_early_share", "entropy", "max_abs", "m_act", "inf_norm", "kurtosis", "gate_mean",
)  # fmt: skip
HEAD_NUMBERS = (
    "first_token_share", "first_token_share_all", "sink_share", "sink_rate", "strongest_share", "strongest_early_share", "entropy",
    "effective_rank", "output_norm",
)  # fmt: skip


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def strongest_of(module: AttentionStat) -> tuple[int, str | None]:
    """(position, token) of the strongest key of the head whose share is largest."""
    best = max(module.heads, key=lambda head: head.strongest_share or 0.0)
    return best.strongest_position, best.strongest_token


def table(diagnosis: Diagnosis) -> str:
    """One line per attention module, within 80 columns, and what was measured above it."""
    gated = bool(diagnosis.gates)
    head = f"{diagnosis.model}: {diagnosis.parameters:,} parameters, {diagnosis.dtype}, {diagnosis.attn_implementation}"
    length = (
        f"{diagnosis.longest}"
        if diagnosis.shortest == diagnosis.longest
        else f"{diagnosis.shortest} to {diagnosis.longest}"
    )
    lines = [
        *textwrap.wrap(head, 80),
        *textwrap.wrap(
            f"{diagnosis.text}: {diagnosis.tokens:,} tokens in {diagnosis.sequences} sequences of {length}", 80
        ),
        "",
        "layer kind   first sinks strongest at      entropy  rank  max |x|"
        + ("   gate  <0.1" if gated else "  kurtosis"),
    ]
    for row in diagnosis.rows():
        token = row["strongest_token"]
        at = f"{row['strongest_position']}" + (f" {token!r}" if token is not None else "")
        end = (
            f" {number(row['gate_mean'], '6.3f')} {number(row['gate_below_01'], '5.0%')}"
            if gated
            else f" {number(row['kurtosis'], '9,.0f')}"
        )
        lines.append(
            f"{row['layer']:>5} {row['kind']:<5} {number(row['first_token_share'], '6.3f')} {number(row['sink_rate'], '5.2f')} "
            f"{number(row['strongest_share'], '5.3f')} {at[:12]:<12} {number(row['entropy'], '7.3f')} "
            f"{number(row['effective_rank'], '5.1f')} {number(row['max_abs'], '8,.1f')}{end}"
        )
    told = [f"{name} {number(value, '.4g')}" for name, value in diagnosis.summary().items() if value is not None]
    lines += ["", *_wrapped(told, 80)]
    lines += textwrap.wrap(
        f"first: share of attention on the first token, query 0 left out; sinks: share of heads above {diagnosis.sink_eps:g} over "
        f"{diagnosis.sink_tokens} tokens; the JSON has every definition",
        80,
    )
    return "\n".join(lines)


def _wrapped(parts: Iterable[str], width: int) -> list[str]:
    """The parts, two spaces apart, in lines of at most this width."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        lines = [*lines[:-1], longer] if len(longer) <= width else [*lines, part]
    return lines


def number(value: float | None, form: str) -> str:
    """The number in this form, or a dash as wide."""
    width = int("".join(ch for ch in form.split(".")[0] if ch.isdigit()) or 1)
    told = "-" if value is None else format(value, form)
    return f"{told:>{width}}" if value is None or len(told) <= width else f"{value:>{width}.1e}"


@dataclass(frozen=True)
class Change:
    """One number before and after, and the difference; None where either is."""

    name: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True)
class Difference:
    """Two diagnoses of the same text, paired: `changes` of the whole model, `heads` per module and head."""

    changes: tuple[Change, ...]
    heads: dict[tuple[str, int], tuple[Change, ...]]

    def __str__(self) -> str:
        lines = [f"{'':24} {'before':>10} {'after':>10} {'difference':>11}"]
        for one in self.changes:
            if one.before is not None or one.after is not None:
                lines.append(
                    f"{one.name:<24} {number(one.before, '10.4g')} {number(one.after, '10.4g')} {number(one.difference, '+11.4g')}"
                )
        for name in ("first_token_share", "entropy"):
            moved = [
                c for changes in self.heads.values() for c in changes if c.name == name and c.difference is not None
            ]
            down = sum(c.difference < 0 for c in moved if c.difference is not None)
            lines.append(f"{name}: lower in {down} of {len(moved)} heads")
        return "\n".join(lines)


def diff(before: Diagnosis, after: Diagnosis) -> Difference:
    """Before and after on the same text, module by module and head by head.

    Raises RecordError where text, tokens, sequences or definitions are not the same, so that only like is compared.
    """
    for name in ("text", "tokens", "sequences", "sink_tokens", "sink_eps", "definitions"):
        if getattr(before, name) != getattr(after, name):
            raise RecordError(
                f"these two do not compare: {name} is {str(getattr(before, name))[:80]!r} before and "
                f"{str(getattr(after, name))[:80]!r} after; diagnose both on the same text with the same options"
            )
    mine, theirs = ({(m.name, h.head) for m in one.attention for h in m.heads} for one in (before, after))
    if mine != theirs:
        name, head = min(mine ^ theirs)
        raise RecordError(
            f"these two do not compare: head {head} of {name} is in one of them only; diagnose the same layers and heads"
        )
    pairs = zip(before.summary().items(), after.summary().values(), strict=True)
    changes = tuple(Change(name, old, new) for (name, old), new in pairs)
    there = {(module.name, head.head): head for module in after.attention for head in module.heads}
    heads = {
        (module.name, head.head): tuple(
            Change(name, getattr(head, name), getattr(there[module.name, head.head], name)) for name in HEAD_NUMBERS
        )
        for module in before.attention
        for head in module.heads
    }
    return Difference(changes, heads)
