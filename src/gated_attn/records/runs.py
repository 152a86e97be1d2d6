"""A training run, and a comparison of runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from gated_attn.codec import Checked, Record
from gated_attn.errors import RecordError

HISTOGRAM_BINS = 20
"""Equal bins of every gate histogram; the first also counts what lies below its range, the last what lies above."""

GATE_SHUT = 0.1
"""A gate value below this counts as shut (`gate_below`), the threshold that the published gate statistics use."""


@dataclass(frozen=True, kw_only=True)
class HistoryPoint(Checked):
    """What was logged after `step` optimizer steps; None where a quantity was not logged at that step."""

    step: int
    train_loss: float | None = None
    eval_loss: float | None = None
    gate_mean: float | None = None


@dataclass(frozen=True, kw_only=True)
class GateStat(Checked):
    """Gate values of one head in one layer, over the validation tokens.

    `below` is the share of values under `GATE_SHUT`; `histogram` holds `HISTOGRAM_BINS` counts over the run's
    `histogram_range`. For an elementwise gate every channel is a value.
    """

    layer: int
    head: int
    mean: float | None
    below: float | None
    histogram: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.histogram) != HISTOGRAM_BINS or min(self.histogram) < 0:
            raise RecordError(
                f"GateStat.histogram of layer {self.layer} head {self.head} needs {HISTOGRAM_BINS} counts >= 0, "
                f"got {len(self.histogram)}: {self.histogram}"
            )


@dataclass(frozen=True, kw_only=True)
class SampleGates(Checked):
    """Gates over the tokens of one sentence: `values[layer][head][token]`, a mean over channels if elementwise.

    `layers` names the layer of each entry of `values`, for gates that are in some layers only; left out, it counts up
    from 0.
    """

    tokens: tuple[str, ...]
    values: tuple[tuple[tuple[float | None, ...], ...], ...]
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers:
            object.__setattr__(self, "layers", tuple(range(len(self.values))))
        if len(self.layers) != len(self.values):
            raise RecordError(f"SampleGates has {len(self.values)} layers of values and names {len(self.layers)}")
        if len({len(heads) for heads in self.values}) > 1:
            raise RecordError(f"SampleGates needs equally many heads per layer, got {[len(h) for h in self.values]}")
        wrong = {len(row) for heads in self.values for row in heads} - {len(self.tokens)}
        if wrong:
            raise RecordError(f"SampleGates has {len(self.tokens)} tokens and rows of {sorted(wrong)} values")


@dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    """One training run, and what the trained model measured on the validation text."""

    FORMAT: ClassVar[str] = "gated-attn.run"
    VERSION: ClassVar[int] = 1

    name: str
    gate: str
    """Text of the `GateSpec`, or "none"."""
    seed: int
    recipe: dict[str, Any]
    """The resolved configuration: every value, defaults included."""
    parameters: int
    added_parameters: float
    """Gate parameters as a share of the ungated model's, before anything was narrowed to match them."""
    steps: int
    tokens: int
    loss: float | None
    """Validation loss, nats per token."""
    bits_per_byte: float | None
    """loss in bits per byte of text; None when the text has no byte count."""
    seconds_per_step: float | None
    first_token_share: float | None
    """Share of attention on the first token, a mean over layers, heads and all queries but the first."""
    gate_mean: float | None
    gate_below: float | None
    """Share of gate values below `GATE_SHUT`; None without a gate, as is `gate_mean`."""
    max_abs: float | None
    """Largest absolute value in the residual stream."""
    diverged: bool = False
    diverged_step: int | None = None
    largest_stable_lr: float | None = None
    """Largest learning rate of the sweep that did not diverge; None unless swept."""
    history: tuple[HistoryPoint, ...] = ()
    gates: tuple[GateStat, ...] = ()
    histogram_range: tuple[float, float] = (0.0, 1.0)
    sample: SampleGates | None = None
    measures: dict[str, Any] = field(default_factory=dict)
    """What only this task measures, by name, such as the mean gate on trigger tokens."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, machine, threads and date."""

    @property
    def perplexity(self) -> float | None:
        """exp(loss), per token."""
        return _exp(self.loss)


@dataclass(frozen=True, kw_only=True)
class CompareRow(Checked):
    """One run in a comparison: the numbers of its `RunRecord` that a table needs, with the same meanings."""

    gate: str
    seed: int
    parameters: int
    added_parameters: float
    loss: float | None
    bits_per_byte: float | None
    seconds_per_step: float | None
    first_token_share: float | None
    gate_mean: float | None
    gate_below: float | None
    max_abs: float | None
    diverged: bool = False
    largest_stable_lr: float | None = None

    @classmethod
    def from_run(cls, run: RunRecord) -> CompareRow:
        """The row of `run`."""
        return cls(**{part.name: getattr(run, part.name) for part in fields(cls)})

    @property
    def perplexity(self) -> float | None:
        """exp(loss), per token."""
        return _exp(self.loss)


@dataclass(frozen=True, kw_only=True)
class Paired(Checked):
    """A metric's difference, gate minus baseline, over `n` seeds that both finished, with its 95 % interval.

    `difference` is None when n is 0, `low` and `high` are None when n is below 2; see `paired_interval`.
    """

    gate: str
    metric: str
    difference: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class CompareRecord(Record):
    """Several gates trained from one recipe on the same data and the same seeds."""

    FORMAT: ClassVar[str] = "gated-attn.compare"
    VERSION: ClassVar[int] = 1

    recipe: str
    baseline: str
    """Gate text of the variant that the others are compared with, usually "none"."""
    rows: tuple[CompareRow, ...]
    paired: tuple[Paired, ...] = ()
    timing: dict[str, float] = field(default_factory=dict)
    """Step time of each gate relative to the baseline's."""
    runs: tuple[str, ...] = ()
    """Paths of the `RunRecord`s, relative to this record's file."""


def paired_interval(
    differences: Iterable[float], level: float = 0.95
) -> tuple[float | None, float | None, float | None]:
    """Mean of paired differences and its Student-t confidence interval: ``(mean, low, high)``.

    For differences d_1 .. d_n, one per seed, each the gate's value minus the baseline's on the same seed::

        mean -+ t * s / sqrt(n),    s^2 = sum((d_i - mean)^2) / (n - 1)

    where t is the (1 + level) / 2 quantile of Student's t with n - 1 degrees of freedom (Student, Biometrika 6, 1908).
    One difference has no spread, so its low and high are None; no difference at all gives three None.

    >>> paired_interval([-0.04, -0.03, -0.05])
    (-0.04, -0.0648..., -0.0151...)
    """
    values = [float(value) for value in differences]
    if not all(map(math.isfinite, values)):
        raise RecordError(f"an interval needs finite differences, got {values}; leave out the seeds that diverged")
    if not values:
        return None, None, None
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None, None
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    reach = t_quantile(n - 1, level) * deviation / math.sqrt(n)
    return mean, mean - reach, mean + reach


def verdict(paired: Paired) -> str:
    """What a paired difference shows, in words; an interval that includes 0 shows nothing, and the text says so.

    Of loss and bits per byte less is better; of any other metric the text says only lower or higher.
    """
    if paired.difference is None:
        return "no seed finished in both: nothing to compare"
    if paired.low is None or paired.high is None:
        return f"one seed: no interval (difference {paired.difference:+.4f})"
    if paired.low <= 0 <= paired.high:
        return f"no difference shown: {paired.difference:+.4f} [{paired.low:+.4f}, {paired.high:+.4f}] includes 0"
    less, more = ("better", "worse") if paired.metric in ("loss", "bits_per_byte") else ("lower", "higher")
    near, far = sorted((abs(paired.low), abs(paired.high)))
    return f"{less if paired.difference < 0 else more} by {abs(paired.difference):.4f} [{near:.4f}, {far:.4f}]"


def t_quantile(freedom: int, level: float) -> float:
    """The t with P(-t < T < t) = level for Student's t with `freedom` degrees of freedom.

    P(|T| > t) = I_x(freedom/2, 1/2) at x = freedom / (freedom + t^2), the regularised incomplete beta function
    (Abramowitz and Stegun 26.5.27), which grows with x: bisection over x in (0, 1).
    """
    if freedom < 1 or not 0 < level < 1:
        raise RecordError(f"an interval needs freedom >= 1 and 0 < level < 1, got {freedom} and {level}")
    low, high = 0.0, 1.0
    for _ in range(200):
        x = (low + high) / 2
        low, high = (x, high) if _incomplete_beta(x, freedom / 2, 0.5) < 1 - level else (low, x)
    return math.sqrt(freedom * (1 - low) / low)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8), evaluated by Lentz's method."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below this; above, use the symmetry
        return 1 - _incomplete_beta(1 - x, b, a)
    tiny = 1e-300
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    value, c, d = 1.0, 1.0, 0.0
    for i in range(1, 1000):
        m = i // 2
        term = -(a + m) * (a + b + m) if i % 2 else m * (b - m)
        term *= x / ((a + i - 1) * (a + i))
        d = 1 / (1 + term * d or tiny)
        c = 1 + term / c or tiny
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front / (a * value)


def _exp(loss: float | None) -> float | None:
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
