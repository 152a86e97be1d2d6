"""Plausible made-up records, as fixtures that make them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from gated_attn.records import (
    HISTOGRAM_BINS,
    AttentionStat,
    CompareRecord,
    CompareRow,
    Diagnosis,
    Evidence,
    GateHealth,
    GateReading,
    GateStat,
    HeadStat,
    HealthPoint,
    HealthRecord,
    HealthWarning,
    HistoryPoint,
    Paired,
    Pattern,
    RunRecord,
    SampleGates,
    SinkLayer,
    StreamStat,
    TokenView,
    TransferRecord,
    paired_interval,
)
from tests.report.browser import CHROMIUM, Browser

HEADWISE = "output:headwise:sigmoid,bias=none"
ELEMENTWISE = "output:elementwise:sigmoid,bias=none"
SENTENCE = (
    "<b>",
    "ROMEO",
    ":",
    "\n",
    " But",
    " soft",
    "&",
    "\t",
    "\x07",
    '"what',
    " light'",
    "\u2028",
    "\u202e",
    " ",
    "日本",
)


def build_run(
    gate: str = HEADWISE,
    seed: int = 0,
    *,
    layers: int = 2,
    heads: int = 3,
    gain: float = 0.04,
    tokens: tuple[str, ...] = SENTENCE,
    **changes: object,
) -> RunRecord:
    """A run whose loss falls like a real one; `changes` replace fields."""
    noise = random.Random(f"{gate} {seed}")
    gated = gate != "none"
    drop = gain if gated else 0.0
    history = []
    for step in range(0, 2001, 25):
        loss = 1.63 - drop + 3.9 * math.exp(-step / 180) + 0.4 * math.exp(-step / 900) + noise.gauss(0, 0.008)
        history.append(
            HistoryPoint(
                step=step,
                train_loss=loss - 0.02 + noise.gauss(0, 0.04) if step else None,
                eval_loss=loss if step % 100 == 0 else None,
                gate_mean=0.5 - 0.2 * step / 2000 if gated else None,
            )
        )
    stats, values = [], []
    for layer in range(layers if gated else 0):
        values.append([[noise.betavariate(0.8, 2.0) for _ in tokens] for _ in range(heads)])
        for head in range(heads):
            a, b = noise.uniform(0.4, 3), noise.uniform(0.6, 4)
            sample = [noise.betavariate(a, b) for _ in range(300)]
            counts = [0] * HISTOGRAM_BINS
            for value in sample:
                counts[min(int(value * HISTOGRAM_BINS), HISTOGRAM_BINS - 1)] += 1
            below = sum(value < 0.1 for value in sample) / 300
            stats.append(GateStat(layer=layer, head=head, mean=sum(sample) / 300, below=below, histogram=counts))
    fields: dict[str, object] = {
        "name": f"{gate}-seed{seed}",
        "gate": gate,
        "seed": seed,
        "recipe": {"steps": 2000, "optimizer": {"lr": 0.003, "betas": [0.9, 0.95]}, "data": "shakespeare"},
        "parameters": 812_345 + (23 if gated else 0),
        "added_parameters": 0.0025 if gated else 0.0,
        "steps": 2000,
        "tokens": 3_072_000,
        "loss": history[-1].eval_loss,
        "bits_per_byte": history[-1].eval_loss / math.log(2),
        "seconds_per_step": 0.135 + 0.004 * gated,
        "first_token_share": 0.31 - 0.24 * gated + noise.gauss(0, 0.01),
        "gate_mean": 0.347 if gated else None,
        "gate_below": 0.3664 if gated else None,
        "max_abs": 83.71 - 50 * gated,
        "history": history,
        "gates": stats,
        "sample": SampleGates(tokens=tokens, values=values) if gated else None,
        "environment": {
            "versions": {"torch": "2.13.0", "python": "3.12"},
            "machine": "x86_64",
            "threads": 2,
            "date": "2026-01-02",
        },
    }
    return RunRecord(**{**fields, **changes})  # type: ignore[arg-type]


def build_compare(runs: list[RunRecord], baseline: str = "none", metric: str = "bits_per_byte") -> CompareRecord:
    """The comparison that a lab would write for `runs`."""
    values = {(run.gate, run.seed): getattr(run, metric) for run in runs if not run.diverged}
    gates = list(dict.fromkeys(run.gate for run in runs))
    paired = []
    for gate in gates:
        if gate != baseline:
            seeds = [seed for other, seed in values if other == gate and (baseline, seed) in values]
            mean, low, high = paired_interval(values[gate, seed] - values[baseline, seed] for seed in seeds)
            paired.append(Paired(gate=gate, metric=metric, difference=mean, low=low, high=high, n=len(seeds)))
    return CompareRecord(
        recipe="shakespeare",
        baseline=baseline,
        rows=tuple(CompareRow.from_run(run) for run in runs),
        paired=tuple(paired),
        timing={gate: 1.0 if gate == baseline else 1.037 for gate in gates},
        runs=tuple(f"{run.name}/run.json" for run in runs),
    )


def build_study(seeds: int = 3, **changes: object) -> tuple[CompareRecord, list[RunRecord]]:
    """No gate, headwise and elementwise over `seeds` seeds."""
    gains = {"none": 0.0, HEADWISE: 0.037, ELEMENTWISE: 0.0}
    runs = [build_run(gate, seed, gain=gains[gate], **changes) for gate in gains for seed in range(seeds)]  # type: ignore[arg-type]
    return build_compare(runs), runs


DEFINITIONS = {
    "first_token_share": "mean of A[t, 0] over 118 queries; query 0 left out",
    "sink_rate": "share above eps = 0.3, T = 64",
    "entropy": "mean of -sum A ln A / ln n",
    "max_abs": "largest |x|",
    "gate_mean": "mean gate value",
}


def build_head(number: int, draw: random.Random, **changes: object) -> HeadStat:
    """One head's numbers, none of them round."""
    share = draw.random()
    fields: dict[str, object] = {
        "head": number, "first_token_share": share, "first_token_share_all": share + 0.003, "sink_share": share * 0.9,
        "sink_rate": float(share > 0.3), "strongest_share": share, "strongest_position": 0, "strongest_token": "<s>",
        "strongest_early_share": share * 0.8, "entropy": draw.random(), "effective_rank": draw.uniform(1, 17),
        "output_norm": draw.uniform(0.1, 3), "dead": False,
    }  # fmt: skip
    return HeadStat(**{**fields, **changes})  # type: ignore[arg-type]


def build_gate(layer: int, heads: int, draw: random.Random, name: str = "") -> GateReading:
    """One gate's numbers."""
    means = [draw.random() for _ in range(heads)]
    return GateReading(
        name=name or f"model.layers.{layer}.self_attn.attn_gate", layer=layer, spec=HEADWISE, mean=means,
        median=[m * 0.97 for m in means], below_01=[(1 - m) / 3 for m in means], below_005=[(1 - m) / 5 for m in means],
        above_095=[m / 7 for m in means], largest=[min(1.0, m + 0.11) for m in means], token_entropy=[0.91] * heads,
        by_class={"punctuation": draw.random(), "word start": draw.random()},
    )  # fmt: skip


def build_diagnosis(
    heads: tuple[int, ...] = (3, 5, 2),
    *,
    gated: bool = True,
    seed: int = 0,
    tokens: tuple[str, ...] = SENTENCE,
    **changes: object,
) -> Diagnosis:
    """A diagnosis of a decoder with so many heads in each layer; head 1 of layer 1 is dead."""
    draw = random.Random(seed)
    modules, streams = [], []
    for layer, count in enumerate(heads):
        stats = [build_head(i, draw, dead=(layer, i) == (1, 1)) for i in range(count)]
        name = f"model.layers.{layer}.self_attn"
        modules.append(AttentionStat(name=name, layer=layer, kind="self", queries=118, heads=stats))
        streams.append(
            StreamStat(
                name=f"model.layers.{layer}", layer=layer, max_abs=draw.uniform(3, 4000), median_abs=0.7, massive=layer * 3,
                inf_norm=draw.uniform(3, 4000), kurtosis=draw.uniform(3, 900), token_norm_ratio=draw.uniform(1, 90),
                token_norm_position=7,
            )
        )  # fmt: skip
    n = len(tokens)

    def sample(layers: int, width: int) -> SampleGates:
        return SampleGates(
            tokens=tokens, values=[[[draw.random() for _ in tokens] for _ in range(width)] for _ in range(layers)]
        )

    weights = [[1 / (t + 1) if s <= t else 0.0 for s in range(n)] for t in range(n)]
    view = TokenView(
        tokens=tokens, gates=sample(len(heads), 2) if gated else None, first=sample(len(heads), min(heads)),
        patterns=[Pattern(name=modules[i].name, layer=i, head=1, weights=weights) for i in range(min(2, len(heads)))],
    )  # fmt: skip
    fields: dict[str, object] = {
        "model": "tiny", "text": "a poem, sha256 0123456789ab", "sequences": 2, "tokens": 120, "shortest": 53, "longest": 67,
        "parameters": 812_345, "attn_implementation": "sdpa", "dtype": "float32", "sink_tokens": 64, "sink_eps": 0.3,
        "attention": modules, "streams": streams, "gates": [build_gate(i, c, draw) for i, c in enumerate(heads)] if gated else [],
        "view": view, "definitions": DEFINITIONS, "seconds": 3.5, "plain_seconds": 1.5, "peak_extra_bytes": 7 << 20,
        "environment": {"torch": "2.13.0"},
    }  # fmt: skip
    return Diagnosis(**{**fields, **changes})  # type: ignore[arg-type]


def build_health(steps: int = 5, gates: int = 3) -> HealthRecord:
    """Gates that shut over the steps, and a warning."""
    points = []
    for step in range(steps):
        share = 0.9 - 0.8 * step / steps
        points.append(
            HealthPoint(
                step=10 * step + 1,
                gates=[
                    GateHealth(
                        name=f"model.layers.{i}.self_attn.attn_gate", spec=HEADWISE, mean=[share, share / (i + 1)],
                        below=[1 - share, 0.25], above=[share / 3, 0.125], weight_norm=1.37 + i + step, change=0.013 * (step + 1),
                        grad_norm=0.0071 / (step + i + 1),
                    )
                    for i in range(gates)
                ],
            )
        )  # fmt: skip
    return HealthRecord(
        low=0.05,
        high=0.95,
        points=points,
        warnings=[HealthWarning(step=11, text="model.layers.1 saturated: 97 % shut")],
    )


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One headless Chromium; skips without it."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with Browser() as opened:
        yield opened


@pytest.fixture
def make_diagnosis() -> Callable[..., Diagnosis]:
    """Make a diagnosis: `make_diagnosis(heads, gated=, seed=, tokens=, **fields)`."""
    return build_diagnosis


@pytest.fixture
def make_run() -> Callable[..., RunRecord]:
    """Make one run: `make_run(gate, seed, layers=, heads=, gain=, tokens=, **fields)`."""
    return build_run


@pytest.fixture
def make_compare() -> Callable[..., CompareRecord]:
    """Make the comparison of runs: `make_compare(runs, baseline, metric)`."""
    return build_compare


@pytest.fixture
def make_study() -> Callable[..., tuple[CompareRecord, list[RunRecord]]]:
    """Make a comparison and its runs, of no gate, headwise (better) and elementwise (no difference)."""
    return build_study


def build_transfer(*, gated: bool = True) -> TransferRecord:
    """A transfer of a model of three layers: one without sinks, one whose gates were fitted, one that is read from scores."""
    before = Evidence(perplexity={"prose": 20.0, "all": 20.0}, max_abs=24960.0, first_token_share=0.3, kurtosis=77000.0)
    after = Evidence(
        perplexity={"prose": 20.1, "all": 20.1}, max_abs=1040.0, first_token_share=0.03, w4a16_perplexity=24.0
    )
    source = "hidden" if gated else None
    return TransferRecord(
        model="tiny", tier="hidden", spec="output:headwise:sigmoid,bias=0,fill", sink=1, sink_text="<s>", texts={"prose": "a text"},
        tokens=48_000, held_out_tokens=6_000, steps=20 if gated else 0, losses=((10, 0.2), (20, 0.1)) if gated else (),
        layers=(
            SinkLayer(name="model.layers.0.self_attn", layer=0, share=(0.01, 0.0), source="lse" if gated else None),
            SinkLayer(name="model.layers.1.self_attn", layer=1, share=(0.4, 0.02), source=source, r2=(0.8, 0.6) if gated else None),
            SinkLayer(name="model.layers.2.self_attn", layer=2, share=(0.6, 0.7), source=source, r2=(0.9, -0.1) if gated else None),
        ),
        others=tuple(f"model.layers.1.self_attn, head 1: '.' at {i}, 0.40" for i in range(14)), parameters=1000,
        added_parameters=12 if gated else 0, seconds=61.0, before=before, after=after if gated else before,
        definitions={"perplexity": "exp of the loss", "max_abs": "largest |x|"}, environment={},
    )  # fmt: skip
