"""Several processes: the same batches, the same losses, one record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gated_attn.errors import RecipeError
from gated_attn.train.recipe import Recipe
from gated_attn.train.run import train
from gated_attn.train.trainer import arguments

CODE = """
import sys
from gated_attn.train.recipe import Recipe
from gated_attn.train.run import train
import json
train(Recipe.from_dict(json.loads(sys.argv[1])), "paper", 3, sys.argv[2], quiet=True)
"""


def test_a_batch_that_does_not_divide_says_so(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RecipeError, match=r"training.batch=6 .* on 4 processes; use a multiple of 4"):
        arguments(tiny, tmp_path, 3)


@pytest.mark.slow
def test_two_processes_train_as_one_does(tiny: Recipe, tmp_path: Path) -> None:
    recipe = replace(tiny, model=replace(tiny.model, dropout=0.0))
    script = tmp_path / "train.py"
    script.write_text(CODE)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    done = subprocess.run(
        [*launch, str(script), json.dumps(recipe.resolved()), str(tmp_path / "two")],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one = train(recipe, "paper", 3, tmp_path / "one", quiet=True)
    two = json.loads((tmp_path / "two" / "run.json").read_text())
    assert one is not None
    assert two["loss"] == pytest.approx(one.loss, abs=1e-4)
    losses = [
        {
            row["step"]: row["loss"]
            for row in map(json.loads, (tmp_path / name / "log.jsonl").read_text().splitlines())
            if "loss" in row
        }
        for name in ("one", "two")
    ]
    assert losses[0].keys() == losses[1].keys()
    assert list(losses[1].values()) == pytest.approx(list(losses[0].values()), abs=1e-4)
