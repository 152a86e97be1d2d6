"""Training: exact resume, honest losses, one start for all gates, and stopping when there is nothing to learn."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gated_attn.errors import RecipeError, TrainingError
from gated_attn.gate import Gate
from gated_attn.models import Decoder
from gated_attn.records import RunRecord
from gated_attn.train.data import datasets
from gated_attn.train.initialise import initialise, plan
from gated_attn.train.recipe import OptimizerTable, Recipe
from gated_attn.train.run import diverged, gate_range, read_log, train
from gated_attn.train.trainer import GateTrainer, arguments, evaluate, newest_checkpoint, parameter_groups, staging

GATES = ["none", "paper-headwise", "paper", "output:elementwise:sigmoid,rank=3,fill,bias=-1"]


def losses(folder: Path) -> dict[int, tuple[float | None, float | None]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    found: dict[int, tuple[float | None, float | None]] = {}
    for row in rows:
        train_loss, eval_loss = found.get(row["step"], (None, None))
        found[row["step"]] = (row.get("loss", train_loss), row.get("eval_loss", eval_loss))
    return found


@pytest.mark.parametrize("gate", ["paper-headwise", "output:elementwise:sigmoid,rank=3,fill,bias=-1"])
def test_a_resumed_run_has_the_losses_of_one_never_interrupted(hundred: Recipe, gate: str, tmp_path: Path) -> None:
    whole = train(hundred, gate, 3, tmp_path / "whole", quiet=True)
    assert train(hundred, gate, 3, tmp_path / "parts", stop_after=37, quiet=True) is None
    resumed = train(hundred, gate, 3, tmp_path / "parts", resume=True, quiet=True)
    a, b = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert len(a) == 100
    rows = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    assert len(rows[0]) == len(rows[1]), "what was logged between the checkpoint and the interruption is logged once"
    assert a == b, "losses differ"
    assert whole is not None
    assert resumed is not None
    assert (whole.loss, whole.gate_mean, whole.max_abs) == (resumed.loss, resumed.gate_mean, resumed.max_abs)


def test_a_complete_run_is_not_repeated(tiny: Recipe, tmp_path: Path) -> None:
    run = train(tiny, "paper", 3, tmp_path, quiet=True)
    before = (tmp_path / "run.json").read_bytes()
    assert train(tiny, "paper", 3, tmp_path, resume=True, quiet=True) == run
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_run_that_had_to_stop_keeps_its_history(tiny: Recipe, tmp_path: Path) -> None:
    wild = replace(tiny, optimizer=replace(tiny.optimizer, lr=30.0), training=replace(tiny.training, steps=60))
    with pytest.raises(TrainingError) as caught:
        train(wild, "none", 3, tmp_path, quiet=True)
    run = diverged(wild, "none", 3, "none", caught.value.step, tmp_path)
    assert run.steps == run.diverged_step == caught.value.step
    assert [point.step for point in run.history][:3] == [1, 2, 3]
    assert RunRecord.load(tmp_path / "run.json") == run


@pytest.mark.parametrize(
    ("gate", "span"), [("none", (0, 1)), ("paper", (0, 1)), ("identity", (0, 2)), ("output:headwise:tanh", (-1, 1))]
)
def test_histograms_span_what_a_gate_can_be(gate: str, span: tuple[float, float]) -> None:
    assert gate_range(gate) == span


def test_the_record_says_what_was_measured(tiny: Recipe, tmp_path: Path) -> None:
    run = train(tiny, "paper-headwise", None, tmp_path / "run", quiet=True)
    assert run is not None
    assert RunRecord.load(tmp_path / "run" / "run.json") == run
    assert run.seed == 3
    assert run.loss is not None
    assert 0 < run.loss < math.log(19) + 1
    assert run.bits_per_byte is None, "backcopy tokens are not bytes"
    assert run.gate_mean is not None
    assert {stat.layer for stat in run.gates} == {0, 1}
    assert {stat.head for stat in run.gates} == {0, 1, 2, 3}
    assert run.sample is not None
    assert run.sample.tokens[0] == "<s>"
    assert set(run.measures) == {"gate_on_triggers", "gate_elsewhere"}
    assert [point.step for point in run.history] == list(range(1, 21))
    assert run.recipe["training"]["steps"] == 20


@pytest.mark.parametrize("gate", GATES)
def test_shared_parameters_start_alike_whatever_the_gate(tiny: Recipe, gate: str) -> None:
    base = dict(initialise(Decoder(plan(tiny, "none").config), 5).named_parameters())
    planned = plan(tiny, gate, "none")
    model = initialise(Decoder(planned.config), 5)
    other = dict(initialise(Decoder(planned.config), 6).named_parameters())
    for name, parameter in model.named_parameters():
        if ".attn_gate." not in name:
            assert torch.equal(parameter, base[name]), name
            assert parameter.dim() < 2 or not torch.equal(parameter, other[name]), name


def test_a_narrowed_feed_forward_is_a_part_of_the_whole_one() -> None:
    recipe = Recipe.load("shakespeare")
    planned = plan(recipe, "paper", "ffn")
    assert planned.config.ffn_dim < 344
    assert abs(planned.difference) <= 0.005
    assert planned.added == pytest.approx(4 * 128 * 128 / 824448)
    assert planned.parameters == sum(p.numel() for p in Decoder(planned.config).parameters())
    whole = initialise(Decoder(plan(recipe, "none").config), 1)
    narrow = initialise(Decoder(planned.config), 1, recipe.model.ffn_dim)
    width = planned.config.ffn_dim
    assert torch.equal(narrow.layers[0].ffn.up_proj.weight, whole.layers[0].ffn.up_proj.weight[:width])
    assert torch.equal(narrow.layers[3].ffn.down_proj.weight, whole.layers[3].ffn.down_proj.weight[:, :width])


def test_what_cannot_be_matched_says_so_with_numbers(tiny: Recipe) -> None:
    with pytest.raises(
        RecipeError, match=r"nearest feed-forward width, \d+, gives \d+ parameters against \d+|more than the"
    ):
        plan(replace(tiny, model=replace(tiny.model, dim=7, ffn_dim=3)), "paper", "ffn")


@pytest.mark.parametrize("gate", GATES)
def test_parameter_groups_cover_everything_once(tiny: Recipe, gate: str) -> None:
    model = Decoder(plan(tiny, gate, "none").config)
    frozen = model.embed.weight.requires_grad_(False)
    groups = parameter_groups(model, OptimizerTable(lr=0.5, weight_decay=0.1, gate_lr_mult=10.0, gate_weight_decay=0.3))
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p is not frozen)
    gates = {id(p) for module in model.modules() if isinstance(module, Gate) for p in module.parameters()}
    for group in groups:
        is_gate = id(group["params"][0]) in gates
        assert all((id(p) in gates) == is_gate for p in group["params"])
        assert group["lr"] == (5.0 if is_gate else 0.5)
        decay = 0.0 if group["params"][0].dim() < 2 else 0.3 if is_gate else 0.1
        assert group["weight_decay"] == decay


def test_accumulation_changes_no_gradient(tiny: Recipe, tmp_path: Path) -> None:
    """Two parts of three sequences with unequal numbers of counted labels step as one batch of six does."""

    class Ragged(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __init__(self) -> None:
            self.data, _ = datasets(tiny, 3)

        def __len__(self) -> int:
            return len(self.data)  # type: ignore[arg-type]

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            item = {key: value.clone() for key, value in self.data[index].items()}
            item["labels"][2 + index % 7 :] = -100
            return item

    weights = []
    for accumulation in (1, 2):
        table = replace(tiny.training, steps=1, accumulation=accumulation)
        recipe = replace(tiny, training=table, model=replace(tiny.model, dropout=0.0))
        model = initialise(Decoder(plan(recipe, "paper").config), 3)
        trainer = GateTrainer(model, recipe, Ragged(), [], arguments(recipe, tmp_path / str(accumulation), 3))
        trainer.create_optimizer = lambda trainer=trainer, model=model: _sgd(trainer, model)  # type: ignore[method-assign]
        trainer.evaluate = lambda *args, **kwargs: {}  # type: ignore[method-assign]
        trainer.train()
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    for name in weights[0]:
        assert (weights[0][name] - weights[1][name]).abs().max() <= 1e-6


def _sgd(trainer: GateTrainer, model: nn.Module) -> torch.optim.Optimizer:
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return trainer.optimizer


def test_validation_loss_does_not_depend_on_the_batch_size(tiny: Recipe) -> None:
    model = initialise(Decoder(plan(tiny, "paper").config), 3).double()
    _, held_out = datasets(tiny, 3)
    rows = torch.cat(held_out)
    assert evaluate(model, [rows]) == pytest.approx(evaluate(model, list(rows.split(5))), abs=1e-12)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Decoder.forward
    calls = []

    def poisoned(self: Decoder, *args: object, **kwargs: object) -> object:
        output = forward(self, *args, **kwargs)  # type: ignore[arg-type]
        if self.training:
            calls.append(1)
            if len(calls) == 13:
                output["loss"] = output["loss"] * math.nan
        return output

    monkeypatch.setattr(Decoder, "forward", poisoned)
    with pytest.raises(TrainingError, match="step 13: the loss is nan"):
        train(tiny, "paper", 3, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "run.json").exists()
    checkpoint = newest_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    assert checkpoint.endswith("checkpoint-10")


def test_a_run_worse_than_guessing_stops(tiny: Recipe, tmp_path: Path) -> None:
    wild = replace(tiny, optimizer=replace(tiny.optimizer, lr=30.0), training=replace(tiny.training, steps=60))
    with pytest.raises(TrainingError, match=r"step \d+: .*(worse than guessing|the loss is)"):
        train(wild, "none", 3, tmp_path / "run", quiet=True)


def test_a_half_written_checkpoint_replaces_nothing(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    saved = GateTrainer._save_rng_state

    def killed(self: GateTrainer, output_dir: str) -> None:
        if self.state.global_step == 20:
            raise KeyboardInterrupt
        saved(self, output_dir)

    monkeypatch.setattr(GateTrainer, "_save_rng_state", killed)
    with pytest.raises(KeyboardInterrupt):
        train(tiny, "paper", 3, folder, quiet=True)
    assert (staging(str(folder)) / "checkpoint-20").is_dir()
    checkpoint = newest_checkpoint(folder)
    assert checkpoint is not None
    assert checkpoint.endswith("checkpoint-10")
    monkeypatch.setattr(GateTrainer, "_save_rng_state", saved)
    assert train(tiny, "paper", 3, folder, resume=True, quiet=True) is not None


def test_a_folder_belongs_to_one_run(tiny: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="is a file; name a folder"):
        train(tiny, "paper", 3, tmp_path / "file", quiet=True)
    (tmp_path / "file").unlink()
    train(tiny, "paper", 3, tmp_path, quiet=True)
    with pytest.raises(RecipeError, match="resume it, or use another output folder"):
        train(tiny, "paper", 3, tmp_path, quiet=True)
    with pytest.raises(RecipeError, match="gate: 'output:elementwise:sigmoid' there, 'output:headwise:sigmoid' here"):
        train(tiny, "paper-headwise", 3, tmp_path, quiet=True)
    longer = replace(tiny, training=replace(tiny.training, steps=21))
    with pytest.raises(RecipeError, match=r"training\.steps: 20 there, 21 here"):
        train(longer, "paper", 3, tmp_path, quiet=True)
    with pytest.raises(RecipeError, match="no whole checkpoint"):
        train(tiny, "paper", 3, tmp_path / "empty", resume=True, quiet=True)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_no_generator_takes_claims_no_folder(tiny: Recipe, tmp_path: Path, seed: int) -> None:
    with pytest.raises(RecipeError, match="from 0 to 4294967295"):
        train(tiny, "paper", seed, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_line_that_a_kill_cut_off_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_log(tmp_path / "log") == [{"step": 1}, {"step": 2}]


def test_a_run_goes_on_past_a_cut_log_a_damaged_record_and_a_damaged_checkpoint(tiny: Recipe, tmp_path: Path) -> None:
    whole = train(tiny, "paper", 3, tmp_path / "whole", quiet=True)
    folder = tmp_path / "run"
    train(tiny, "paper", 3, folder, quiet=True)
    kept = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert kept == ["checkpoint-10", "checkpoint-20"]
    (folder / "run.json").write_text("{")
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 20, "lo')
    (folder / "checkpoint-20" / "model.safetensors").write_bytes(b"")
    assert newest_checkpoint(folder) == str(folder / "checkpoint-10")
    again = train(tiny, "paper", 3, folder, resume=True, quiet=True)
    assert whole is not None
    assert again is not None
    assert (again.loss, again.history) == (whole.loss, whole.history)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_checkpoint_with_a_missing_or_cut_file_is_not_resumed_from(tiny: Recipe, tmp_path: Path, name: str) -> None:
    train(tiny, "paper", 3, tmp_path, quiet=True)
    part = tmp_path / "checkpoint-20" / name
    part.write_bytes(part.read_bytes()[:40])
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    part.unlink()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_a_complete_run_without_checkpoints_is_not_repeated(tiny: Recipe, tmp_path: Path) -> None:
    run = train(tiny, "paper", 3, tmp_path, quiet=True)
    for checkpoint in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert train(tiny, "paper", 3, tmp_path, resume=True, quiet=True) == run
    with pytest.raises(RecipeError, match="holds this run, complete"):
        train(tiny, "paper", 3, tmp_path, quiet=True)
