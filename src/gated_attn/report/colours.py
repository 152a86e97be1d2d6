"""Colour maps for heatmaps: one for sizes, one for differences; both keep their order for colour-blind eyes and in grey.

Sizes are drawn in viridis (S. van der Walt and N. Smith, 2015, CC0: lightness rises evenly from blue to yellow), differences in
PuOr (C. Brewer, ColorBrewer 2.0: purple below, orange above, white at 0). Between the published colours here they are linear in
RGB. The HTML report and its PNGs both read them from here.
"""

from __future__ import annotations

LEVELS = 64
"""So many steps of a colour map have a CSS class: `k0` .. of sizes, `d0` .. of differences."""

VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
PUOR = ("542788", "8073ac", "b2abd2", "d8daeb", "f7f7f7", "fee0b6", "fdb863", "e08214", "b35806")

Rgb = tuple[float, float, float]


def colour(share: float, *, signed: bool = False) -> Rgb:
    """The colour at `share` of the way from the low to the high end (cut to 0 .. 1), as red, green, blue in 0 .. 1."""
    anchors = PUOR if signed else VIRIDIS
    at = min(max(share, 0.0), 1.0) * (len(anchors) - 1)
    i = min(int(at), len(anchors) - 2)
    low, high = _rgb(anchors[i]), _rgb(anchors[i + 1])
    return (
        low[0] + (high[0] - low[0]) * (at - i),
        low[1] + (high[1] - low[1]) * (at - i),
        low[2] + (high[2] - low[2]) * (at - i),
    )


def level(value: float, low: float, high: float) -> int:
    """Which of `LEVELS` steps `value` is on, between `low` and `high`."""
    share = (value - low) / (high - low) if high > low else 0.5
    return min(max(int(share * LEVELS), 0), LEVELS - 1)


def luminance(rgb: Rgb) -> float:
    """Relative luminance, 0 black to 1 white (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink(rgb: Rgb) -> str:
    """Black or white, whichever stands out more on this colour: a contrast of at least 4.5 to 1."""
    return "#000" if (luminance(rgb) + 0.05) ** 2 > 0.05 * 1.05 else "#fff"


def css() -> str:
    """A class for every step of both maps, and their gradients as variables `--sizes` and `--differences`."""
    lines = [f":root {{ --sizes: {_gradient(VIRIDIS)}; --differences: {_gradient(PUOR)}; }}"]
    for letter, signed in (("k", False), ("d", True)):
        for i in range(LEVELS):
            rgb = colour((i + 0.5) / LEVELS, signed=signed)
            lines.append(f".{letter}{i}{{--k:{written(rgb)};--t:{ink(rgb)}}}")
    return "\n".join(lines)


def written(rgb: Rgb) -> str:
    """As `#rrggbb`."""
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)


def _gradient(anchors: tuple[str, ...]) -> str:
    return f"linear-gradient(to right, {', '.join('#' + anchor for anchor in anchors)})"


def _rgb(text: str) -> Rgb:
    return int(text[:2], 16) / 255, int(text[2:4], 16) / 255, int(text[4:], 16) / 255
