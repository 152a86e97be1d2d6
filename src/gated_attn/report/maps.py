"""A diagnosis as pictures per layer and head: which grids there are, of which modules, on which scale."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gated_attn.records import AttentionStat, Diagnosis, GateReading
from gated_attn.report import terms
from gated_attn.report.heatmap import Cell, Grid, Row, difference, scaled
from gated_attn.report.terms import Term

UNIT = frozenset({
    "first_token_share", "first_token_share_all", "sink_share", "sink_rate", "strongest_share", "strongest_early_share", "entropy",
    "below_01", "below_005", "above_095", "token_entropy",
})  # fmt: skip
"""Numbers from 0 to 1: all reports draw them on this scale, so that they compare."""


@dataclass(frozen=True)
class Picture:
    """One number drawn per layer and head: `groups` has for each kind of module its grids side by side."""

    key: str
    title: str
    definition_key: str
    definition: str
    groups: tuple[tuple[str, tuple[Grid, ...]], ...]

    @property
    def grids(self) -> list[Grid]:
        """All of them."""
        return [grid for _, grids in self.groups for grid in grids]


class Named(Protocol):
    """What is grouped: an attention module or a gate."""

    name: str


N = TypeVar("N", AttentionStat, GateReading)
Make = Callable[[str, Sequence[Any], Term], Grid]


def attention_pictures(after: Diagnosis, before: Diagnosis | None, wanted: Iterable[Term]) -> list[Picture]:
    """A picture of each number of the heads, in self and cross attention apart."""
    now, was = by_kind(after), by_kind(before) if before else {}
    return _pictures(wanted, now, was, _heads_grid, after, before)


def gate_pictures(after: Diagnosis, before: Diagnosis | None, wanted: Iterable[Term]) -> list[Picture]:
    """A picture of each number of the gates."""
    if not after.gates and (before is None or not before.gates):
        return []
    now, was = _grouped(after.gates), _grouped(before.gates) if before else {}
    return _pictures(wanted, now, was, _gates_grid, after, before)


def by_kind(diagnosis: Diagnosis) -> dict[str, list[AttentionStat]]:
    """The attention modules that are one stack: equal names but for numbers, and equal kind."""
    groups: dict[str, list[AttentionStat]] = {}
    for module in diagnosis.attention:
        groups.setdefault(f"{module.kind} attention, {pattern(module.name)}", []).append(module)
    return groups


def pattern(name: str) -> str:
    """The name with a star for each number in it: `model.layers.*.self_attn`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name.partition("#")[0])


def _grouped(gates: Iterable[GateReading]) -> dict[str, list[GateReading]]:
    groups: dict[str, list[GateReading]] = {}
    for gate in gates:
        groups.setdefault(pattern(gate.name), []).append(gate)
    return groups


def _pictures(
    wanted: Iterable[Term],
    now: dict[str, list[N]],
    was: dict[str, list[N]],
    make: Make,
    after: Diagnosis,
    before: Diagnosis | None,
) -> list[Picture]:
    pictures = []
    for term in wanted:
        pairs = {name: _pair(name, now, was, make, term, before is not None) for name in (*now, *was)}
        plain = [grid for grids in pairs.values() for grid in grids if not grid.signed]
        low, high = (0.0, 1.0) if term.key in UNIT else _span(term, plain)
        groups = tuple(
            (name, tuple(grid if grid.signed else scaled([grid], low, high)[0] for grid in grids))
            for name, grids in pairs.items()
        )
        told = terms.definition(term.definition_key, after.definitions)
        pictures.append(Picture(term.key, term.title, term.definition_key, told, groups))
    return pictures


def _pair(
    name: str, now: dict[str, list[N]], was: dict[str, list[N]], make: Make, term: Term, compared: bool
) -> list[Grid]:
    new = make("after" if compared else "", now[name], term) if name in now else None
    old = make("before", was[name], term) if name in was else None
    change = difference(old, new) if old and new else None
    return [grid for grid in (old, new, change) if grid is not None]


def _span(term: Term, grids: Sequence[Grid]) -> tuple[float, float]:
    """From 0 to what is reached; gates at least to 1."""
    values = [value for grid in grids for value in grid.values]
    top = max(values, default=1.0)
    return min(0.0, *values, 0.0), max(1.0, top) if term.key in ("mean", "median", "largest") else top


def _heads_grid(heading: str, modules: Sequence[AttentionStat], term: Term) -> Grid:
    numbers = sorted({head.head for module in modules for head in module.heads})
    rows = []
    for module in modules:
        heads = {head.head: head for head in module.heads}
        cells = [
            Cell(getattr(heads[i], term.key), f"layer {module.layer}, head {i}", heads[i].dead) if i in heads else None
            for i in numbers
        ]
        rows.append(Row(str(module.layer), tuple(cells), module.name))
    return Grid(heading, tuple(map(str, numbers)), tuple(rows), form=term.form, corner="layer")


def _gates_grid(heading: str, gates: Sequence[GateReading], term: Term) -> Grid:
    most = max(len(gate.mean) for gate in gates)
    rows = []
    for gate in gates:
        values = getattr(gate, term.key)
        cells = [Cell(values[i], f"layer {gate.layer}, head {i}") if i < len(values) else None for i in range(most)]
        rows.append(Row(str(gate.layer), tuple(cells), gate.name))
    return Grid(heading, tuple(map(str, range(most))), tuple(rows), form=term.form, corner="layer")
