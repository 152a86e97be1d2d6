"""`gated-attn export`: from what `train` wrote to a folder that stock transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gated_attn.cli.app import app
from gated_attn.errors import CheckpointError, RecipeError, UnsupportedError
from gated_attn.train.load import load_run

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.lfm3")

TINY = """
[model]
layers = 2
heads = 4
kv_heads = 2
dim = 20
head_dim = 6
ffn_dim = 20
context = 8
qk_norm = true
[data]
task = "backcopy"
vocab_size = 11
triggers = 2
[training]
steps = 4
batch = 2
log_every = 2
eval_every = 2
eval_batches = 1
"""


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(TINY)
    invoke("train", folder / "tiny.toml", "--gate", "output:headwise:2sigmoid", "-o", folder / "run", "--json")
    return folder / "run"


def test_a_run_becomes_a_transformers_model(run: Path, tmp_path: Path) -> None:
    result = json.loads(invoke("export", run, tmp_path / "out", "--json").stdout)
    assert (result["target"], result["folder"]) == ("lfm3", str(tmp_path / "out"))
    assert result["error"] <= result["tolerance"]
    model, recipe = load_run(run)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.config.max_position_embeddings == recipe.model.context == 8
    ids = torch.randint(11, (2, 7))
    with torch.no_grad():
        want, got = model(ids).logits, loaded(ids).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    text = invoke("export", run, tmp_path / "expanded", "--target", "qwen3_5_text").stdout
    assert text.startswith("qwen3_5_text: ")
    assert "logits differ by" in text
    assert "headwise gates: each row 6 times" in text


def test_a_checkpoint_of_a_run_is_another_model(run: Path, tmp_path: Path) -> None:
    first, last = sorted(run.glob("checkpoint-*"))
    invoke("export", first, tmp_path / "first")
    invoke("export", run, tmp_path / "last")
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("first", "last")]
    for model, checkpoint in zip(models, (first, last), strict=True):
        ours, _ = load_run(checkpoint)
        assert torch.equal(model.model.embed_tokens.weight, ours.embed.weight)
    assert not torch.equal(models[0].model.embed_tokens.weight, models[1].model.embed_tokens.weight)


def test_mistakes_say_what_to_name(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither what .* wrote nor a transformers model"):
        invoke("export", tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not there"):
        invoke("export", tmp_path / "nowhere", tmp_path / "out")
    shutil.copytree(run, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoint-*"))
    with pytest.raises(RecipeError, match="has no whole checkpoint"):
        invoke("export", tmp_path / "empty", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="laguna's gate is softplus, the model has sigmoid"):
        invoke("export", run, tmp_path / "out", "--target", "laguna")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        invoke("export", run, tmp_path / "empty")


def test_a_run_of_the_readme_command_exports_with_the_setting_that_it_names(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    line = next(line for line in readme.splitlines() if "`gated-attn export" in line)
    setting = next(word for word in line.replace("`", " ").split() if word.startswith("model."))
    (tmp_path / "tiny.toml").write_text(TINY.replace("qk_norm = true\n", ""))
    train = ("train", tmp_path / "tiny.toml", "--gate", "paper-headwise", "--json")
    invoke(*train, "-o", tmp_path / "plain")
    with pytest.raises(UnsupportedError, match=rf"train with --set {setting}\n(.|\n)*lfm3 normalises queries and keys"):
        invoke("export", tmp_path / "plain", tmp_path / "no")
    invoke(*train, "--set", setting, "-o", tmp_path / "run")
    assert json.loads(invoke("export", tmp_path / "run", tmp_path / "out", "--json").stdout)["target"] == "lfm3"


def test_a_folder_of_a_transformers_model_with_attached_gates(tmp_path: Path) -> None:
    from gated_attn.hf.attach import attach

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=31, hidden_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=20, max_position_embeddings=64,
    )  # fmt: skip
    model = attach(transformers.Qwen3ForCausalLM(config), "paper").eval()
    model.save_pretrained(tmp_path / "gated")
    (tmp_path / "gated" / "tokenizer.json").write_text("{}")
    result = json.loads(invoke("export", tmp_path / "gated", tmp_path / "out", "--json").stdout)
    assert result["target"] == "qwen3_5_text"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.config.max_position_embeddings == 64
    ids = torch.randint(31, (2, 7))
    with torch.no_grad():
        want, got = model(ids).logits, loaded(ids).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
