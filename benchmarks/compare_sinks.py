"""Ways to be rid of a pretrained model's sinks, on the same tokens with the same number of steps: `compare_sinks.py [STEPS]`.

SmolLM2; gates alone train, on the rows and in the order of the seed. Appends a row for each way to `sinks.csv`. Takes 40 minutes on
two cores for 60 steps.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import csv
import datetime
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from gated_attn.adapt.corpus import Corpus, corpus, standard_texts
from gated_attn.adapt.distil import distil
from gated_attn.adapt.evidence import FEW, evidence
from gated_attn.adapt.perplexity import cache_word, nll
from gated_attn.adapt.quantize import quantized
from gated_attn.adapt.sinks import absorb_sink
from gated_attn.adapt.transfer import Plan, even_rows, find_sink, transfer
from gated_attn.hf.attach import attach
from gated_attn.hf.modes import evaluating
from gated_attn.hf.pretrained import load_sample, tokenizer
from gated_attn.records import Evidence

TABLE = Path(__file__).with_name("sinks.csv")
COLUMNS = (
    "date", "way", "steps", "technical", "literature", "chat", "all", "first_token_share", "sink_rate", "strongest_early_share",
    "max_abs", "kurtosis", "unrounded", "w8a8_static", "w8a8_dynamic", "w4a16", "kv8", "kv4",
)  # fmt: skip


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    words = tokenizer("smollm2")
    sink = find_sink(words)
    data = corpus(words, {kind: documents for kind, _, documents in standard_texts(words)}, 256)
    few = {kind: ids_NT[:FEW] for kind, ids_NT in data.held_out.rows.items()}
    data = replace(data, held_out=replace(data.held_out, rows=few, stream_T=None))
    plan = Plan(tier="hidden", sink=sink, steps=steps, parts=("perplexity",))
    for way, run in ways(data, plan).items():
        with tempfile.TemporaryDirectory() as folder:
            found = run(Path(folder))
        append(way, steps if "steps" in way else 0, found)
        print(f"{way:44} {found}", flush=True)


def ways(data: Corpus, plan: Plan) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """Name -> what builds the model and measures it."""

    def unchanged(folder: Path) -> dict[str, Any]:
        return measured(load_sample("smollm2"), data, plan.sink)

    def prefix(folder: Path) -> dict[str, Any]:
        return with_prefix(load_sample("smollm2"), data, plan.sink)

    def exact(folder: Path) -> dict[str, Any]:
        return measured(absorb_sink(load_sample("smollm2"), plan.sink), data, None)

    def tuned(spec: str) -> Callable[[Path], dict[str, Any]]:
        def run(folder: Path) -> dict[str, Any]:
            torch.manual_seed(plan.seed)
            model = attach(load_sample("smollm2"), spec)
            rows = even_rows(data.calibration, plan)
            distil(
                model,
                rows,
                folder,
                sink=None,
                steps=plan.steps,
                lr=plan.lr,
                batch=plan.batch,
                seed=plan.seed,
                teacher=False,
            )
            return measured(model, data, None)

        return run

    def moved(steps: int) -> Callable[[Path], dict[str, Any]]:
        def run(folder: Path) -> dict[str, Any]:
            model = load_sample("smollm2")
            transfer(model, data, replace(plan, steps=steps), folder)
            return measured(model, data, None)

        return run

    return {
        "no change, BOS in front": unchanged,
        "fixed key and value of BOS (arXiv:2406.12016)": prefix,
        "exact tier": exact,
        "2sigmoid, zero init, fine-tuned, steps": tuned("output:headwise:2sigmoid,init=identity"),
        "sigmoid, random init, fine-tuned, steps": tuned("output:headwise:sigmoid"),
        "hidden tier, fitted": moved(0),
        "hidden tier, distilled, steps": moved(plan.steps),
    }


def measured(model: Any, data: Corpus, sink: int | None) -> dict[str, Any]:
    """The row of a model."""
    *_, (_, found) = evidence(model, data.held_out, sink=sink, parts=("attention", "quantisation"))
    assert isinstance(found, Evidence)
    names = ("unrounded", "w8a8_static", "w8a8_dynamic", "w4a16", "kv8", "kv4")
    row = {name: getattr(found, name) for name in COLUMNS[7:12]}
    return found.perplexity | row | {name: getattr(found, f"{name}_perplexity") for name in names}


def with_prefix(model: Any, data: Corpus, sink: int) -> dict[str, Any]:
    """The row of the model with the sink's keys and values in the cache of every row; its attention is that of no change."""

    def cache() -> DynamicCache:
        made = DynamicCache()
        with evaluating(model):
            model(input_ids=torch.full((4, 1), sink), use_cache=True, **{cache_word(model): made})
        return made

    def perplexities() -> Iterator[tuple[str, float]]:
        for kind, ids_NT in data.held_out.rows.items():
            yield kind, nll(model, ids_NT, cache=cache).perplexity
        yield "all", nll(model, torch.cat(list(data.held_out.rows.values())), cache=cache).perplexity

    row: dict[str, Any] = dict(perplexities())
    for scheme in ("none", "w8a8-static", "w8a8-dynamic", "w4a16"):
        # Ranges are learned of the same calls: what the cache was filled with stands in full precision.
        ranges = [
            {"input_ids": ids_BT, "use_cache": True, cache_word(model): cache()}
            for ids_BT in data.held_out.ranges.split(4)
        ]
        kept = [cache() for _ in range(sum(len(ids) for ids in data.held_out.rows.values()) // 4)]
        with quantized(model, scheme, calibration=ranges):
            key = "unrounded" if scheme == "none" else scheme.replace("-", "_")
            row[key] = nll(model, torch.cat(list(data.held_out.rows.values())), cache=kept.pop).perplexity
    return row


def append(way: str, steps: int, found: dict[str, Any]) -> None:
    """A row of the table, with what is known of it."""
    new = not TABLE.exists()
    with TABLE.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        if new:
            table.writerow(COLUMNS)
        told = {"date": datetime.date.today().isoformat(), "way": way, "steps": steps} | found
        table.writerow([f"{value:.5g}" if isinstance(value := told.get(name), float) else value for name in COLUMNS])


if __name__ == "__main__":
    main()
