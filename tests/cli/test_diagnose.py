"""`gated-attn diagnose`: one command for a folder or a sample, as text, JSON and a record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gated_attn import attach, samples
from gated_attn.cli.diagnose import brief, run
from gated_attn.cli.models import load
from gated_attn.errors import CheckpointError, GatedAttnError, MissingExtraError, RecipeError, SampleError
from gated_attn.records import Diagnosis
from tests.hf import tiny
from tests.hf.tiny import spread, wake

NAMES = (
    "first_token_share", "sink_rate", "strongest_early_share", "max_abs", "kurtosis", "entropy", "gate_mean", "layers", "tokens",
    "text", "seconds", "plain_seconds", "peak_extra_bytes",
)  # fmt: skip


def call(model: str, **options: Any) -> None:
    given: dict[str, Any] = {
        "text": None, "tokens": 64, "length": 16, "layers": None, "heads": None, "queries": None, "sink_tokens": 8, "special": True,
        "dtype": "auto", "attention": None, "output": None, "as_json": False,
    }  # fmt: skip
    run(model, **(given | options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny gated Llama with MiniLM's tokenizer."""
    if samples.cached()["minilm"] is None:
        pytest.skip("sample minilm is not cached: run python -m gated_attn.samples fetch minilm")
    from gated_attn.hf.pretrained import tokenizer

    words = tokenizer("minilm")
    model = wake(attach(spread(tiny.build("llama", vocab_size=len(words))), "output:headwise"), std=1.0)
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_it_prints_one_object(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A gate scales each head. " * 40, encoding="utf-8")
    call(str(folder), text=text, as_json=True, output=tmp_path / "out")
    told = json.loads(capsys.readouterr().out)
    assert set(NAMES) <= set(told)
    assert told["tokens"] == 64
    assert told["text"].startswith("text.txt, sha256 ")
    assert 0 < told["gate_mean"] < 1
    assert [row["layer"] for row in told["layers"]] == [0, 1]
    assert told == brief(Diagnosis.load(tmp_path / "out" / "diagnosis.json"))
    assert told["text"] in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "report-gate-mean.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_that_cannot_be_drawn_leaves_the_record(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match="matplotlib"):
        call(str(folder), as_json=True, output=tmp_path / "out")
    told = json.loads(capsys.readouterr().out)
    assert told == brief(Diagnosis.load(tmp_path / "out" / "diagnosis.json"))
    assert not (tmp_path / "out" / "report.html").exists()


def test_options_choose(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(str(folder), layers="1", heads="0,2-3", queries="4-12", attention="eager", dtype="bfloat16")
    shown = capsys.readouterr().out
    assert "bfloat16, eager" in shown
    assert "\n    1 self" in shown
    assert "\n    0 self" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "0-x"}, "--layers '0-x': numbers and ranges"),
        ({"queries": "9-4"}, "--queries '9-4': two positions"),
        ({"length": 9999}, "--length 9999: this model has positions for 64 tokens"),
        ({"dtype": "float7"}, "unknown dtype 'float7'"),
        ({"layers": "5"}, "layer 5 is not there; this model has layers 0 to 1"),
        ({"tokens": 8}, "do not fill one sequence"),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GatedAttnError, match=message):
        call(str(folder), **options)


def test_special_tokens_may_be_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(str(folder), as_json=True, special=False)
    bare = json.loads(capsys.readouterr().out)
    call(str(folder), as_json=True)
    whole = json.loads(capsys.readouterr().out)
    assert "without special tokens" in bare["text"]
    assert {row["strongest_token"] for row in bare["layers"]}.isdisjoint({"[CLS]", "[SEP]"})
    assert bare["first_token_share"] != whole["first_token_share"]


def test_a_text_that_is_none_and_a_model_that_reads_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RecipeError, match="is not UTF-8 text"):
        call(str(folder), text=tmp_path / "bytes")
    spread(tiny.build("vit")).save_pretrained(tmp_path / "vit")
    with pytest.raises(RecipeError, match="reads pixel_values"):
        call(str(tmp_path / "vit"), text=tmp_path / "bytes")
    call(str(tmp_path / "vit"))


def test_names_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=r"nobody/nothing is no folder, no sample \(.*smollm2"):
        load("nobody/nothing")
    with pytest.raises(SampleError, match="is a text, no model"):
        load("shakespeare")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load(str(tmp_path / "empty"))


def test_a_sample_goes_by_its_names() -> None:
    if samples.cached()["dinov2"] is None:
        pytest.skip("sample dinov2 is not cached: run python -m gated_attn.samples fetch dinov2")
    loaded = load("dinov2-s")
    assert loaded.label == "dinov2"
    assert loaded.tokenizer is None
