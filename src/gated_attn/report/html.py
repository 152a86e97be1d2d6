"""One self-contained HTML file for a comparison: no network, no external fonts or scripts, readable without JavaScript.

The page is `templates/report.html` with `report.css` and `report.js` written into it; this module turns records into
what the template shows. Everything that comes from a record is escaped, either by the template or in `figures`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gated_attn.errors import RecordError
from gated_attn.records import CompareRecord, CompareRow, GateStat, HistoryPoint, RunRecord, SampleGates, write_text
from gated_attn.report import figures, table
from gated_attn.report.figures import Interval, Line, Point
from gated_attn.report.page import capped, fill, flat, spread, visible

LAYERS, HEADS, TOKENS = 12, 16, 160
"""Most layers, heads per layer (of the histograms) and tokens that are drawn; the page says when there are more."""


def write_report(compare: CompareRecord, runs: Sequence[RunRecord], path: str | os.PathLike[str]) -> Path:
    """Write the report on `compare` and its `runs` to `path` as one HTML file, and return the path.

    `runs` may lack history, gates or samples, and may be fewer than the rows: what is missing is not drawn. A run whose
    gate the comparison does not list is a `RecordError`. Needs jinja2, of the extra `lab`.
    """
    return write_text(path, render_html(compare, runs))


def write_run_report(run: RunRecord, path: str | os.PathLike[str]) -> Path:
    """Write the report on one run, compared with nothing, to `path`, and return the path."""
    alone = CompareRecord(recipe=run.name, baseline=run.gate, rows=(CompareRow.from_run(run),))
    return write_report(alone, [run], path)


def render_html(compare: CompareRecord, runs: Sequence[RunRecord]) -> str:
    """The report on `compare` and its `runs` as the text of one HTML file; the same records give the same text."""
    return fill("report.html", _context(compare, runs))


def _context(compare: CompareRecord, runs: Sequence[RunRecord]) -> dict[str, Any]:
    summaries = table.summarize(compare)
    gates = [summary.gate for summary in summaries]
    stray = [run.name for run in runs if run.gate not in gates]
    if stray:
        raise RecordError(f"runs {stray} have gates that the comparison does not list; it lists {gates}")
    heads = table.columns(compare)
    shown = [run for gate in gates if (run := _shown_run(runs, gate)) is not None]
    return {
        "compare": compare,
        "alone": gates == [compare.baseline],
        "several": len({row.seed for row in compare.rows}) > 1,
        "has_intervals": any(pair.n > 1 for pair in table.headline_pairs(compare).values()),
        "verdicts": table.verdict_lines(compare),
        "intervals": _intervals_figure(compare, gates),
        "legend": [(figures.swatch(i), gate, gate == compare.baseline) for i, gate in enumerate(gates)],
        "columns": heads,
        "rows": [[column.cell(summary) for column in heads] for summary in summaries],
        "runs": [_run_cells(row) for row in compare.rows],
        "panels": _panels(compare, runs, gates),
        "histograms": [_histograms(run) for run in shown if run.gates],
        "samples": [_sample(run, run.sample) for run in shown if run.sample and run.sample.values],
        "recipe": flat(runs[0].recipe) if runs else [],
        "environment": flat(runs[0].environment) if runs else [],
    }


def _shown_run(runs: Sequence[RunRecord], gate: str) -> RunRecord | None:
    """The run whose gates are drawn: the first seed that finished, since the heads of two seeds do not correspond."""
    mine = sorted((run for run in runs if run.gate == gate), key=lambda run: (run.diverged, run.seed))
    return mine[0] if mine else None


def _run_cells(row: CompareRow) -> list[str]:
    number = table.number
    return [
        row.gate,
        str(row.seed),
        f"{row.parameters:,}",
        "diverged" if row.diverged else number(row.loss, ".4f"),
        number(row.bits_per_byte, ".4f"),
        number(row.perplexity, ".3f"),
        number(row.seconds_per_step, ".4f"),
        number(row.gate_mean, ".3f"),
        number(row.gate_below, ".1%"),
        number(row.first_token_share, ".1%"),
        number(row.max_abs, ",.1f"),
        number(row.largest_stable_lr, ".2g"),
    ]


def _intervals_figure(compare: CompareRecord, gates: Sequence[str]) -> str:
    pairs = [pair for pair in table.headline_pairs(compare).values() if pair.difference is not None]
    rows = [
        Interval(gates.index(pair.gate), pair.gate, pair.difference, pair.low, pair.high)
        for pair in pairs
        if pair.gate in gates and pair.difference is not None
    ]
    metric = table.METRIC_NAMES[pairs[0].metric] if pairs and pairs[0].metric in table.METRIC_NAMES else "metric"
    told = "; ".join(f"{row.label} {row.value:+.4f}" for row in rows)
    return figures.intervals(rows, f"Difference in {metric} from {compare.baseline}", told)


def _panels(compare: CompareRecord, runs: Sequence[RunRecord], gates: Sequence[str]) -> list[tuple[str, str, str]]:
    """(heading, figure, remark) of each panel of curves that the runs have data for."""
    train = _curves(runs, gates, lambda point: point.train_loss)
    evaluated = _curves(runs, gates, lambda point: point.eval_loss)
    remark = "The first fifth of training may leave the top of the figure."
    drawn = [
        ("Training loss", _figure(train, "Training loss over steps", clip=True), remark),
        ("Validation loss", _figure(evaluated, "Validation loss over steps", clip=True), remark),
        (
            f"Validation loss minus {compare.baseline}",
            _figure(_differences(compare, runs, gates), "Paired difference of validation loss over steps", zero=True),
            "Same seed, same step; below the line is better than the baseline.",
        ),
        ("Gate mean", _figure(_curves(runs, gates, lambda point: point.gate_mean), "Gate mean over steps"), ""),
    ]
    return [panel for panel in drawn if panel[1]]


def _figure(lines: Sequence[Line], title: str, *, zero: bool = False, clip: bool = False) -> str:
    last = [f"{line.label} {line.points[-1][1]:.4f}" for line in lines if line.points and not line.thin]
    return figures.curves(lines, title, f"Last values: {'; '.join(last)}.", zero=zero, clip=clip)


def _curves(
    runs: Sequence[RunRecord], gates: Sequence[str], value: Callable[[HistoryPoint], float | None]
) -> list[Line]:
    """Per gate a thin line for each seed and the mean of the seeds that finished; one seed alone is drawn in full."""
    lines = []
    for index, gate in enumerate(gates):
        mine = [run for run in runs if run.gate == gate]
        tracks = [(run, tuple((float(p.step), y) for p in run.history if (y := value(p)) is not None)) for run in mine]
        for run, points in tracks:
            label = f"{gate}, seed {run.seed}"
            lines.append(Line(index, points, label, len(mine) > 1, _diverged_at(run, points)))
        if len(mine) > 1:
            mean = figures.average([points for run, points in tracks if points and not run.diverged])
            lines.append(Line(index, mean, f"{gate}, mean over seeds"))
    return lines


def _diverged_at(run: RunRecord, points: Sequence[Point]) -> float | None:
    if not run.diverged or not points:
        return None
    return points[-1][0] if run.diverged_step is None else float(run.diverged_step)


def _differences(compare: CompareRecord, runs: Sequence[RunRecord], gates: Sequence[str]) -> list[Line]:
    """Per gate the validation loss minus the baseline's, seed by seed and as the mean over seeds."""
    tracks = {
        (run.gate, run.seed): {float(p.step): p.eval_loss for p in run.history if p.eval_loss is not None}
        for run in runs
        if not run.diverged
    }
    lines = []
    for index, gate in enumerate(gates):
        if gate == compare.baseline:
            continue
        pairs: list[tuple[int, tuple[Point, ...]]] = []
        for other, seed in tracks:
            base = tracks.get((compare.baseline, seed), {})
            if other == gate:
                points = tuple((x, y - base[x]) for x, y in tracks[gate, seed].items() if x in base)
                pairs += [(seed, points)] if points else []
        lines += [Line(index, points, f"{gate}, seed {seed}", len(pairs) > 1) for seed, points in pairs]
        if len(pairs) > 1:
            lines.append(Line(index, figures.average([points for _, points in pairs]), f"{gate}, mean over seeds"))
    return lines


def _histograms(run: RunRecord) -> dict[str, Any]:
    by_layer: dict[int, list[tuple[GateStat, str]]] = {}
    layers = sorted({stat.layer for stat in run.gates})
    per_layer = {layer: [stat for stat in run.gates if stat.layer == layer] for layer in layers}
    for layer in spread(list(per_layer), LAYERS):
        stats = spread(sorted(per_layer[layer], key=lambda stat: stat.head), HEADS)
        by_layer[layer] = [(stat, figures.histogram(stat, run.histogram_range)) for stat in stats]
    notes = [
        capped("layers", len(per_layer), LAYERS),
        capped("heads per layer", max(map(len, per_layer.values())), HEADS),
    ]
    return {"run": run, "layers": by_layer, "notes": [note for note in notes if note]}


def _sample(run: RunRecord, sample: SampleGates) -> dict[str, Any]:
    """The sentence once per layer, shaded by the mean over heads; `data` holds every head for the script to show."""
    tokens = [visible(token) for token in sample.tokens[:TOKENS]]
    low, high = run.histogram_range
    layers, data = [], []
    for index in spread(list(range(len(sample.values))), LAYERS):
        heads = [row[:TOKENS] for row in sample.values[index]]
        means = [_mean(column) for column in zip(*heads, strict=True)]
        shaded = [_shaded(*pair, low, high) for pair in zip(tokens, means, strict=True)]
        layers.append({"name": sample.layers[index], "tokens": shaded})
        data.append([[None if v is None else round(v * 1000) for v in row] for row in (means, *heads)])
    notes = [capped("layers", len(sample.values), LAYERS), capped("tokens", len(sample.tokens), TOKENS, first=True)]
    return {
        "run": run,
        "layers": layers,
        "heads": len(sample.values[0]),
        "data": json.dumps(data, separators=(",", ":")),
        "notes": [note for note in notes if note],
    }


def _shaded(token: tuple[str, bool], value: float | None, low: float, high: float) -> dict[str, Any]:
    share = 0.0 if value is None else min(max((value - low) / (high - low), 0.0), 1.0)
    return {"text": token[0], "ends_line": token[1], "share": f"{share:.3f}", "value": table.number(value, ".3f")}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
