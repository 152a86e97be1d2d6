"""The first tokens of a diagnosis, one by one: gates and shares over the text, and the weights of chosen heads.

Everything drawn has its numbers beside it as data for the page's script; without it, tooltips tell them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gated_attn.records import Diagnosis, Pattern, SampleGates
from gated_attn.report import colours, table
from gated_attn.report.page import script_json, visible

STRONGEST = 4
"""So many keys of a query are named in its tooltip."""

Values = Sequence[Sequence[Sequence[float | None]]]


def over_text(sample: SampleGates | None, diagnosis: Diagnosis, heading: str) -> dict[str, Any] | None:
    """What the template needs to shade the text: means over layers and heads, means per layer, and the data of every head."""
    if sample is None or not sample.values or not sample.tokens:
        return None
    means = [[mean(column) for column in zip(*heads, strict=True)] for heads in sample.values]
    whole = [mean(column) for column in zip(*means, strict=True)]
    per_head = [[mean(column) for column in zip(*rows, strict=True)] for rows in zip(*sample.values, strict=True)]
    known = [v for heads in sample.values for row in heads for v in row if v is not None]
    low, high = min(0.0, *known, 0.0), max(1.0, *known, 1.0)
    data = [[_thousandths(row) for row in (whole, *per_head)]]
    data += [
        [_thousandths(row) for row in (whole_layer, *heads)]
        for whole_layer, heads in zip(means, sample.values, strict=True)
    ]
    names = layer_names(sample, diagnosis)
    return {
        "heading": heading,
        "low": low,
        "high": high,
        "layers": [{"name": name, "tokens": shaded(sample.tokens, row, low, high)} for name, row in zip(names, means, strict=True)],
        "tokens": shaded(sample.tokens, whole, low, high),
        "heads": len(sample.values[0]),
        "data": script_json(data),
    }  # fmt: skip


def layer_names(sample: SampleGates, diagnosis: Diagnosis) -> list[str]:
    """What each entry of `values` is of: its layer, and which of the modules of that layer where there are several."""
    modules = [f"{module.layer}, {module.kind}, {module.name}" for module in diagnosis.attention]
    if len(set(sample.layers)) == len(sample.layers):
        return [str(layer) for layer in sample.layers]
    if tuple(module.layer for module in diagnosis.attention) == sample.layers:
        return modules
    seen: dict[int, int] = {}
    names = []
    for layer in sample.layers:
        seen[layer] = seen.get(layer, 0) + 1
        names.append(f"{layer} ({seen[layer]})")
    return names


def shaded(tokens: Sequence[str], values: Sequence[float | None], low: float, high: float) -> list[dict[str, Any]]:
    """Each token as it is shown, how strongly, and its value in words."""
    rows = []
    for token, value in zip(tokens, values, strict=True):
        text, ends_line = visible(token)
        share = 0.0 if value is None else min(max((value - low) / (high - low), 0.0), 1.0)
        rows.append(
            {"text": text, "ends_line": ends_line, "share": f"{share:.3f}", "value": table.number(value, ".3f")}
        )
    return rows


@dataclass(frozen=True)
class Head:
    """A head whose weights are drawn, before and after where both are there."""

    title: str
    drawings: tuple[tuple[str, Pattern], ...]


def chosen_heads(after: Diagnosis, before: Diagnosis | None) -> list[Head]:
    """The heads of `after`, then those that only `before` has."""
    new, old = _patterns(after), _patterns(before) if before else {}
    heads = []
    for key in (*new, *(key for key in old if key not in new)):
        one = new.get(key) or old[key]
        drawn = [("before", old[key])] if key in old else []
        drawn += [("after" if before else "", new[key])] if key in new else []
        heads.append(Head(f"layer {one.layer}, head {one.head}, {one.name}", tuple(drawn)))
    return heads


def _patterns(diagnosis: Diagnosis) -> dict[tuple[str, int], Pattern]:
    view = diagnosis.view
    return {} if view is None else {(one.name, one.head): one for one in view.patterns if one.weights}


def drawn(pattern: Pattern, tokens: Sequence[str], title: str) -> str:
    """The weights as SVG: queries downwards, keys to the right, one path for each colour, a tooltip for each query."""
    rows, columns = len(pattern.weights), max(map(len, pattern.weights))
    cells: dict[int, list[str]] = {}
    for t, row in enumerate(pattern.weights):
        for s, weight in enumerate(row):
            step = colours.level(weight, 0.0, 1.0)
            if step:
                cells.setdefault(step, []).append(f"M{s} {t}h1v1h-1z")
    parts = [f'<rect class="k0" width="{columns}" height="{rows}"/>']
    parts += [f'<path class="k{step}" d="{"".join(cells[step])}"/>' for step in sorted(cells)]
    for t, row in enumerate(pattern.weights):
        told = escape(_query_told(t, row, tokens))
        parts.append(f'<rect class="row" y="{t}" width="{columns}" height="1"><title>{told}</title></rect>')
    parts += [f'<text x="-1" y="{t + 0.8}" text-anchor="end">{t}</text>' for t in range(0, rows, 8)]
    parts += [f'<text x="{s + 0.5}" y="-0.7" text-anchor="middle">{s}</text>' for s in range(0, columns, 8)]
    label = escape(title, quote=True)
    size = max(rows, columns) / 48  # so that numbers are as large in a small pattern
    style = f'style="font-size:{2.1 * size:.3f}px"'
    left, top = 3.6 * size + 1, 2.6 * size + 0.6
    box = f"{-left:.2f} {-top:.2f} {columns + left:.2f} {rows + top:.2f}"
    return f'<svg class="pattern" {style} viewBox="{box}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def pattern_data(pattern: Pattern) -> list[list[int]]:
    """The weights in thousandths, for the page's script."""
    return [[round(1000 * weight) for weight in row] for row in pattern.weights]


def _query_told(t: int, row: Sequence[float], tokens: Sequence[str]) -> str:
    best = sorted(range(len(row)), key=lambda s: -row[s])[:STRONGEST]
    keys = ", ".join(f"{named(s, tokens)} {row[s]:.3f}" for s in best if row[s] > 0)
    return f"query {named(t, tokens)} looks at {keys or 'nothing'}"


def named(place: int, tokens: Sequence[str]) -> str:
    """A position and its token, if that is known."""
    return f"{place} {visible(tokens[place])[0]}" if place < len(tokens) else str(place)


def _thousandths(row: Sequence[float | None]) -> list[int | None]:
    return [None if value is None else round(value * 1000) for value in row]


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
