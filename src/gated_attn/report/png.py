"""The pictures of a report as PNGs, drawn by matplotlib with the page's colours, each with its definition and its text in it.

The same records and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gated_attn.codec import drafted
from gated_attn.errors import MissingExtraError
from gated_attn.report import colours
from gated_attn.report.heatmap import Grid
from gated_attn.report.page import visible

LINES = ("#3d444d", "#0068a8", "#c24e00", "#00805d", "#a8457f", "#2c8fc9", "#a87400", "#6a4fb3")
"""The page's colours of lines on white, and their dashes."""
STYLES = ("-", "--", ":", "-.")

WRAP = 15
"""Characters of text to an inch of width."""

Draw = Callable[[Any], None]
Panel = tuple[str, bool, Sequence[tuple[str, Sequence[tuple[float, float]]]]]


def heatmaps(title: str, note: str, groups: Sequence[tuple[str, Sequence[Grid]]]) -> bytes:
    """A row of heatmaps for each group, every one with its colour scale; an empty cell has no such head, a cross is a dead one."""
    columns = max(len(grids) for _, grids in groups)
    widest = max((len(grid.columns) for _, grids in groups for grid in grids), default=1)
    tall = [max(len(grid.rows) for grid in grids) for _, grids in groups]
    cell = 0.3 if widest <= 12 else 0.2 if widest <= 24 else 0.12
    size = (max(columns * (widest * cell + 1.2), 5.5), sum(max(rows * cell, 0.8) + 1.2 for rows in tall))

    def draw(figure: Any) -> None:
        axes = figure.subplots(len(groups), columns, squeeze=False, gridspec_kw={"height_ratios": tall})
        for row, (name, grids) in zip(axes, groups, strict=True):
            for axis in row[len(grids) :]:
                axis.remove()
            for axis, grid in zip(row, grids, strict=False):
                _heatmap(figure, axis, grid, name)

    return _png(title, note, size, draw)


def lines(title: str, note: str, panels: Sequence[Panel], x: str) -> bytes:
    """Panels of lines, (heading, logarithmic, (label, points) of each), two to a row."""
    rows = math.ceil(len(panels) / 2)

    def draw(figure: Any) -> None:
        axes = list(figure.subplots(rows, 2, squeeze=False).flat)
        for axis in axes[len(panels) :]:
            axis.remove()
        for axis, (heading, log, drawn) in zip(axes, panels, strict=False):
            for i, (label, points) in enumerate(drawn):
                axis.plot(
                    *zip(*points, strict=True), color=LINES[i % len(LINES)], linestyle=STYLES[i % len(STYLES)], marker=".",
                    markersize=4, linewidth=1.3, label=_plain(label),
                )  # fmt: skip
            if log and any(y > 0 for _, points in drawn for _, y in points):
                axis.set_yscale("log", nonpositive="mask")
            axis.set_title(_plain(heading), fontsize=9, parse_math=False)
            axis.set_xlabel(x)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(color="#e8eaed", linewidth=0.7)
            if any(label for label, _ in drawn):
                axis.legend(fontsize=7, frameon=False)

    return _png(title, note, (9.0, 2.9 * rows), draw)


def patterns(title: str, note: str, drawn: Sequence[tuple[str, Sequence[Sequence[float]]]]) -> bytes:
    """Attention patterns, (heading, weights[query][key]) of each, four to a row."""
    columns = min(4, len(drawn))
    rows = math.ceil(len(drawn) / columns)

    def draw(figure: Any) -> None:
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis in axes[len(drawn) :]:
            axis.remove()
        for axis, (heading, weights) in zip(axes, drawn, strict=False):
            image = axis.imshow(_filled(weights), cmap=_map(False), vmin=0, vmax=1, interpolation="nearest")
            axis.set_title(_plain(heading), fontsize=7, parse_math=False)
        figure.colorbar(image, ax=axes[: len(drawn)], shrink=0.5, fraction=0.03)

    return _png(title, note, (max(2.4 * columns + 1, 5.5), 2.6 * rows), draw)


def write(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a picture whole or not at all, making its folder if need be."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with drafted(target, replace=True) as draft:
        draft.write_bytes(data)
    return target


def needs_matplotlib() -> Any:
    """The module, or MissingExtraError."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "lab", "a report's PNGs") from error
    return matplotlib


def _heatmap(figure: Any, axis: Any, grid: Grid, name: str) -> None:
    values = [
        [math.nan if cell is None or cell.value is None else cell.value for cell in row.cells] for row in grid.rows
    ]
    axis.set_facecolor("#e8eaed")
    axis.set_anchor("W")
    image = axis.imshow(
        _filled(values), cmap=_map(grid.signed), vmin=grid.low, vmax=grid.high, aspect="equal", interpolation="nearest"
    )
    marks = [
        (x, y)
        for y, row in enumerate(grid.rows)
        for x, cell in enumerate(row.cells)
        if cell is not None and cell.marked
    ]
    for colour, width in (("#000", 3.0), ("#fff", 1.4)):
        axis.plot(*zip(*marks, strict=True), "x", color=colour, markersize=6, markeredgewidth=width) if marks else None
    every = math.ceil(len(grid.columns) / 16)
    axis.set_xticks(range(0, len(grid.columns), every), grid.columns[::every])
    every = math.ceil(len(grid.rows) / 32)
    axis.set_yticks(range(0, len(grid.rows), every), [row.label for row in grid.rows][::every])
    axis.set_ylabel(grid.corner)
    heading = "\n".join(part for part in (grid.heading, *textwrap.wrap(name, 44)) if part)
    axis.set_title(_plain(heading), fontsize=7, parse_math=False)
    figure.colorbar(image, ax=axis, shrink=0.7)


def _png(title: str, note: str, size: tuple[float, float], draw: Draw) -> bytes:
    """The figure with its title and note above it; only matplotlib's own defaults count, not a user's."""
    matplotlib = needs_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 8, "axes.linewidth": 0.6})
        told = textwrap.wrap(_plain(note), int(WRAP * size[0]))
        above = 0.45 + 0.15 * len(told)
        width, height = min(size[0], 40.0), min(size[1], 40.0) + above
        figure: Any = Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        figure.get_layout_engine().set(rect=(0, 0, 1, 1 - above / height))
        _head(figure, 0.08, _plain(title), fontsize=11, weight="bold")
        _head(figure, 0.33, "\n".join(told), fontsize=7, color="#59636e")
        draw(figure)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _head(figure: Any, inches: float, text: str, **style: Any) -> None:
    """Text so far below the figure's top; the layout of the drawing does not make room for it."""
    width, height = figure.get_size_inches()
    figure.text(0.1 / width, 1 - inches / height, text, va="top", parse_math=False, **style).set_in_layout(False)


def _map(signed: bool) -> Any:
    from matplotlib.colors import ListedColormap

    steps = [colours.colour((i + 0.5) / 256, signed=signed) for i in range(256)]
    return ListedColormap(steps).with_extremes(bad=(0, 0, 0, 0))


def _filled(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Rows of one length, NaN where one is shorter."""
    length = max(map(len, rows), default=1)
    return [[*row, *[math.nan] * (length - len(row))] for row in rows] or [[math.nan]]


def _plain(text: str) -> str:
    """What matplotlib's own font can draw: other characters as their code points."""
    return "\n".join("".join(_drawable(char) for char in line) for line in text.split("\n"))


def _drawable(char: str) -> str:
    shown = char if char == " " else visible(char)[0]
    return (
        shown if all(ord(c) < 0x250 or c in "\u2026\u2212\u23ce\u21e5\u2205" for c in shown) else f"U+{ord(char):04X}"
    )
