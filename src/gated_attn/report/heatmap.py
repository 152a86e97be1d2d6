"""Heatmaps as HTML tables, so that every value is text: a grid of numbers, how it is coloured, and what a cell says.

`Grid` is also what `png` draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from gated_attn.report import colours, terms
from gated_attn.report.table import DASH

WIDE = 24
"""A grid of more columns has narrow cells without text; a cell's value is then in its tooltip and told when tapped."""

PLAIN_COLUMNS = 10
"""A grid of more columns takes the page's whole width."""


@dataclass(frozen=True)
class Cell:
    """One value, what it is the value of, and whether it is marked (a dead head)."""

    value: float | None
    name: str
    marked: bool = False


@dataclass(frozen=True)
class Row:
    """One row; None where it has no such column. `name` tells it from all others, where the label does not."""

    label: str
    cells: tuple[Cell | None, ...]
    name: str = ""


@dataclass(frozen=True)
class Grid:
    """Rows of cells, coloured from `low` to `high`; `signed` has its middle at 0 and the colours of differences.

    `form` writes a value in full, `corner` says what rows and columns are.
    """

    heading: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    low: float = 0.0
    high: float = 1.0
    signed: bool = False
    form: str = ".3f"
    corner: str = "layer"

    @property
    def values(self) -> list[float]:
        """All that are known."""
        return [cell.value for row in self.rows for cell in row.cells if cell is not None and cell.value is not None]

    @property
    def wide(self) -> bool:
        """Whether it takes the page's whole width."""
        return len(self.columns) > PLAIN_COLUMNS

    def written(self, value: float | None) -> str:
        """A value in full."""
        return terms.written(value, self.form, signed=self.signed)


def scaled(grids: Sequence[Grid], low: float | None = None, high: float | None = None) -> list[Grid]:
    """The grids on one scale, from `low` to `high`, or to what their values reach where these are None."""
    values = [value for grid in grids for value in grid.values]
    bottom = min(values, default=0.0) if low is None else low
    top = max(values, default=1.0) if high is None else high
    return [replace(grid, low=bottom, high=top if top > bottom else bottom + 1.0) for grid in grids]


def difference(before: Grid, after: Grid, heading: str = "difference") -> Grid | None:
    """After minus before where both have the cell, on a scale symmetric about 0; None where no cell is in both."""
    old = {(row.name, cell.name): cell for row in before.rows for cell in row.cells if cell is not None}
    rows = tuple(replace(row, cells=tuple(_minus(old, row.name, cell) for cell in row.cells)) for row in after.rows)
    made = replace(after, heading=heading, rows=rows, signed=True)
    if not made.values:
        return None
    reach = max(map(abs, made.values)) or 1.0
    return replace(made, low=-reach, high=reach)


def _minus(old: dict[tuple[str, str], Cell], row: str, cell: Cell | None) -> Cell | None:
    if cell is None or (row, cell.name) not in old:
        return None
    before = old[row, cell.name].value
    known = cell.value is not None and before is not None
    return replace(cell, value=cell.value - before if known else None)  # type: ignore[operator]


def html(grid: Grid) -> str:
    """The grid as a table; a cell's title names it and gives its value in full."""
    narrow = len(grid.columns) > WIDE
    numbers = [str(name) if not narrow or i % 8 == 0 else "" for i, name in enumerate(grid.columns)]
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in numbers)
    lines = [
        f'<table class="heat{" narrow" if narrow else ""}">',
        f'<thead><tr><th scope="col">{escape(grid.corner)}</th>{heads}</tr></thead>',
        "<tbody>",
    ]
    for row in grid.rows:
        cells = "".join(_td(grid, cell, narrow) for cell in row.cells)
        lines.append(f'<tr><th scope="row">{escape(row.label)}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody></table>"])


def legend(grid: Grid) -> str:
    """What the ends of the colours stand for."""
    kind = "differences" if grid.signed else "sizes"
    ends = [_end(grid, value) for value in (grid.low, grid.high)]
    return f'<span class="ends">{escape(ends[0])} <span class="ramp {kind}"></span> {escape(ends[1])}</span>'


def short(grid: Grid, value: float) -> str:
    """A value in at most four characters or so, for a cell."""
    size = abs(value)
    if size >= 9999.5:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    text = f"{value:.0f}" if size >= 99.5 else f"{value:.1f}" if size >= 0.995 else f"{value:.2f}"
    text = "0" if not any(ch in "123456789" for ch in text) else text
    text = text.replace("0.", ".", 1) if size < 1 else text
    text = text.removesuffix(".00").removesuffix(".0")
    return f"+{text}" if grid.signed and value > 0 and text != "0" else text.replace("-", "\u2212")


def marked(grids: Iterable[Grid]) -> bool:
    """Whether any cell is."""
    return any(cell is not None and cell.marked for grid in grids for row in grid.rows for cell in row.cells)


def _end(grid: Grid, value: float) -> str:
    return format(value, "+.3g" if grid.signed else ".3g").replace("-", "\u2212")


def _td(grid: Grid, cell: Cell | None, narrow: bool) -> str:
    if cell is None:
        return "<td></td>"
    told = escape(f"{cell.name}: {grid.written(cell.value)}{' (dead)' if cell.marked else ''}", quote=True)
    if cell.value is None:
        return f'<td class="none" title="{told}">{"" if narrow else DASH}</td>'
    step = f"{'d' if grid.signed else 'k'}{colours.level(cell.value, grid.low, grid.high)}"
    dead = " dead" if cell.marked else ""
    return f'<td class="{step}{dead}" title="{told}">{"" if narrow else short(grid, cell.value)}</td>'
