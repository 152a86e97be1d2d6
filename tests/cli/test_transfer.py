"""`gated-attn transfer`: gates, a record and pages from one command, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gated_attn import attach, samples
from gated_attn.adapt import transfer as transfers
from gated_attn.cli.models import load_folder
from gated_attn.cli.report import run as report
from gated_attn.cli.transfer import brief, run
from gated_attn.errors import RecipeError, SpecError
from gated_attn.hf import gates, load_gates
from gated_attn.records import TransferRecord
from gated_attn.records.transfer import NUMBERS
from tests.hf import tiny
from tests.hf.tiny import spread


def call(model: Path, output: Path, texts: list[Path], **options: Any) -> None:
    given: dict[str, Any] = {
        "tier": "hidden", "sink": "auto", "tokens": 200, "length": 16, "distil": 4, "lr": 1e-3, "seed": 0, "measure": "attention",
        "dtype": "auto", "as_json": False,
    }  # fmt: skip
    run(str(model), output, texts=texts, **(given | options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with SmolLM2's tokenizer."""
    if samples.cached()["smollm2"] is None:
        pytest.skip("sample smollm2 is not cached: run python -m gated_attn.samples fetch smollm2")
    from gated_attn.hf.pretrained import tokenizer

    words = tokenizer("smollm2")
    spread(tiny.build("llama", impl="sdpa", vocab_size=len(words))).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "prose.txt", tmp_path / "lists.txt"]
    made[0].write_text("A head that has nothing to say parks its attention on the first token. " * 40, encoding="utf-8")
    made[1].write_text("\n".join(f"{i}. item number {i}" for i in range(200)), encoding="utf-8")
    return made


def test_it_prints_one_object_and_writes_an_ordinary_gated_model(
    folder: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "SINK", 0.0)
    out = tmp_path / "out"
    call(folder, out, texts, as_json=True)
    told = json.loads(capsys.readouterr().out)
    for side in ("before", "after"):
        assert set(told[side]["perplexity"]) == {"prose", "lists", "all"}
        assert set(NUMBERS) < set(told[side])
        assert told[side]["max_abs"] > 0
        assert told[side]["w8a8_static_perplexity"] is None, "it was not asked for"
    assert told["added_parameters"] > 0
    assert told["tokens"] > 100
    assert told["seconds"] > 0
    record = TransferRecord.load(out / "transfer.json")
    assert told == json.loads(json.dumps(brief(record)))
    assert (record.sink, record.sink_text) == (1, "<|im_start|>")
    model = load_gates(load_folder(folder), out)
    assert {gate.spec.source for gate in gates(model).values()} == {"hidden"}
    ids = torch.arange(10, 20)[None]
    assert torch.isfinite(model(ids).logits).all()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert 'href="maps.html"' in page
    assert "prose: prose.txt; lists: lists.txt" in page
    assert (out / "maps.html").exists()
    assert (out / "report-share.png").read_bytes().startswith(b"\x89PNG")
    (out / "report.html").unlink()
    report(out, None, None, pictures=False)
    assert (out / "report.html").read_text(encoding="utf-8") == page


def test_it_prints_a_table_and_says_when_there_are_no_sinks(
    folder: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "SINK", 1.0)
    call(folder, tmp_path / "out", texts[:1], measure="", sink="<|im_end|>", tier="exact")
    told = capsys.readouterr().out
    assert "perplexity, prose" in told
    assert "this model has no sinks" in told
    assert max(map(len, told.splitlines()[:5])) <= 80
    assert TransferRecord.load(tmp_path / "out" / "transfer.json").sink == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "speed"}, "--measure: unknown speed; legal: perplexity"),
        ({"sink": "<nothing>"}, "--sink '<nothing>': no token"),
        ({"sink": "999999"}, "--sink 999999: the tokenizer has 49152 tokens"),
        ({"tier": "none"}, "unknown tier 'none'"),
        ({"length": 4000, "tokens": 9000}, "needs at least 32008 of each kind"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str, folder: Path, texts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        call(folder, tmp_path / "out", texts, **options)


def test_gated_models_and_two_texts_of_one_name_are_refused(folder: Path, texts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="two have the same name"):
        call(folder, tmp_path / "out", [texts[0], texts[0]])
    model = attach(load_folder(folder), "output:headwise")
    model.save_pretrained(tmp_path / "gated")
    for file in folder.glob("*token*"):
        (tmp_path / "gated" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(SpecError, match="has gates already"):
        call(tmp_path / "gated", tmp_path / "out", texts)
