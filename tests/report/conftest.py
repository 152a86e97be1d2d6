"""Plausible made-up records, as fixtures that make them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from gated_attn.records import (
    HISTOGRAM_BINS,
    CompareRecord,
    CompareRow,
    GateStat,
    HistoryPoint,
    Paired,
    RunRecord,
    SampleGates,
    paired_interval,
)

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
