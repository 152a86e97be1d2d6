"""Comparing: pairs by seed, runs that need not be repeated, divergence, and a record that the report can read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from gated_attn.errors import RecipeError
from gated_attn.records import CompareRecord, HistoryPoint, RunRecord
from gated_attn.report.html import render_html
from gated_attn.train import compare as module
from gated_attn.train.compare import compare, pair, step_times
from gated_attn.train.recipe import Recipe
from gated_attn.train.run import slug, train

GATES = ["none", "paper-headwise"]


@pytest.fixture
def done(tiny: Recipe, tmp_path: Path) -> tuple[Recipe, Path, CompareRecord]:
    recipe = replace(tiny, training=replace(tiny.training, steps=6, eval_every=3))
    return recipe, tmp_path, compare(recipe, GATES, 2, tmp_path, match="none", jobs=1, quiet=True)


def test_pairs_rows_and_report(done: tuple[Recipe, Path, CompareRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder, record = done
    assert [(row.gate, row.seed) for row in record.rows] == [
        ("none", 3),
        ("paper-headwise", 3),
        ("none", 4),
        ("paper-headwise", 4),
    ]
    losses = {(row.gate, row.seed): row.loss for row in record.rows}
    differences = [losses["paper-headwise", seed] - losses["none", seed] for seed in (3, 4)]  # type: ignore[operator]
    (only,) = record.paired
    assert (only.metric, only.n) == ("loss", 2)
    assert only.difference == pytest.approx(sum(differences) / 2)
    assert only.low is not None
    assert only.low < min(differences)
    assert set(record.timing) == set(GATES)
    assert record.timing["none"] == 1.0
    assert CompareRecord.load(folder / "compare.json") == record
    runs = [RunRecord.load(folder / path) for path in record.runs]
    assert "paper-headwise" in render_html(record, runs)

    def must_not_run(job: object) -> None:
        raise AssertionError(f"{job} was complete and ran again")

    monkeypatch.setattr(module, "_run", must_not_run)
    again = compare(recipe, GATES, 2, folder, match="none", jobs=1, quiet=True)
    assert again.rows == record.rows


def test_a_seed_that_diverged_is_left_out_of_the_pairs(done: tuple[Recipe, Path, CompareRecord]) -> None:
    _, folder, record = done
    runs = [RunRecord.load(folder / path) for path in record.runs]
    runs[1] = replace(runs[1], diverged=True, loss=None)
    (only,) = pair(runs, GATES)
    assert (only.n, only.low, only.high) == (1, None, None)
    runs[3] = replace(runs[3], diverged=True, loss=None)
    (none,) = pair(runs, GATES)
    assert (none.n, none.difference) == (0, None)


def test_the_learning_rate_sweep_finds_where_training_breaks(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(tiny, training=replace(tiny.training, steps=120, eval_every=30))
    rates: list[float] = []

    def in_this_process(work: list[module.Job], jobs: int, quiet: bool) -> list[RunRecord]:
        rates.extend(job.recipe.optimizer.lr for job in work)
        return [module._run(job) for job in work]

    monkeypatch.setattr(module, "_run_all", in_this_process)
    sweep = [5000.0, 9000.0, 1.0]
    record = compare(recipe, ["none"], 1, tmp_path, match="none", lr_sweep=sweep, jobs=1, quiet=True)
    assert record.rows[0].largest_stable_lr == pytest.approx(recipe.optimizer.lr)
    assert rates == pytest.approx([0.01, 0.01, 50.0]), "the whole run, then the sweep up to the first rate that breaks"


def test_what_counts_as_diverged(tiny: Recipe, tmp_path: Path) -> None:
    run = train(tiny, "none", 3, tmp_path, quiet=True)
    assert run is not None
    assert run.loss is not None
    assert not module.has_diverged(run, 19)
    assert module.has_diverged(replace(run, loss=math.log(19)), 19)
    assert module.has_diverged(
        replace(run, history=(*run.history, HistoryPoint(step=21, train_loss=run.loss + 1.5))), 19
    )
    assert module.has_diverged(replace(run, loss=None, diverged=True), 19)


def test_impossible_rates_are_refused_before_anything_is_trained(tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="each must be above 0"):
        compare(tiny, GATES, 1, tmp_path, lr_sweep=[1.0, -2.0], quiet=True)
    assert not list(tmp_path.iterdir())


def test_specs_that_differ_in_punctuation_get_folders_of_their_own() -> None:
    assert len({slug(gate) for gate in ("paper,layers=0,3", "paper,layers=0-3", "paper,layers=0", "paper")}) == 4


def test_the_same_gate_twice_is_refused(tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="different gates"):
        compare(tiny, ["paper", "output:elementwise"], 1, tmp_path, quiet=True)


def test_step_times_are_relative_to_the_first_gate(tiny: Recipe) -> None:
    times = step_times(tiny, ["none", "paper"], "none")
    assert times["none"] == 1.0
    assert 0.2 < times["paper"] < 20
