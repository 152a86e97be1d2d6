"""The report of a diagnosis: one self-contained HTML file, and a PNG of each of its pictures beside it.

The page is `templates/diagnosis.html` with its styles and script written into it: no network, readable without JavaScript.
Everything that comes from a record is escaped, by the template or where a drawing is made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gated_attn.records import Diagnosis, GateReading, StreamStat, diff, write_text
from gated_attn.report import colours, figures, heatmap, maps, png, table, terms, views
from gated_attn.report.figures import Line
from gated_attn.report.maps import Picture, pattern
from gated_attn.report.page import fill, flat, script_json
from gated_attn.report.pictures import chosen_patterns, over_text, write_pictures
from gated_attn.report.terms import Term

DEAD_NAMED = 40
"""So many dead heads are named below the heatmaps."""


def write_diagnosis_report(
    diagnosis: Diagnosis, path: str | os.PathLike[str], before: Diagnosis | None = None, *, pictures: bool = True
) -> Path:
    """Write the report to `path` as one HTML file, each picture beside it as `NAME-*.png`, and return the path.

    `before` is a diagnosis of the same text, whose numbers then stand beside; RecordError where the two do not compare.
    `pictures=False` leaves the PNGs out. MissingExtraError without jinja2 or matplotlib, of the extra `lab`; nothing is written
    then.
    """
    page = render_diagnosis(diagnosis, before)
    target = Path(path)
    if pictures:
        write_pictures(drawings(diagnosis, before), target)
    return write_text(target, page)


def drawings(diagnosis: Diagnosis, before: Diagnosis | None = None) -> dict[str, bytes]:
    """The PNG of each picture, by the end of its file's name; each holds its definition, its text and its tokens."""
    note = f"{diagnosis.model}. {basis(diagnosis)}."
    made = {}
    for picture in pictures_of(diagnosis, before):
        made[picture.key.replace("_", "-") if picture.key != "mean" else "gate-mean"] = png.heatmaps(
            picture.title, f"{picture.definition}. {note}", picture.groups
        )
    groups = _stream_groups(diagnosis, before)
    if groups:
        panels = [
            (term.title, term.key != "massive", [(name, _points(streams, term)) for name, streams in groups.items()])
            for term in terms.STREAMS
        ]
        told = "; ".join(f"{term.title}: {terms.definition(term.key, diagnosis.definitions)}" for term in terms.STREAMS)
        made["outliers"] = png.lines("Activation outliers by layer", f"{told}. {note}", panels, "layer")
    made |= over_text(diagnosis, before, note)
    definition = terms.definition("pattern", diagnosis.definitions)
    return made | chosen_patterns(views.chosen_heads(diagnosis, before), note, definition)


def render_diagnosis(diagnosis: Diagnosis, before: Diagnosis | None = None) -> str:
    """The report as the text of one HTML file; the same records give the same text."""
    return fill("diagnosis.html", _context(diagnosis, before))


def pictures_of(diagnosis: Diagnosis, before: Diagnosis | None = None) -> list[Picture]:
    """What is drawn per layer and head in the page, and as PNGs."""
    return [
        *maps.attention_pictures(diagnosis, before, terms.HEADS),
        *maps.gate_pictures(diagnosis, before, terms.GATES),
    ]


def _context(after: Diagnosis, before: Diagnosis | None) -> dict[str, Any]:
    main = pictures_of(after, before)
    more = [
        *maps.attention_pictures(after, before, terms.MORE_HEADS),
        *maps.gate_pictures(after, before, terms.MORE_GATES),
    ]
    every = [("before", before), ("after", after)] if before else [("", after)]
    texts = _texts(every)
    heads = views.chosen_heads(after, before)
    view = after.view or (before.view if before else None)
    return {
        "after": after,
        "before": before,
        "colours": colours.css(),
        "facts": facts(after, before),
        "summary": _summary(after, before),
        "pictures": [_shown(picture) for picture in main],
        "more": [_shown(picture) for picture in more],
        "dead": _dead(after),
        "outliers": outliers(after, before),
        "stream_legend": [(figures.swatch(i), name) for i, name in enumerate(_stream_groups(after, before))],
        "stream_tables": [(name, _stream_rows(one)) for name, one in every if one.streams],
        "stream_heads": [_linked(term) for term in (*terms.STREAMS, *terms.MORE_STREAMS)],
        "texts": texts,
        "heads": [_head(head, view.tokens if view else ()) for head in heads],
        "tokens": script_json([views.visible(token)[0] for token in view.tokens]) if view else "[]",
        "gate_heads": [_linked(term) for term in GATE_NUMBERS],
        "class_heads": lambda classes: [_linked(replace(BY_CLASS, title=word)) for word in classes],
        "gate_tables": [(name, *_gate_table(one.gates)) for name, one in every if one.gates],
        "layer_heads": [_linked(term) for term in _layer_columns(every)],
        "strongest_at": _linked(Term("strongest_position", "Strongest key at")),
        "layer_tables": [(name, _layer_rows(one, _layer_columns(every))) for name, one in every],
        "definitions": _definitions(after),
        "pattern_definition": terms.definition("pattern", after.definitions),
        "basis": basis(after),
        "environment": flat(after.environment),
    }


def facts(after: Diagnosis, before: Diagnosis | None) -> list[tuple[str, str]]:
    """What was measured on what, in words: the names that every number of the page goes with."""
    same = before is None
    rows = [] if before is None else [("before", _model(before))]
    rows += [("model" if same else "after", _model(after)), ("text", after.text)]
    rows.append(("read", f"{_tokens(after)}, padding left out"))
    rows.append(("sink rate", f"T = {after.sink_tokens} tokens, eps = {after.sink_eps:g}"))
    if after.seconds is not None:
        plain = f", {after.plain_seconds:.1f} s unwatched" if after.plain_seconds is not None else ""
        memory = (
            f", {after.peak_extra_bytes / 2**20:,.0f} MiB more memory" if after.peak_extra_bytes is not None else ""
        )
        rows.append(("time", f"{after.seconds:.1f} s{plain}{memory}"))
    return rows


def basis(diagnosis: Diagnosis) -> str:
    """What stands below every picture: which text, and how much of it."""
    return f"Text: {diagnosis.text}; {_tokens(diagnosis)}"


def _tokens(diagnosis: Diagnosis) -> str:
    short, long = diagnosis.shortest, diagnosis.longest
    lengths = f"{long:,}" if short == long else f"{short:,} to {long:,}"
    return f"{diagnosis.tokens:,} tokens in {diagnosis.sequences:,} sequences of {lengths}"


def _model(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.model}: {diagnosis.parameters:,} parameters, {diagnosis.dtype}, attention {diagnosis.attn_implementation}"


def _summary(after: Diagnosis, before: Diagnosis | None) -> list[dict[str, Any]]:
    changes = {change.name: change for change in diff(before, after).changes} if before else {}
    rows = []
    for term in terms.SUMMARY:
        value = getattr(after, term.key)
        change = changes.get(term.key)
        numbers = [terms.written(value, term.form)]
        if change is not None:
            old, moved = (change.before, change.difference)
            numbers = [terms.written(old, term.form), *numbers, terms.written(moved, term.form, signed=True)]
        if any(text != table.DASH for text in numbers):
            rows.append({"term": term, "numbers": numbers})
    return rows


def _linked(term: Term) -> Any:
    """A column's head, which leads to its definition."""
    from markupsafe import Markup

    return Markup('<a href="#def-{}">{}</a>').format(term.definition_key, term.title)


def _shown(picture: Picture) -> dict[str, Any]:
    groups = []
    for name, grids in picture.groups:
        groups.append((name, [(grid.heading, heatmap.html(grid), heatmap.legend(grid), grid.wide) for grid in grids]))
    return {"picture": picture, "groups": groups, "marked": heatmap.marked(picture.grids)}


def _dead(diagnosis: Diagnosis) -> str:
    """Which heads are dead, in words."""
    names = [
        f"layer {module.layer} head {head.head}{'' if module.kind == 'self' else ' (' + module.kind + ')'}"
        for module in diagnosis.attention
        for head in module.heads
        if head.dead
    ]
    if not names:
        return "No head is dead."
    rest = f" and {len(names) - DEAD_NAMED} more" if len(names) > DEAD_NAMED else ""
    return f"{len(names)} dead: {', '.join(names[:DEAD_NAMED])}{rest}."


def outliers(after: Diagnosis, before: Diagnosis | None) -> list[dict[str, Any]]:
    """A figure over the layers for each number of the residual stream."""
    groups = _stream_groups(after, before)
    drawn = []
    for term in terms.STREAMS:
        lines = [Line(i, _points(streams, term), name) for i, (name, streams) in enumerate(groups.items())]
        log = term.key != "massive"
        told = "; ".join(f"{line.label or term.title}: at most {max(y for _, y in line.points):.4g}" for line in lines)
        lines = [Line(line.index, line.points, line.label or term.title) for line in lines]
        figure = figures.curves(lines, f"{term.title} by layer", told, x_label="layer", log=log, dots=True)
        if figure:
            drawn.append({
                "term": term, "figure": figure, "log": log, "definition": terms.definition(term.definition_key, after.definitions),
            })  # fmt: skip
    return drawn


def _points(streams: Sequence[StreamStat], term: Term) -> tuple[tuple[float, float], ...]:
    return tuple((float(stream.layer), float(getattr(stream, term.key))) for stream in streams)


def _stream_groups(after: Diagnosis, before: Diagnosis | None) -> dict[str, list[StreamStat]]:
    """Lines of the figures: stacks of layers with equal names but for numbers, before and after."""
    groups: dict[str, list[StreamStat]] = {}
    every = [("before", before), ("after", after)] if before else [("", after)]
    several = len({pattern(stream.name) for stream in after.streams}) > 1
    for name, one in every:
        for stream in one.streams:
            label = " ".join(part for part in (name, pattern(stream.name) if several else "") if part)
            groups.setdefault(label, []).append(stream)
    return groups


def _stream_rows(diagnosis: Diagnosis) -> list[list[str]]:
    columns = (*terms.STREAMS, *terms.MORE_STREAMS)
    return [
        [f"{stream.layer} {stream.name}", *(terms.written(getattr(stream, term.key), term.form) for term in columns)]
        for stream in diagnosis.streams
    ]


def _texts(every: Sequence[tuple[str, Diagnosis]]) -> list[dict[str, Any]]:
    """Gates, then shares on the first token, over the text."""
    made = []
    for key, title, definition in (
        ("gates", "Gate values over the text", "view_gates"),
        ("first", "Attention on the first token over the text", "view_first"),
    ):
        samples = [
            views.over_text(getattr(one.view, key), one, name or one.model)
            for name, one in every
            if one.view is not None
        ]
        shown = [sample for sample in samples if sample is not None]
        if shown:
            told = terms.definition(definition, every[-1][1].definitions)
            made.append({"title": title, "key": definition, "definition": told, "samples": shown})
    return made


def _head(head: views.Head, tokens: Sequence[str]) -> dict[str, Any]:
    drawings = []
    for name, one in head.drawings:
        drawings.append((name, views.drawn(one, tokens, f"{head.title} {name}".strip()), views.pattern_data(one)))
    return {"title": head.title, "drawings": [(name, svg, script_json(data)) for name, svg, data in drawings]}


BY_CLASS = Term("by_class", "Gate mean by class of tokens", defined="gate_by_class")
GATE_NUMBERS = (*terms.GATES, *terms.MORE_GATES)


def _gate_table(gates: Sequence[GateReading]) -> tuple[list[str], list[list[str]]]:
    """(classes of tokens, rows): a row per gate, each number a mean over its heads, but `largest` the largest."""
    classes = list(dict.fromkeys(word for gate in gates for word in gate.by_class))
    rows = []
    for gate in gates:
        numbers = []
        for term in GATE_NUMBERS:
            known = [value for value in getattr(gate, term.key) if value is not None]
            value = None if not known else max(known) if term.key == "largest" else sum(known) / len(known)
            numbers.append(table.number(value, ".1%" if term.key in ("below_01", "below_005", "above_095") else ".3f"))
        rows.append([
            f"{gate.layer} {gate.name}", str(len(gate.mean)), *numbers,
            *(table.number(gate.by_class.get(word), ".3f") for word in classes), gate.spec,
        ])  # fmt: skip
    return classes, rows


def _layer_columns(every: Sequence[tuple[str, Diagnosis]]) -> list[Term]:
    """Those that any module has a number for."""
    rows = [row for _, one in every for row in _numbers(one)]
    return [term for term in terms.LAYERS if any(row.get(term.key) is not None for row in rows)]


def _numbers(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    queries = {module.name: module.queries for module in diagnosis.attention}
    return [{**row, "queries": queries[row["name"]]} for row in diagnosis.rows()]


def _layer_rows(diagnosis: Diagnosis, columns: Sequence[Term]) -> list[list[str]]:
    """A row per attention module: its layer and name, its kind, where the strongest key is, and the numbers."""
    rows = []
    for row in _numbers(diagnosis):
        token = row["strongest_token"]
        place = str(row["strongest_position"]) + ("" if token is None else f" {views.visible(token)[0]}")
        rows.append([
            f"{row['layer']} {row['name']}", row["kind"], place, *(terms.written(row[term.key], term.form) for term in columns),
        ])  # fmt: skip
    return rows


def _definitions(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    """(key, names on this page, definition) of every number, those of the record first."""
    every = (
        *terms.SUMMARY, *terms.HEADS, *terms.MORE_HEADS, *terms.STREAMS, *terms.MORE_STREAMS, *terms.LAYERS, *GATE_NUMBERS,
        BY_CLASS,
    )  # fmt: skip
    names: dict[str, dict[str, None]] = {}
    for term in every:
        names.setdefault(term.definition_key, {})[term.title] = None
    keys = dict.fromkeys((*diagnosis.definitions, *names, *terms.OWN))
    return [(key, ", ".join(names.get(key, ())), terms.definition(key, diagnosis.definitions)) for key in keys]
