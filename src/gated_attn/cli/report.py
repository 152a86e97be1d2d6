"""`gated-attn report`: records on disk become a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gated_attn.errors import RecordError
from gated_attn.records import CompareRecord, Diagnosis, HealthRecord, RunRecord, TransferRecord
from gated_attn.report.diagnosis import write_diagnosis_report
from gated_attn.report.health import write_health_report
from gated_attn.report.html import write_report, write_run_report
from gated_attn.report.transfer import write_transfer_report

NAMES = ("diagnosis.json", "transfer.json", "compare.json", "run.json", "health.json")
"""What a folder may hold; of several the first is the report, but a run's health is always drawn too."""

KINDS = (Diagnosis, TransferRecord, CompareRecord, RunRecord, HealthRecord)


def run(path: Path, before: Path | None, output: Path | None, *, pictures: bool = True) -> None:
    source = found(path)
    kind = kind_of(source)
    if before is not None and kind is not Diagnosis:
        raise RecordError(f"--before: only two diagnoses are compared, and {source} holds {kind.FORMAT}")
    target = output or source.with_name("report.html")
    if target.is_dir():
        target = target / "report.html"
    title = source.resolve().parent.name or "run"
    if kind is Diagnosis:
        old = Diagnosis.load(found(before, NAMES[:1])) if before is not None else None
        write_diagnosis_report(Diagnosis.load(source), target, old, pictures=pictures)
    elif kind is TransferRecord:
        maps = "maps.html" if target.with_name("maps.html").is_file() else None
        write_transfer_report(TransferRecord.load(source), target, maps, pictures=pictures)
    elif kind is CompareRecord:
        record = CompareRecord.load(source)
        write_report(record, [RunRecord.load(source.parent / run) for run in record.runs], target)
    elif kind is RunRecord:
        write_run_report(RunRecord.load(source), target)
        health = source.with_name("health.json")
        if health.is_file():
            beside = target.with_name(f"{target.stem}-health.html")
            print(f"report: {write_health_report(HealthRecord.load(health), beside, title, pictures=pictures)}")
    else:
        write_health_report(HealthRecord.load(source), target, title, pictures=pictures)
    print(f"report: {target}")


def found(path: Path, names: tuple[str, ...] = NAMES) -> Path:
    """The record that `path` is, or that lies in it."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise RecordError(f"{path} does not exist: pass a record, such as diagnosis.json, or a folder that holds one")
    for name in names:
        if (path / name).is_file():
            return path / name
    raise RecordError(
        f"{path} holds none of {', '.join(names)}: `gated-attn diagnose -o`, `transfer`, `train` and `compare` write them"
    )


def kind_of(path: Path) -> Any:
    """Which record a file holds, by its `format`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not a record: not JSON, or cut short: {error}") from error
    told = data.get("format") if isinstance(data, dict) else None
    for kind in KINDS:
        if told == kind.FORMAT:
            return kind
    known = ", ".join(kind.FORMAT for kind in KINDS)
    raise RecordError(f"{path} has format {told!r}; a report is made of {known}")
