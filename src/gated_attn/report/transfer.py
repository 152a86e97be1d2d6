"""The report of a `TransferRecord`: what changed, which heads had sinks, how well gates were told from hidden states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gated_attn.records import TransferRecord, write_text
from gated_attn.report import colours, figures, heatmap, png, terms
from gated_attn.report.figures import Line
from gated_attn.report.heatmap import Cell, Grid, Row
from gated_attn.report.maps import Picture
from gated_attn.report.page import fill
from gated_attn.report.pictures import write_pictures

SHARE = "mean share of the head's attention on the sink token before the transfer, over queries from 64 on, of the calibration text"
R2 = (
    "part of the variance of logit(1 - a) that a linear function of the token's hidden state explains, weighted by a (1 - a), on "
    "rows that were not fitted on; without a value: a gate that is read from the scores, or none"
)
DIVERGENCE = (
    "mean over tokens of KL(model before || gated model) in nats, over the steps of distillation; means of 10 steps"
)


def write_transfer_report(
    record: TransferRecord, path: str | os.PathLike[str], maps: str | None = None, *, pictures: bool = True
) -> Path:
    """Write the report to `path` as one HTML file, each picture beside it as `NAME-*.png`, and return the path.

    `maps` is the name of a page beside it with attention before and after. MissingExtraError without jinja2 or matplotlib.
    """
    page, target = render_transfer(record, maps), Path(path)
    if pictures:
        drawn = {
            one.key: png.heatmaps(one.title, f"{one.definition}. {_basis(record)}", one.groups)
            for one in pictures_of(record)
        }
        write_pictures(drawn, target)
    return write_text(target, page)


def render_transfer(record: TransferRecord, maps: str | None = None) -> str:
    """The report as the text of one HTML file; the same record gives the same text."""
    losses = [(float(step), loss) for step, loss in record.losses]
    curve = (
        figures.curves([Line(1, tuple(losses), "divergence")], "Divergence over steps", DIVERGENCE) if losses else ""
    )
    return fill("transfer.html", {
        "title": record.model,
        "colours": colours.css(),
        "facts": _facts(record),
        "basis": _basis(record),
        "rows": _rows(record),
        "sinks": record.sinks,
        "gated": record.gated,
        "heads": sum(len(layer.share) for layer in record.layers),
        "curve": curve,
        "divergence": DIVERGENCE,
        "pictures": [_shown(picture) for picture in pictures_of(record)],
        "others": record.others[:12],
        "more": max(0, len(record.others) - 12),
        "maps": maps,
        "definitions": sorted({**record.definitions, "share": SHARE, "r2": R2}.items()),
    })  # fmt: skip


def pictures_of(record: TransferRecord) -> list[Picture]:
    """Heatmaps of layers by heads."""
    shares = {layer.name: layer.share for layer in record.layers}
    fits = {layer.name: layer.r2 for layer in record.layers if layer.r2 is not None}
    made = [_picture(record, "share", "Share of attention on the sink", SHARE, shares)]
    return (
        [*made, _picture(record, "r2", "How well the gate is told from the hidden state", R2, fits)] if fits else made
    )


def _picture(
    record: TransferRecord, name: str, title: str, told: str, values: Mapping[str, tuple[float, ...]]
) -> Picture:
    columns = tuple(str(head) for head in range(max((len(one) for one in values.values()), default=0)))
    rows = []
    for layer in record.layers:
        own = values.get(layer.name, ())
        cells = [Cell(own[i], f"layer {layer.layer}, head {i}") if i < len(own) else None for i in range(len(columns))]
        rows.append(Row(str(layer.layer), tuple(cells), layer.name))
    return Picture(name, title, name, told, (("", (Grid("", columns, tuple(rows)),)),))


def _rows(record: TransferRecord) -> list[tuple[str, ...]]:
    return [
        (name.replace("_", " "), key(name), _written(before), _written(after), change(before, after))
        for name, before, after in record.rows()
        if before is not None or after is not None
    ]


def change(before: float | None, after: float | None) -> str:
    """What became of a number, as a factor or in per cent."""
    if before is None or after is None or before == 0:
        return terms.DASH
    ratio = after / before
    return f"{100 * (ratio - 1):+.1f} %" if 0.5 < ratio < 2 else f"x {ratio:.3g}"


def key(name: str) -> str:
    """The key of a row's definition."""
    return name.partition(",")[0]


def _written(value: float | None) -> str:
    if value is None:
        return terms.DASH
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"


def _facts(record: TransferRecord) -> list[tuple[str, str]]:
    hidden = sum(layer.source == "hidden" for layer in record.layers)
    scores, added = sum(layer.source == "lse" for layer in record.layers), record.added_parameters
    return [
        ("tier", record.tier),
        ("sink token", f"{record.sink_text} ({record.sink})"),
        ("gates", f"{hidden} read from hidden states, {scores} from scores"),
        ("added parameters", f"{added:,} of {record.parameters:,} ({added / record.parameters:.2%})"),
        ("calibration", f"{record.tokens:,} tokens"),
        ("distillation", f"{record.steps} steps"),
        ("time", f"{record.seconds:,.0f} s"),
    ]


def _basis(record: TransferRecord) -> str:
    kinds = "; ".join(f"{kind}: {told}" for kind, told in record.texts.items())
    return f"Text: {kinds}; {record.held_out_tokens:,} tokens of it are held out and scored"


def _shown(picture: Picture) -> dict[str, Any]:
    grids = [(grid.heading, heatmap.html(grid), heatmap.legend(grid), grid.wide) for grid in picture.grids]
    return {"picture": picture, "groups": [("", grids)], "marked": False}
