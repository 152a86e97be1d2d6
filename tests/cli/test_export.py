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
    with pytest.raises(RecipeError, match="is not a run's folder"):
        invoke("export", tmp_path, tmp_path / "out")
    shutil.copytree(run, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoint-*"))
    with pytest.raises(RecipeError, match="has no whole checkpoint"):
        invoke("export", tmp_path / "empty", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="laguna: its gate is softplus, the model has sigmoid"):
        invoke("export", run, tmp_path / "out", "--target", "laguna")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        invoke("export", run, tmp_path / "empty")
