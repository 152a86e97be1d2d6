"""The SVG figures: well-formed, inside their frame, the right bars and lines."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from gated_attn.records import HISTOGRAM_BINS, GateStat
from gated_attn.report import figures
from gated_attn.report.figures import Interval, Line

HOSTILE = "<script>alert(\"1\")</script> & 'x'"


def parse(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert root.find("title") is not None
    return root


def numbers(path: str) -> list[float]:
    return [float(text) for text in re.findall(r"-?\d+(?:\.\d+)?", path)]


def test_curves_draw_every_line_and_mark_divergence() -> None:
    lines = [
        Line(0, ((0, 3.0), (100, 2.0), (200, 1.5)), "none"),
        Line(1, ((0, 3.0), (100, 2.2)), HOSTILE, thin=True, diverged_at=140),
    ]
    root = parse(figures.curves(lines, HOSTILE, HOSTILE))
    paths = root.findall(".//path[@class='curve']") + root.findall(".//path[@class='curve thin']")
    assert len(paths) == 2
    cross = root.find(".//path[@class='cross']")
    assert cross is not None
    assert cross.findtext("title") == f"{HOSTILE}: diverged at step 140"
    x = numbers(cross.get("d") or "")[0] + 5
    assert 52 + 348 * 100 / 200 < x < 52 + 348 * 150 / 200
    assert root.find(".//script") is None


@pytest.mark.parametrize(
    "points",
    [((0.0, 1.0),), ((5.0, 0.0),), ((0.0, 2.0), (1.0, 2.0)), ((0.0, -1e-9), (1e6, 1e-9)), ((0.0, 1e30), (3.0, -1e30))],
)
def test_curves_take_degenerate_data(points: tuple[tuple[float, float], ...]) -> None:
    svg = figures.curves([Line(0, points, "x")], "t", "d", zero=True, clip=True)
    parse(svg)
    assert "nan" not in svg
    assert "inf" not in svg
    assert len(svg) < 10_000


def test_nothing_to_draw_is_no_figure() -> None:
    assert figures.curves([Line(0, (), "x")], "t", "d") == ""
    assert figures.intervals([], "t", "d") == ""
    assert figures.average([]) == ()


def test_long_lines_are_averaged() -> None:
    points = tuple((float(i), float(i % 2)) for i in range(figures.POINTS * 7))
    svg = figures.curves([Line(0, points, "x")], "t", "d")
    path = parse(svg).find(".//path[@class='curve']")
    assert path is not None
    drawn = numbers(path.get("d") or "")[1::2]
    assert figures.POINTS / 2 < len(drawn) <= figures.POINTS
    assert ">0.5<" in svg
    assert ">0.6<" not in svg  # a block of 7 averages 3/7 or 4/7, no longer 0 or 1


def test_clipping_shows_the_end_of_training() -> None:
    line = Line(0, ((0, 100.0), (10, 3.0), (50, 2.0), (100, 1.0)), "x")
    whole, cut = (figures.curves([line], "t", "d", clip=clip) for clip in (False, True))
    assert ">100<" in whole
    assert ">1.5<" not in whole
    assert ">1.4<" in cut


def test_average_keeps_the_steps_that_all_lines_have() -> None:
    lines = [((0.0, 1.0), (5.0, 2.0), (7.0, 9.0)), ((0.0, 3.0), (5.0, 5.0)), ((0.0, 5.0), (5.0, 11.0), (9.0, 1.0))]
    assert figures.average(lines) == ((0.0, 3.0), (5.0, 6.0))


def test_intervals_place_dots_bars_and_the_zero_line() -> None:
    rows = [Interval(1, "better", -0.04, -0.06, -0.02), Interval(2, HOSTILE * 3, 0.01, None, None)]
    root = parse(figures.intervals(rows, "t", HOSTILE))
    zero = root.find(".//path[@class='zero']")
    bar = root.find(".//path[@class='bar']")
    dots = [float(dot.get("cx") or "nan") for dot in root.findall(".//circle")]
    assert zero is not None
    assert bar is not None
    assert len(root.findall(".//path[@class='bar']")) == 1
    line = numbers(zero.get("d") or "")[0]
    low, _, high = numbers(bar.get("d") or "")[:3]
    assert low < dots[0] < high < line < dots[1]
    assert dots[0] == pytest.approx((low + high) / 2, abs=0.11)


def test_histogram_bars_are_shares_of_the_highest() -> None:
    counts = [0] * HISTOGRAM_BINS
    counts[0], counts[7], counts[-1] = 10, 5, 1
    stat = GateStat(layer=3, head=11, mean=0.25, below=0.625, histogram=tuple(counts))
    root = parse(figures.histogram(stat, (0.0, 1.0)))
    bars = root.find(".//path[@class='bars']")
    mean = root.find(".//path[@class='mean']")
    assert bars is not None
    assert mean is not None
    boxes = [numbers(box) for box in (bars.get("d") or "").split("z") if box]
    assert [box[0] for box in boxes] == [0, 35, 95]
    assert [40 - box[2] for box in boxes] == pytest.approx([38, 19, 3.8], abs=0.05)
    assert numbers(mean.get("d") or "")[0] == 25
    assert root.findtext("title") == "layer 3, head 11: mean 0.250, 62.5% shut, highest bar 62.5% of 16 values"


def test_histogram_uses_the_records_range_and_takes_empty_ones() -> None:
    stat = GateStat(layer=0, head=0, mean=1.5, below=0.0, histogram=(1,) * HISTOGRAM_BINS)
    path = parse(figures.histogram(stat, (0.0, 2.0))).find(".//path[@class='mean']")
    assert path is not None
    assert numbers(path.get("d") or "")[0] == 75
    for empty in (
        GateStat(layer=0, head=0, mean=None, below=None, histogram=(1,) * HISTOGRAM_BINS),
        GateStat(layer=0, head=0, mean=0.5, below=0.5, histogram=(0,) * HISTOGRAM_BINS),
    ):
        assert "no gate values" in (parse(figures.histogram(empty, (0.0, 1.0))).findtext("title") or "")


def test_variants_differ_without_colour() -> None:
    marks = [re.sub(r"var\(--v\d\)", "", figures.swatch(i)) for i in range(len(figures.DASHES))]
    assert len(set(marks)) == len(figures.DASHES)
