"""`gated-attn report`: each kind of record becomes its page, anything else a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("jinja2")

from gated_attn.cli.report import run
from gated_attn.errors import RecordError
from tests.report.conftest import build_diagnosis, build_health, build_run, build_study


def test_a_diagnosis_from_its_file_or_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_diagnosis(seed=1).save(tmp_path / "after" / "diagnosis.json")
    build_diagnosis(seed=2).save(tmp_path / "before" / "diagnosis.json")
    run(tmp_path / "after", None, None, pictures=False)
    run(tmp_path / "after" / "diagnosis.json", tmp_path / "before", tmp_path / "pair.html", pictures=False)
    assert "before and after" not in (tmp_path / "after" / "report.html").read_text()
    assert "before and after" in (tmp_path / "pair.html").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'pair.html'}"


def test_a_run_with_its_health_and_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare, runs = build_study(seeds=2)
    compare.save(tmp_path / "compare.json")
    for one in runs:
        one.save(tmp_path / one.name / "run.json")
    run(tmp_path, None, None)
    assert "gates compared with none" in (tmp_path / "report.html").read_text()
    folder = tmp_path / runs[2].name
    build_health().save(folder / "health.json")
    run(folder, None, None, pictures=False)
    assert "Training loss" in (folder / "report.html").read_text()
    assert "gates over steps" in (folder / "report-health.html").read_text()
    run(folder / "health.json", None, tmp_path, pictures=False)
    assert "gates over steps" in (tmp_path / "report.html").read_text()
    assert "report-health.html" in capsys.readouterr().out


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "other.json").write_text('{"format": "something"}')
    build_run().save(tmp_path / "run.json")
    (tmp_path / "empty").mkdir()
    for path, told in (
        ("none", "does not exist: pass a record"),
        ("empty", "holds none of diagnosis.json, transfer.json, compare.json, run.json, health.json"),
        ("text.json", "is not a record: not JSON"),
        ("other.json", "has format 'something'; a report is made of gated-attn.diagnosis"),
    ):
        with pytest.raises(RecordError, match=told):
            run(tmp_path / path, None, None)
    with pytest.raises(RecordError, match="only two diagnoses are compared"):
        run(tmp_path / "run.json", tmp_path, None)
    assert not list(tmp_path.glob("*.html"))
