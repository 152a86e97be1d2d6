"""Recipes: what is written is what is read, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from gated_attn.errors import RecipeError
from gated_attn.train.recipe import Recipe, names


@pytest.mark.parametrize("name", ["shakespeare", "demo", "backcopy"])
def test_the_packages_recipes_load_and_round_trip(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert name in names()
    assert Recipe.from_dict(recipe.resolved()) == recipe


def test_overrides_are_read_as_toml() -> None:
    recipe = Recipe.load(
        "demo",
        [
            "data.sample=shakespeare",
            "optimizer.lr=0.5",
            "training.steps=7",
            'data.task="backcopy"',
            "optimizer.gate_lr_mult=10",
        ],
    )
    assert (recipe.optimizer.lr, recipe.training.steps, recipe.data.task) == (0.5, 7, "backcopy")
    assert recipe.optimizer.gate_lr_mult == 10.0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.stepz=3", ["'training.stepz'", "steps", "batch"]),
        ("modle.dim=3", ["'modle'", "model"]),
        ("training.steps=1.5", ["training.steps=1.5", "int"]),
        ("training.steps=0", ["training.steps=0", "at least 1"]),
        ("training.batch=7", ["training.batch=7", "accumulation=2"]),
        ("model.qk_norm=1", ["model.qk_norm=1", "bool"]),
        ("optimizer.lr=-1", ["optimizer.lr=-1", "above 0"]),
        ('data.task="images"', ["data.task='images'", "text or backcopy"]),
        ("training.steps", ["table.key=value"]),
        ("steps=3", ["table.key=value"]),
        ("training.steps=[", ["not TOML"]),
    ],
)
def test_errors_name_the_key_and_what_is_legal(override: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load("demo", ["training.accumulation=2", override])
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_lists_the_recipes(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none.toml"), "nonesuch"):
        with pytest.raises(RecipeError, match="backcopy, demo, shakespeare"):
            Recipe.load(name)
