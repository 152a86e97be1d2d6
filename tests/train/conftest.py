"""A recipe that trains in a second: generated data, one thin layer, dropout on so that random state matters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gated_attn.train.recipe import DataTable, ModelTable, OptimizerTable, Recipe, TrainingTable


@pytest.fixture
def tiny() -> Recipe:
    return Recipe(
        name="tiny",
        model=ModelTable(layers=2, heads=4, kv_heads=2, head_dim=6, dim=23, ffn_dim=31, context=11, dropout=0.1),
        data=DataTable(task="backcopy", vocab_size=19, triggers=2),
        optimizer=OptimizerTable(lr=1e-2),
        training=TrainingTable(steps=20, batch=6, log_every=1, eval_every=10, eval_batches=2, seed=3),
    )


@pytest.fixture
def hundred(tiny: Recipe) -> Recipe:
    return replace(tiny, training=replace(tiny.training, steps=100, eval_every=50))
