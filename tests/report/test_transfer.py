"""The page of a sink transfer, and the record's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from gated_attn.errors import RecordError
from gated_attn.records import Evidence, TransferRecord
from gated_attn.report.transfer import change, pictures_of, render_transfer, write_transfer_report
from tests.report.conftest import build_transfer

pytest.importorskip("jinja2")


def test_the_table_has_both_sides_and_what_was_not_measured_is_left_out() -> None:
    page = render_transfer(build_transfer(), "maps.html")
    assert "<td>20.00</td><td>20.10</td><td>+0.5 %</td>" in page
    assert "<td>24,960</td><td>1,040</td><td>x 0.0417</td>" in page
    assert 'href="#def-w4a16_perplexity">w4a16 perplexity</a></th><td>-</td><td>24.00</td><td>-</td>' in page
    assert "streaming" not in page
    assert "3 of 6 heads have a sink." in page
    assert "left as it is" not in page
    assert 'href="maps.html"' in page
    assert page.count("<li>model.layers.1.self_attn, head 1") == 12
    assert "And 2 more." in page
    assert "Divergence over steps" in page
    assert 'id="def-perplexity"' in page
    assert 'id="def-share"' in page


def test_heads_of_layers_and_what_they_lack() -> None:
    share, fit = pictures_of(build_transfer())
    assert [row.label for row in share.grids[0].rows] == ["0", "1", "2"]
    assert share.grids[0].values == [0.01, 0.0, 0.4, 0.02, 0.6, 0.7]
    assert fit.grids[0].values == [0.8, 0.6, 0.9, -0.1]
    assert fit.grids[0].rows[0].cells == (None, None)


def test_a_model_without_sinks_is_said_to_be_as_it_was() -> None:
    page = render_transfer(build_transfer(gated=False))
    assert "left as it is" in page
    assert "Divergence" not in page
    assert len(pictures_of(build_transfer(gated=False))) == 1


def test_it_is_written_with_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_transfer_report(build_transfer(), tmp_path / "report.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report-r2.png", "report-share.png", "report.html"]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [(20, 20.1, "+0.5 %"), (20, 10, "x 0.5"), (1, 2.5, "x 2.5"), (20, 18, "-10.0 %"), (None, 1, "-"), (0, 1, "-")],
)
def test_changes_are_per_cent_or_factors(before: float | None, after: float | None, told: str) -> None:
    assert change(before, after) == told


def test_the_record_keeps_everything(tmp_path: Path) -> None:
    record = build_transfer()
    record.save(tmp_path / "transfer.json")
    assert TransferRecord.load(tmp_path / "transfer.json") == record
    assert record.sinks == 3
    shown = str(record)
    assert "perplexity, prose" in shown
    assert "3 of 6 heads have a sink; 12 parameters added (1.20%) in 61 s" in shown
    with pytest.raises(RecordError, match="under 'all'"):
        Evidence(perplexity={"prose": 1.0})
