"""Small SVG figures for the HTML report, as text: loss curves, paired differences, gate histograms.

Colours are CSS variables and classes of the page, so that a figure follows its light or dark theme (`report.css`). Each
variant has a colour and a dash pattern, so that no reading depends on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from gated_attn.records import GateStat

COLOURS = 8
"""Colour variables `--v0` .. `--v7` of the page; the baseline is `--v0`."""

DASHES = ("", "7 3", "2 3", "9 3 2 3")
"""Dash patterns, one per variant, so that lines differ without colour."""

POINTS = 300
"""A line of more points than this is drawn as averages of equal stretches."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a `curves` figure: variant `index` gives its look, `thin` marks one seed among several.

    `diverged_at` is the step at which a run that did not finish stopped; a cross marks it.
    """

    index: int
    points: tuple[Point, ...]
    label: str
    thin: bool = False
    diverged_at: float | None = None


@dataclass(frozen=True)
class Interval:
    """A mean with its interval for `intervals`; low and high are None with one seed."""

    index: int
    label: str
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class _Frame:
    """The linear map from data to a box of the drawing, y upwards."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + self.width * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.top + self.height * (high - value) / (high - low)


def curves(
    lines: Sequence[Line],
    title: str,
    description: str,
    *,
    x_label: str = "step",
    zero: bool = False,
    clip: bool = False,
    log: bool = False,
    dots: bool = False,
) -> str:
    """Lines over training steps, or over what `x_label` says.

    `zero` draws the line y = 0; `clip` cuts off the steep start, see `_clipped_top`; `log` has powers of ten on the y axis and
    leaves out what is not above 0; `dots` marks every point, and says its value when pointed at.
    """
    lines = [replace(line, points=_averaged(line.points)) for line in lines if line.points]
    told = {line: line.points for line in lines}
    if log:
        lines = [replace(line, points=tuple((x, math.log10(y)) for x, y in line.points if y > 0)) for line in lines]
        told = {line: tuple((x, 10**y) for x, y in line.points) for line in lines}
        lines = [line for line in lines if line.points]
    if not lines:
        return ""
    ys = [y for line in lines for _, y in line.points] + ([0.0] if zero else [])
    xs = [x for line in lines for x, _ in line.points] + [ln.diverged_at for ln in lines if ln.diverged_at is not None]
    top = _clipped_top(lines) if clip else max(ys)
    frame = _Frame(52, 10, 348, 206, _padded(min(0.0, *xs), max(xs), 0.0), _padded(min(ys), top, 0.05))
    parts = [_axes(frame, log=log)]
    if zero:
        parts.append(_rule(frame.left, frame.y(0), frame.left + frame.width, frame.y(0), "zero"))
    # A nested svg cuts what leaves the frame without needing an id for a clip path.
    parts.append(
        f'<svg x="{_n(frame.left)}" y="{_n(frame.top)}" width="{_n(frame.width)}" height="{_n(frame.height)}" '
        f'viewBox="{_n(frame.left)} {_n(frame.top)} {_n(frame.width)} {_n(frame.height)}" overflow="hidden">'
    )
    parts += [_line(line, frame) for line in sorted(lines, key=lambda line: not line.thin)]
    parts.append("</svg>")
    if dots:
        parts += [_dots(line, told[line], frame, x_label) for line in lines]
    parts.append(_text(frame.left + frame.width / 2, 252, x_label, "middle"))
    return _svg(420, 260, title, description, "".join(parts))


def intervals(rows: Sequence[Interval], title: str, description: str) -> str:
    """One row per variant: the mean difference as a dot, its interval as a bar, and the line of no difference."""
    if not rows:
        return ""
    values = [v for row in rows for v in (row.value, row.low, row.high) if v is not None]
    height = 44 * len(rows)
    frame = _Frame(12, 6, 396, height, _padded(min(0.0, *values), max(0.0, *values), 0.08), (0, 1))
    parts = [_rule(frame.x(0), frame.top, frame.x(0), frame.top + height, "zero")]
    for i, row in enumerate(rows):
        y = frame.top + 44 * i + 32
        style = f'style="--c:var(--v{row.index % COLOURS})"'
        parts.append(
            _text(frame.left, y - 17, row.label if len(row.label) <= 60 else f"{row.label[:59]}\u2026", "start")
        )
        if row.low is not None and row.high is not None:
            low, high = frame.x(row.low), frame.x(row.high)
            parts.append(f'<path class="bar" {style} d="M{_n(low)} {_n(y)}H{_n(high)}M{_n(low)} {_n(y - 4)}v8')
            parts.append(f'M{_n(high)} {_n(y - 4)}v8"/>')
        parts.append(f'<circle class="dot" {style} cx="{_n(frame.x(row.value))}" cy="{_n(y)}" r="4"/>')
    base = frame.top + height + 6
    for tick in _ticks(*frame.x_range, 5):
        parts.append(_rule(frame.x(tick), base - 4, frame.x(tick), base, "axis"))
        parts.append(_text(frame.x(tick), base + 14, _tick_text(tick), "middle"))
    return _svg(420, height + 32, title, description, "".join(parts))


def histogram(stat: GateStat, value_range: tuple[float, float]) -> str:
    """One head's gate values: bars over `value_range`, the highest bar as high as the drawing, a mark at the mean."""
    total, peak = sum(stat.histogram), max(stat.histogram)
    name = f"layer {stat.layer}, head {stat.head}"
    if not total or stat.mean is None or stat.below is None:
        return _svg(100, 46, f"{name}: no gate values", "", _text(50, 28, "no values", "middle"), "histogram")
    size = 100 / len(stat.histogram)
    bars = "".join(
        f"M{_n(i * size)} 40V{_n(40 - 38 * count / peak)}h{_n(size)}V40z"
        for i, count in enumerate(stat.histogram)
        if count
    )
    low, high = value_range
    mean = min(max((stat.mean - low) / (high - low), 0.0), 1.0) * 100
    told = f"mean {stat.mean:.3f}, {stat.below:.1%} shut, highest bar {peak / total:.1%} of {total:,} values"
    drawn = f'<path class="bars" d="{bars}"/><path class="axis" d="M0 40.5H100"/>'
    drawn += f'<path class="mean" d="M{_n(mean)} 2V45"/>'
    return _svg(100, 46, f"{name}: {told}", "", drawn, "histogram")


def swatch(index: int) -> str:
    """The legend's sample of variant `index`'s line."""
    return (
        '<svg class="swatch" viewBox="0 0 30 10" aria-hidden="true">'
        f'<path class="curve" {_look(index)} d="M0 5H30"/></svg>'
    )


def average(lines: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """The mean line at the x that all `lines` have."""
    if not lines:
        return ()
    tables = [dict(line) for line in lines]
    shared = [x for x, _ in lines[0] if all(x in table for table in tables)]
    return tuple((x, math.fsum(table[x] for table in tables) / len(tables)) for x in shared)


def _averaged(points: Sequence[Point]) -> tuple[Point, ...]:
    if len(points) <= POINTS:
        return tuple(points)
    size = math.ceil(len(points) / POINTS)
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in blocks)


def _clipped_top(lines: Sequence[Line]) -> float:
    """A top for the y axis that leaves out the first fifth of training, so that the end's differences can be seen."""
    end = max(x for line in lines for x, _ in line.points)
    late = [y for line in lines for x, y in line.points if x >= end / 5 and line.diverged_at is None]
    return max(late) if late else max(y for line in lines for _, y in line.points)


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    if high <= low:
        reach = abs(low) * 0.1 or 1.0
        return low - reach * (share > 0), low + reach
    return low - (high - low) * share, high + (high - low) * share


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) within low .. high."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.75)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    """Ticks on a log axis from 10^low to 10^high: powers of ten, with 2 and 5 times them where there are few."""
    factors = (1,) if high - low > 2 else (1, 2, 5) if high - low > 0.6 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    powers = range(math.floor(low), math.ceil(high) + 1)
    every = max(1, round(len(powers) / 6)) if factors == (1,) else 1
    values = [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]
    return [(math.log10(v), _tick_text(v)) for v in values if low <= math.log10(v) <= high]


def _tick_text(value: float) -> str:
    if abs(value) >= 1e7:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}".replace("-", "\u2212")


def _axes(frame: _Frame, log: bool = False) -> str:
    parts = []
    for tick, text in _decades(*frame.y_range) if log else [(y, _tick_text(y)) for y in _ticks(*frame.y_range, 5)]:
        parts.append(_rule(frame.left, frame.y(tick), frame.left + frame.width, frame.y(tick), "grid"))
        parts.append(_text(frame.left - 6, frame.y(tick) + 4, text, "end"))
    base = frame.top + frame.height
    for tick in _ticks(*frame.x_range, 5):
        parts.append(_rule(frame.x(tick), base, frame.x(tick), base + 4, "axis"))
        parts.append(_text(frame.x(tick), base + 18, _tick_text(tick), "middle"))
    parts.append(_rule(frame.left, base, frame.left + frame.width, base, "axis"))
    return "".join(parts)


def _line(line: Line, frame: _Frame) -> str:
    path = "".join(f"{'L' if i else 'M'}{_n(frame.x(x))} {_n(frame.y(y))}" for i, (x, y) in enumerate(line.points))
    title = f"<title>{escape(line.label)}</title>"
    drawn = f'<path class="curve{" thin" if line.thin else ""}" {_look(line.index)} d="{path}">{title}</path>'
    if len(line.points) == 1:
        x, y = line.points[0]
        style = f'style="--c:var(--v{line.index % COLOURS})"'
        drawn = f'<circle class="dot" {style} cx="{_n(frame.x(x))}" cy="{_n(frame.y(y))}" r="4">{title}</circle>'
    if line.diverged_at is not None:
        x = min(max(frame.x(line.diverged_at), frame.left + 6), frame.left + frame.width - 6)
        y = min(max(frame.y(line.points[-1][1]), frame.top + 6), frame.top + frame.height - 6)
        drawn += (
            f'<path class="cross" {_look(line.index, dashed=False)} d="M{_n(x - 5)} {_n(y - 5)}l10 10m0-10l-10 10">'
        )
        drawn += f"<title>{escape(line.label)}: diverged at step {line.diverged_at:g}</title></path>"
    return drawn


def _dots(line: Line, told: Sequence[Point], frame: _Frame, x_label: str) -> str:
    """A dot at every point, inside a larger one that cannot be seen and is easier to point at."""
    style = f'style="--c:var(--v{line.index % COLOURS})"'
    drawn = []
    for (x, y), (_, value) in zip(line.points, told, strict=True):
        at = f'cx="{_n(frame.x(x))}" cy="{_n(frame.y(y))}"'
        title = escape(f"{line.label}, {x_label} {x:g}: {value:.5g}")
        drawn.append(
            f'<g><title>{title}</title><circle class="near" {at} r="9"/><circle class="dot" {style} {at} r="2.5"/></g>'
        )
    return "".join(drawn)


def _look(index: int, dashed: bool = True) -> str:
    dash = DASHES[index % len(DASHES)] if dashed else ""
    return f'style="--c:var(--v{index % COLOURS})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: int, height: int, title: str, description: str, body: str, kind: str = "figure") -> str:
    label = escape(f"{title}. {description}" if description else title, quote=True)
    head = f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    told = f"<desc>{escape(description)}</desc>" if description else ""
    return f"{head}<title>{escape(title)}</title>{told}{body}</svg>"


def _n(value: float) -> str:
    """A coordinate to a tenth of a unit, without a trailing zero."""
    return f"{value:.1f}".removesuffix(".0")
