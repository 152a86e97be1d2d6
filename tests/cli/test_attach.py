"""`gated-attn attach` and `gated-attn verify` on saved models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gated_attn.cli.app import app
from gated_attn.errors import CheckpointError, GatedAttnError
from gated_attn.hf.attach import gates
from gated_attn.hf.whole import load_pretrained

SMALL = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 29, "max_position_embeddings": 64,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": 97, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 29, "decoder_ffn_dim": 29, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "llama"


def invoke(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if code == 0 and done.exception is not None:
        raise done.exception
    assert done.exit_code == code
    return done


@torch.no_grad()
def test_a_sample_is_known_by_its_name(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gated_attn.hf.pretrained.folder", {"smollm2": llama}.__getitem__)
    monkeypatch.chdir(tmp_path)
    invoke("attach", "smollm2", "identity", "-o", "gated")
    assert (tmp_path / "gated" / "tokenizer_config.json").is_file()
    assert "has no attached gates" in str(CliRunner().invoke(app, ["verify", "smollm2"]).exception)
    llama.rename(tmp_path / "minilm")
    invoke("attach", "minilm", "identity", "-o", "other")  # a folder comes first


@torch.no_grad()
def test_a_saved_model_gets_gates_that_load_and_verify(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "gated"
    text = invoke("attach", llama, "identity", "-o", out).stdout
    assert "2 gates, 192 parameters" in text
    assert text.count("exactly so") == 2
    assert (out / "tokenizer_config.json").is_file()
    model, ids = load_pretrained(out), torch.arange(3, 12)[None]
    assert len(gates(model)) == 2
    stock = hf.LlamaForCausalLM.from_pretrained(llama)
    assert torch.equal(model(ids).logits, stock(ids).logits)
    found = json.loads(invoke("verify", out, "--json").stdout)
    assert found["ok"]
    assert [row["deviation"] for row in found["rows"]] == [0.0, 0.0]


def test_kinds_layers_and_names_choose(tmp_path: Path) -> None:
    hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ)).save_pretrained(tmp_path / "bart")
    options = ("--cross", "value:headwise", "--layers", "0", "--name", "model.decoder.*", "--json")
    found = json.loads(invoke("attach", tmp_path / "bart", "paper", *options, "-o", tmp_path / "out").stdout)
    assert found["gates"] == {
        "model.decoder.layers.0.self_attn.attn_gate": "output:elementwise:sigmoid",
        "model.decoder.layers.0.encoder_attn.attn_gate": "value:headwise:sigmoid",
    }


def test_a_gate_that_is_not_wired_ends_with_exit_code_1(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gated_attn.hf import functions

    invoke("attach", llama, "identity", "-o", tmp_path / "gated")
    monkeypatch.setattr(functions, "apply_gate", lambda x, gate, fill=None, op="mul": x)
    done = invoke("verify", tmp_path / "gated", code=1)
    assert done.stdout.count("FAIL") == 2
    assert "off by" in done.stdout
    with pytest.raises(GatedAttnError, match="not all wired, so nothing was written"):
        invoke("attach", llama, "identity", "-o", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_mistakes_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(GatedAttnError, match=r"has no config\.json"):
        invoke("attach", tmp_path, "identity", "-o", tmp_path / "out")
    with pytest.raises(GatedAttnError, match="exists and is not overwritten"):
        invoke("attach", llama, "identity", "-o", llama)
    with pytest.raises(GatedAttnError, match="did you mean 'identity'"):
        invoke("attach", llama, "identiy", "-o", tmp_path / "out")
    with pytest.raises(GatedAttnError, match="no attached gates to verify"):
        invoke("verify", llama)
    assert not (tmp_path / "out").exists()


def broken(folder: Path, kind: str) -> None:
    """A saved model that something is wrong with."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "a tensor is missing":
        tensors = load_file(weights)
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif kind == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        found = json.loads(config.read_text())
        changes = {
            "list": [1],
            "type": found | {"model_type": "no such"},
            "heads": found | {"num_attention_heads": "four"},
        }
        config.write_text(json.dumps(changes[kind]))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("a tensor is missing", r"lacks 1 tensors of LlamaForCausalLM, which would be random: model\.layers\.0\.self_attn\.q_proj"),
        ("cut", "could not be loaded: "),
        ("list", "could not be loaded: "),
        ("type", "could not be loaded: .*no such"),
        ("heads", "could not be loaded: "),
    ],
)  # fmt: skip
def test_folders_that_are_not_whole_are_one_message(llama: Path, tmp_path: Path, kind: str, words: str) -> None:
    broken(llama, kind)
    with pytest.raises(CheckpointError, match=words):
        invoke("attach", llama, "identity", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_completed_does_not_appear(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (llama / "tokenizer").mkdir()

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("gated_attn.cli.models.shutil.copy2", full)
    with pytest.raises(OSError, match="no space left"):
        invoke("attach", llama, "identity", "-o", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]
    monkeypatch.undo()
    invoke("attach", llama, "identity", "-o", tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer").exists()
