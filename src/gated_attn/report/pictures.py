"""The PNGs beside a report: which there are, and what each is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gated_attn.records import Diagnosis, SampleGates
from gated_attn.report import png, terms, views
from gated_attn.report.heatmap import Cell, Grid, Row


def write_pictures(pictures: Mapping[str, bytes], page: Path) -> list[Path]:
    """Each beside the page, as NAME-KEY.png, and the paths."""
    return [png.write(page.with_name(f"{page.stem}-{key}.png"), data) for key, data in pictures.items()]


def over_text(after: Diagnosis, before: Diagnosis | None, note: str) -> dict[str, bytes]:
    """Gates, and shares on the first token, as heatmaps of layers by tokens: means over heads."""
    every = [("before", before), ("after", after)] if before else [("", after)]
    made = {}
    for key, title in (("gates", "Gate values over the text"), ("first", "Attention on the first token over the text")):
        grids = []
        for name, one in every:
            sample = getattr(one.view, key) if one.view is not None else None
            if sample is not None and sample.values and sample.tokens:
                grids.append(_text_grid(sample, one, name))
        if grids:
            told = terms.definition(f"view_{key}", after.definitions)
            made[f"text-{key}"] = png.heatmaps(title, f"{told}. {note}", [("", [grid]) for grid in grids])
    return made


def _text_grid(sample: SampleGates, diagnosis: Diagnosis, heading: str) -> Grid:
    rows = []
    for name, heads in zip(views.layer_names(sample, diagnosis), sample.values, strict=True):
        means = [views.mean(column) for column in zip(*heads, strict=True)]
        rows.append(Row(name.split(",")[0], tuple(Cell(value, "") for value in means)))
    known = [cell.value for row in rows for cell in row.cells if cell is not None and cell.value is not None]
    numbers = tuple(str(i) for i in range(len(sample.tokens)))
    return Grid(heading, numbers, tuple(rows), min(0.0, *known, 0.0), max(1.0, *known, 1.0))


def chosen_patterns(heads: Iterable[views.Head], note: str, definition: str) -> dict[str, bytes]:
    """The weights of the chosen heads, before beside after."""
    drawn = [(f"{head.title}\n{name}".strip(), pattern.weights) for head in heads for name, pattern in head.drawings]
    if not drawn:
        return {}
    return {"patterns": png.patterns("Attention patterns of chosen heads", f"{definition}. {note}", drawn)}
