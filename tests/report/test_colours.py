"""The colour maps: published colours, an order that survives without hue, text that can be read on each."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from gated_attn.report import colours


def greens_only(rgb: colours.Rgb) -> colours.Rgb:
    """As seen without cones for red (H. Brettel's plane for protanopia, in the linear approximation of Vienot, 1999)."""
    red, green, blue = rgb
    mixed = 0.11238 * red + 0.88762 * green
    return mixed, mixed, 0.00401 * red - 0.00401 * green + blue


@pytest.mark.parametrize("seen", [lambda rgb: rgb, greens_only])
def test_sizes_grow_lighter_all_the_way(seen: Callable[[colours.Rgb], colours.Rgb]) -> None:
    shown = [colours.luminance(seen(colours.colour(i / 20))) for i in range(21)]
    assert all(low + 0.004 < high for low, high in itertools.pairwise(shown))


def test_differences_have_their_lightest_in_the_middle_and_two_hues() -> None:
    shown = [colours.luminance(colours.colour(i / 20, signed=True)) for i in range(21)]
    assert shown.index(max(shown)) == 10
    below, above = (colours.colour(share, signed=True) for share in (0.1, 0.9))
    assert below[2] > below[0] + 0.1
    assert above[0] > above[2] + 0.5


def test_the_map_is_matplotlibs() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    theirs = matplotlib.colormaps["viridis"]
    for i in range(10):
        assert colours.colour(i / 9) == pytest.approx(theirs(i / 9)[:3], abs=0.01)


@pytest.mark.parametrize("signed", [False, True])
def test_text_stands_out_on_every_colour(signed: bool) -> None:
    for i in range(colours.LEVELS):
        rgb = colours.colour((i + 0.5) / colours.LEVELS, signed=signed)
        light, dark = sorted((colours.luminance(rgb), 0.0 if colours.ink(rgb) == "#000" else 1.0), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_levels_cover_the_scale_and_cut_what_leaves_it() -> None:
    assert [colours.level(v, 0, 2) for v in (-1, 0, 0.999, 1.0, 2, 9)] == [0, 0, 31, 32, 63, 63]
    assert colours.level(1.0, 1.0, 1.0) == 32
    assert f".k{colours.LEVELS - 1}{{" in colours.css()
    assert f".d{colours.LEVELS - 1}{{" in colours.css()
