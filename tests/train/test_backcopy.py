"""The recipe's claim: on bigram-backcopy a headwise gate opens at triggers and shuts elsewhere (arXiv:2410.13835)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gated_attn.train.recipe import Recipe
from gated_attn.train.run import train


@pytest.mark.slow
def test_a_headwise_gate_opens_on_triggers_and_shuts_elsewhere(tmp_path: Path) -> None:
    run = train(Recipe.load("backcopy"), "paper-headwise", None, tmp_path / "run", quiet=True)
    assert run is not None
    assert run.measures["gate_on_triggers"] > 0.9
    assert run.measures["gate_elsewhere"] < 0.25
    assert run.gate_mean is not None
    assert run.measures["gate_elsewhere"] < run.gate_mean < run.measures["gate_on_triggers"]
