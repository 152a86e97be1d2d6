"""Records: strict, versioned, atomic JSON, and the interval over seeds."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gated_attn.errors import GatedAttnError, RecordError
from gated_attn.records import (
    HISTOGRAM_BINS,
    CompareRecord,
    CompareRow,
    GateStat,
    HistoryPoint,
    Paired,
    RunRecord,
    SampleGates,
    paired_interval,
    t_quantile,
    verdict,
    write_text,
)

NAN, INF = math.nan, math.inf


def make_run(**changes: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "name": "headwise-seed7",
        "gate": "output:headwise:sigmoid",
        "seed": 7,
        "recipe": {"steps": 23, "optimizer": {"betas": (0.9, 0.95)}},
        "parameters": 10_007,
        "added_parameters": 0.0025,
        "steps": 23,
        "tokens": 31_417,
        "loss": 1.6237,
        "bits_per_byte": 2.3425,
        "seconds_per_step": 0.137,
        "first_token_share": 0.0684,
        "gate_mean": 0.1852,
        "gate_below": 0.3664,
        "max_abs": 41.5,
        "history": [HistoryPoint(step=5, train_loss=3.1), HistoryPoint(step=23, eval_loss=1.6237, gate_mean=0.19)],
        "gates": [GateStat(layer=1, head=2, mean=0.2, below=0.4, histogram=[3] * HISTOGRAM_BINS)],
        "sample": SampleGates(tokens=["a", "\ud800", "\n"], values=[[[0.1, 0.2, 1], [0.3, 0.4, 0.5]]], layers=[1]),
        "environment": {"versions": {"torch": "2.13.0"}, "threads": 2},
    }
    return RunRecord(**{**fields, **changes})


def make_compare(**changes: Any) -> CompareRecord:
    fields: dict[str, Any] = {
        "recipe": "shakespeare",
        "baseline": "none",
        "rows": [CompareRow.from_run(make_run()), CompareRow.from_run(make_run(gate="none", gate_mean=None))],
        "paired": [Paired(gate="x", metric="loss", difference=-0.03, low=-0.04, high=-0.02, n=3)],
        "timing": {"none": 1, "output:headwise:sigmoid": 1.037},
        "runs": ["headwise-seed7/run.json"],
    }
    return CompareRecord(**{**fields, **changes})


@pytest.mark.parametrize("record", [make_run(), make_compare(), make_run(history=(), gates=(), sample=None)])
def test_a_record_survives_its_file(record: RunRecord | CompareRecord, tmp_path: Path) -> None:
    path = record.save(tmp_path / "deep" / "record.json")
    assert type(record).load(path) == record
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]


def test_the_file_names_its_format_and_version_first() -> None:
    data = json.loads(make_run().to_json())
    assert list(data)[:2] == ["format", "version"]
    assert (data["format"], data["version"]) == ("gated-attn.run", 1)
    assert make_compare().to_json_object()["format"] == "gated-attn.compare"


def test_compare_json_has_what_scripts_read() -> None:
    data = make_compare().to_json_object()
    row, pair = data["rows"][0], data["paired"][0]
    keys = {"gate", "seed", "parameters", "loss", "bits_per_byte", "seconds_per_step", "first_token_share", "gate_mean"}
    for key in (*keys, "max_abs"):
        assert row[key] == getattr(make_run(), key)
    assert {key: pair[key] for key in ("gate", "difference", "low", "high", "n")} == {
        "gate": "x",
        "difference": -0.03,
        "low": -0.04,
        "high": -0.02,
        "n": 3,
    }


def test_values_become_plain() -> None:
    run = make_run(loss=2)
    assert isinstance(run.loss, float)
    assert run.recipe["optimizer"]["betas"] == [0.9, 0.95]
    assert isinstance(run.history, tuple)
    assert run.sample is not None
    assert run.sample.values[0][0] == (0.1, 0.2, 1.0)
    assert run.perplexity == math.exp(2)
    assert make_run(loss=1e6).perplexity == INF
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.loss = 3.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "gated-attn.compare"}, "expected format 'gated-attn.run', got 'gated-attn.compare'"),
        ({"version": 2}, "version 2 cannot be read: this gated-attn reads version 1"),
        ({"version": True}, "version True cannot be read"),
        ({"colour": 1}, "unknown 'colour'"),
        ({"seed": None}, "RunRecord.seed needs int, got NoneType None"),
        ({"seed": "seven"}, "RunRecord.seed needs int, got str 'seven'"),
        ({"seed": 7.5}, "RunRecord.seed needs int, got float 7.5"),
        ({"loss": True}, "RunRecord.loss needs a finite number, got bool True"),
        ({"gates": [{"layer": 0}]}, "missing 'head', 'mean', 'below', 'histogram'"),
        ({"histogram_range": [0, 1, 2]}, "histogram_range needs 2 values, got 3"),
        ({"recipe": []}, "RunRecord.recipe needs"),
    ],
)
def test_reading_is_strict(change: dict[str, Any], told: str) -> None:
    data = {**make_run().to_json_object(), **change}
    with pytest.raises(RecordError) as caught:
        RunRecord.from_json_object(data)
    assert told in str(caught.value)


@pytest.mark.parametrize("key", [part.name for part in dataclasses.fields(RunRecord)])
def test_every_key_is_required(key: str) -> None:
    data = make_run().to_json_object()
    del data[key]
    with pytest.raises(RecordError, match=f"missing '{key}'"):
        RunRecord.from_json_object(data)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", make_run().to_json()[:200], make_run().to_json().replace("1.6237", "NaN")]
)
def test_broken_files_are_record_errors_that_name_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"run\.json"):
        RunRecord.load(path)


def test_unreadable_files_are_record_errors(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none\.json: No such file"):
        RunRecord.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(RecordError, match=r"binary\.json"):
        RunRecord.load(tmp_path / "binary.json")
    assert issubclass(RecordError, GatedAttnError)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_only_a_diverged_run_may_lack_finite_numbers(bad: float) -> None:
    history = [HistoryPoint(step=5, train_loss=3.0), HistoryPoint(step=11, train_loss=bad)]
    with pytest.raises(RecordError, match=r"RunRecord\.loss holds NaN or infinity although diverged is false"):
        make_run(loss=bad)
    with pytest.raises(RecordError, match=r"RunRecord\.history"):
        make_run(history=history)
    run = make_run(loss=bad, history=history, diverged=True, diverged_step=11)
    assert (run.loss, run.history[1].train_loss, run.perplexity) == (None, None, None)
    assert '"loss": null' in run.to_json()
    assert RunRecord.from_json(run.to_json()) == run
    assert CompareRow.from_run(run).diverged


@pytest.mark.parametrize("change", [{"added_parameters": NAN}, {"recipe": {"lr": INF}}, {"histogram_range": (0, INF)}])
def test_configuration_must_be_finite_even_in_a_diverged_run(change: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        make_run(diverged=True, **change)


def test_no_file_ever_holds_nan(tmp_path: Path) -> None:
    compare = make_compare(paired=[Paired(gate="x", metric="loss", difference=NAN, low=None, high=None, n=1)])
    with pytest.raises(RecordError, match="not finite"):
        compare.save(tmp_path / "compare.json")
    assert list(tmp_path.iterdir()) == []


def test_gate_parts_check_their_sizes() -> None:
    with pytest.raises(RecordError, match="needs 20 counts >= 0, got 3"):
        GateStat(layer=0, head=0, mean=0.5, below=0.1, histogram=(1, 2, 3))
    with pytest.raises(RecordError, match="counts >= 0"):
        GateStat(layer=0, head=0, mean=0.5, below=0.1, histogram=(-1,) * HISTOGRAM_BINS)
    with pytest.raises(RecordError, match=r"2 tokens and rows of \[3\] values"):
        SampleGates(tokens=("a", "b"), values=(((0.1, 0.2, 0.3),),))
    with pytest.raises(RecordError, match=r"equally many heads per layer, got \[1, 2\]"):
        SampleGates(tokens=("a",), values=(((0.1,),), ((0.1,), (0.2,))))
    with pytest.raises(RecordError, match="1 layers of values and names 2"):
        SampleGates(tokens=("a",), values=(((0.1,),),), layers=(3, 5))
    assert SampleGates(tokens=("a",), values=(((0.1,),), ((0.2,),))).layers == (0, 1)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_text(tmp_path / "file.txt", "old\n")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new\n")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("freedom", "level", "quantile"),
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (3, 0.95, 3.182),
        (4, 0.95, 2.776),
        (9, 0.95, 2.262),
        (30, 0.95, 2.042),
        (100, 0.95, 1.984),
        (1, 0.99, 63.657),
        (5, 0.99, 4.032),
        (7, 0.5, 0.711),
        (10**6, 0.95, 1.960),
    ],
)
def test_t_quantile_matches_the_printed_table(freedom: int, level: float, quantile: float) -> None:
    assert t_quantile(freedom, level) == pytest.approx(quantile, abs=5.01e-4)


@given(st.floats(0.001, 0.999))
def test_t_quantile_matches_the_closed_forms(level: float) -> None:
    """With one degree of freedom P(|T| < t) = 2/pi atan t; with two, t / sqrt(2 + t^2)."""
    assert 2 / math.pi * math.atan(t_quantile(1, level)) == pytest.approx(level, abs=1e-12)
    t = t_quantile(2, level)
    assert t / math.sqrt(2 + t * t) == pytest.approx(level, abs=1e-12)


@pytest.mark.parametrize(("freedom", "level"), [(0, 0.95), (3, 0.0), (3, 1.0), (3, 95.0)])
def test_t_quantile_refuses_nonsense(freedom: int, level: float) -> None:
    with pytest.raises(RecordError, match="freedom >= 1 and 0 < level < 1"):
        t_quantile(freedom, level)


def test_paired_interval() -> None:
    mean, low, high = paired_interval([-0.04, -0.03, -0.05])
    reach = 4.30265 * 0.01 / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((-0.04, -0.04 - reach, -0.04 + reach), abs=1e-6)
    assert paired_interval([0.7]) == (0.7, None, None)
    assert paired_interval([]) == (None, None, None)
    assert paired_interval([0.5, 0.5]) == (0.5, 0.5, 0.5)
    narrow = paired_interval([-0.04, -0.03, -0.05], level=0.5)
    assert narrow[1] is not None
    assert narrow[1] > -0.05
    with pytest.raises(RecordError, match="leave out the seeds that diverged"):
        paired_interval([0.1, NAN])


@pytest.mark.parametrize(
    ("metric", "difference", "low", "high", "n", "text"),
    [
        ("loss", -0.04, -0.065, -0.015, 3, "better by 0.0400 [0.0150, 0.0650]"),
        ("bits_per_byte", 0.04, 0.015, 0.065, 3, "worse by 0.0400 [0.0150, 0.0650]"),
        ("loss", -0.01, -0.05, 0.03, 3, "no difference shown: -0.0100 [-0.0500, +0.0300] includes 0"),
        ("loss", -0.01, -0.02, 0.0, 3, "no difference shown: -0.0100 [-0.0200, +0.0000] includes 0"),
        ("loss", -0.01, None, None, 1, "one seed: no interval (difference -0.0100)"),
        ("loss", None, None, None, 0, "no seed finished in both: nothing to compare"),
        ("max_abs", -9.0, -12.0, -6.0, 3, "lower by 9.0000 [6.0000, 12.0000]"),
        ("max_abs", 9.0, 6.0, 12.0, 3, "higher by 9.0000 [6.0000, 12.0000]"),
    ],
)
def test_verdict_prints_a_null_result_as_one(
    metric: str, difference: float | None, low: float | None, high: float | None, n: int, text: str
) -> None:
    assert verdict(Paired(gate="x", metric=metric, difference=difference, low=low, high=high, n=n)) == text


def test_records_and_report_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, gated_attn.records, gated_attn.report.table, gated_attn.report.html\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
