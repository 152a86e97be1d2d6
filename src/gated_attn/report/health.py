"""The report of a `HealthRecord`: every gate over the steps of a training run, and what was warned of."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gated_attn.records import GateHealth, HealthRecord, write_text
from gated_attn.report import colours, figures, heatmap, png
from gated_attn.report.figures import Line, Point
from gated_attn.report.heatmap import Cell, Grid, Row, scaled
from gated_attn.report.maps import Picture
from gated_attn.report.page import capped, fill, spread
from gated_attn.report.pictures import write_pictures
from gated_attn.report.terms import SIZE, Term

STEPS = 24
"""So many steps are columns of a heatmap, evenly spaced; the curves have them all."""

NORMS = ("weight_norm", "grad_norm", "change")


def write_health_report(
    record: HealthRecord, path: str | os.PathLike[str], title: str = "run", *, pictures: bool = True
) -> Path:
    """Write the report to `path` as one HTML file, each picture beside it as `NAME-*.png`, and return the path.

    `pictures=False` leaves the PNGs out. MissingExtraError without jinja2 or matplotlib, of the extra `lab`.
    """
    page, target = render_health(record, title), Path(path)
    if pictures:
        note = _basis(record, title)
        drawn = {
            one.key.replace("_", "-"): png.heatmaps(one.title, f"{one.definition}. {note}", one.groups)
            for one in pictures_of(record)
        }
        write_pictures(drawn, target)
    return write_text(target, page)


def render_health(record: HealthRecord, title: str = "run") -> str:
    """The report as the text of one HTML file; the same record gives the same text."""
    terms = shown_terms(record)
    steps = [point.step for point in record.points]
    return fill("health.html", {
        "title": title,
        "colours": colours.css(),
        "facts": _facts(record),
        "basis": _basis(record, title),
        "warnings": record.warnings,
        "panels": _panels(record, terms),
        "pictures": [_shown(picture) for picture in pictures_of(record)],
        "notes": [note for note in [capped("steps", len(steps), STEPS)] if note],
        "definitions": [(term.definition_key, term.title, told) for term, told in terms.items()],
    })  # fmt: skip


def shown_terms(record: HealthRecord) -> dict[Term, str]:
    """What any gate has a number for, and what it is."""
    low, high = f"{record.low:g}", f"{record.high:g}"
    every = {
        Term("mean", "Gate mean"): "mean gate value over heads, channels and the step's real tokens",
        Term("below", f"Gate below {low}"): f"share of values with |g| < {low}, over heads, channels and the step's real tokens",
        Term("above", f"Gate above {high}"): f"share of values with |g| > {high} times the largest value of the gate's activation, "
        "over heads, channels and the step's real tokens",
        Term("weight_norm", "Weight norm", SIZE): "2-norm of all that the gate learns, after the step",
        Term("grad_norm", "Gradient norm", SIZE): "2-norm of its gradient, after clipping",
        Term("change", "Change", SIZE): "root mean square of g - g0, g0 what the gate's first weights give on the same tokens",
    }  # fmt: skip
    gates = [gate for point in record.points for gate in point.gates]
    return {term: told for term, told in every.items() if any(value_of(gate, term.key) is not None for gate in gates)}


def value_of(gate: GateHealth, key: str) -> float | None:
    """One number of a gate: a mean over its heads where it is per head."""
    value = getattr(gate, key)
    if not isinstance(value, tuple):
        return value
    return math.fsum(value) / len(value) if value else None


def pictures_of(record: HealthRecord) -> list[Picture]:
    """A heatmap of gates by steps for each number."""
    points = spread(record.points, STEPS)
    names = _names(record)
    group, labels = shortened(names)
    made = []
    for term, told in shown_terms(record).items():
        tables = [{gate.name: value_of(gate, term.key) for gate in point.gates} for point in points]
        rows = []
        for name in names:
            cells = [
                Cell(values[name], f"{name}, step {point.step}") if name in values else None
                for point, values in zip(points, tables, strict=True)
            ]
            rows.append(Row(labels[name], tuple(cells), name))
        columns = tuple(f"{point.step}" for point in points)
        grid = Grid("", columns, tuple(rows), form=term.form, corner="gate")
        bottom = min(0.0, *grid.values, 0.0)
        top = None if term.key in NORMS else max(1.0, *grid.values, 1.0)
        grids = tuple(scaled([grid], bottom, top))
        made.append(Picture(term.key, term.title, term.definition_key, told, ((group, grids),)))
    return made


def shortened(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What all names begin and end with, around a star, and what is left of each: `model.layers.*.attn_gate` and `0`."""
    words = [name.split(".") for name in names]
    room = min(map(len, words), default=1) - 1
    first = next((i for i in range(room) if len({word[i] for word in words}) > 1), room)
    last = next((i for i in range(room - first) if len({word[-1 - i] for word in words}) > 1), room - first)
    if len(names) < 2 or not first + last:
        return "", {name: name for name in names}
    labels = {name: ".".join(word[first : len(word) - last]) for name, word in zip(names, words, strict=True)}
    return ".".join([*words[0][:first], "*", *words[0][len(words[0]) - last :]]), labels


def _names(record: HealthRecord) -> list[str]:
    return list(dict.fromkeys(gate.name for point in record.points for gate in point.gates))


def _facts(record: HealthRecord) -> list[tuple[str, str]]:
    names, specs = _names(record), sorted({gate.spec for point in record.points for gate in point.gates})
    steps = [point.step for point in record.points]
    span = f", {steps[0]:,} to {steps[-1]:,}" if steps else ""
    return [("gates", f"{len(names)}"), ("spec", "; ".join(specs) or "-"), ("steps measured", f"{len(steps)}{span}")]


def _basis(record: HealthRecord, title: str) -> str:
    return f"Text: each measured step's own batch of {title}, padding left out; queries: all of them"


def _panels(record: HealthRecord, terms: dict[Term, str]) -> list[tuple[Term, str, str, bool]]:
    names = _names(record)
    made = []
    for term, told in terms.items():
        tracks = {name: _track(record, name, term.key) for name in names}
        tracks = {name: track for name, track in tracks.items() if track}
        log = term.key in NORMS and any(y > 0 for track in tracks.values() for _, y in track)
        lines = [Line(1, track, name, thin=len(tracks) > 1) for name, track in tracks.items()]
        if len(tracks) > 1:
            lines.append(Line(0, _means(list(tracks.values())), "mean over gates"))
        figure = figures.curves(lines, f"{term.title} over steps", f"{len(tracks)} gates", log=log)
        made.append((term, figure, told, log))
    return made


def _track(record: HealthRecord, name: str, key: str) -> tuple[Point, ...]:
    found = []
    for point in record.points:
        for gate in point.gates:
            value = value_of(gate, key) if gate.name == name else None
            if value is not None:
                found.append((float(point.step), value))
    return tuple(found)


def _means(tracks: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """Per step, over the gates that have a value there."""
    at: dict[float, list[float]] = {}
    for track in tracks:
        for step, value in track:
            at.setdefault(step, []).append(value)
    return tuple((step, math.fsum(values) / len(values)) for step, values in sorted(at.items()))


def _shown(picture: Picture) -> dict[str, Any]:
    grids = [(grid.heading, heatmap.html(grid), heatmap.legend(grid), True) for grid in picture.grids]
    return {"picture": picture, "groups": [(picture.groups[0][0], grids)], "marked": False}
