"""Gates that wait, and gates whose decay changes when a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback

from gated_attn.errors import RecipeError, SpecError
from gated_attn.hf import GateDecay, GateMonitor, GateWarmup
from gated_attn.hf.groups import gate_parameters
from tests.hf import tiny
from tests.hf.training import VOCAB, Chain, Spy, launch, llama, measured, no_further_off, same_numbers, trainer


def test_gates_wait_and_then_train(tmp_path: Path) -> None:
    """gradients None and weights constant at steps 0 to 2, though decayed; at 3 they train."""
    model = llama()
    before = torch.cat([p.detach().flatten().clone() for p in gate_parameters(model).values()])
    spy = Spy()
    run = trainer(model, tmp_path, 5, GateWarmup(3), spy, weight_decay=0.1, gate_weight_decay=0.5)
    run.train()
    assert spy.none == [True, True, True, False, False]
    assert all(torch.equal(values, before) for values in spy.values[:3])
    assert not torch.equal(spy.values[3], before)
    states = [run.optimizer.state[p] for p in gate_parameters(model).values()]
    assert all(float(state["step"]) == 2 for state in states)
    assert all(not p._post_accumulate_grad_hooks for p in gate_parameters(model).values())


def test_a_frozen_gate_leaves_the_others_as_without_gradient(tmp_path: Path) -> None:
    """The clipped norm is that of the others alone: the same bits as with requires_grad=False."""
    waiting, frozen = llama(), llama()
    for parameter in gate_parameters(frozen).values():
        parameter.requires_grad_(False)
    trainer(waiting, tmp_path, 4, GateWarmup(9), max_grad_norm=0.01).train()
    trainer(frozen, tmp_path, 4, max_grad_norm=0.01).train()
    for (name, one), (_, other) in zip(waiting.named_parameters(), frozen.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert all(not p._post_accumulate_grad_hooks for p in gate_parameters(waiting).values())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_resumed_inside_the_freeze_is_the_uninterrupted_one(tmp_path: Path, accumulation: int) -> None:
    def run(folder: str, steps: int, callback: GateWarmup) -> tuple[Trainer, Spy]:
        spy = Spy()
        return trainer(
            llama(), tmp_path / folder, steps, callback, spy, save_strategy="steps", save_steps=2,
            gradient_accumulation_steps=accumulation,
        ), spy  # fmt: skip

    whole, seen = run("whole", 6, GateWarmup(4))
    whole.train()
    run("parts", 2, GateWarmup(4))[0].train()
    rest, spy = run("parts", 6, GateWarmup(4))
    rest.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert spy.none == [True, True, False, False] == seen.none[2:]
    for one, other in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    state = json.loads((tmp_path / "whole" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["GateWarmup"]["args"] == {"freeze_steps": 4}


def test_waiting_works_in_compiled_models(tmp_path: Path) -> None:
    model = llama()
    model.compile(backend="aot_eager")
    spy = Spy()
    trainer(model, tmp_path, 3, GateWarmup(2), spy).train()
    assert spy.none == [True, True, False]
    assert torch.equal(spy.values[0], spy.values[1])


def test_a_warm_up_that_cannot_be_says_why(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="freeze_steps=-1: pass a number"):
        GateWarmup(-1)
    bare = tiny.build("llama", vocab_size=VOCAB)
    with pytest.raises(SpecError, match="found no trainable gate"):
        trainer(bare, tmp_path, 1, GateWarmup(2)).train()
    alone = llama().requires_grad_(False)
    for parameter in gate_parameters(alone).values():
        parameter.requires_grad_(True)
    with pytest.raises(RecipeError, match="only gates are trainable, so 2 steps"):
        trainer(alone, tmp_path, 1, GateWarmup(2)).train()


def test_decay_is_switched_on_at_resume(tmp_path: Path) -> None:
    """the checkpoint's own decay does not win, the moments are the checkpoint's; 0 changes no bit."""

    def resumed(*callbacks: TrainerCallback) -> Trainer:
        run = trainer(llama(), tmp_path, 4, *callbacks)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        return run

    trainer(llama(), tmp_path, 2, save_strategy="steps", save_steps=2).train()
    plain, zero, decayed = resumed(), resumed(GateDecay(0.0)), resumed(GateDecay(5.0))
    for one, other in zip(plain.model.parameters(), zero.model.parameters(), strict=True):
        assert torch.equal(one, other)
    groups = {group["name"]: group for group in decayed.optimizer.param_groups}
    assert groups["gate weights"]["weight_decay"] == 5.0
    assert groups["gate vectors"]["weight_decay"] == groups["weights"]["weight_decay"] == 0.0
    norms = [
        sum(float(p.detach().norm()) for n, p in gate_parameters(r.model).items() if "weight" in n)
        for r in (plain, decayed)
    ]
    assert norms[1] < 0.995 * norms[0]
    with pytest.raises(RecipeError, match=r"no optimizer group is named 'gate weights' \(there are: "):
        Trainer(llama(), plain.args, train_dataset=Chain(), callbacks=[GateDecay(1.0)]).train()


SWITCH = """
import sys, torch
from pathlib import Path
from gated_attn.hf import GateMonitor, GateWarmup
from tests.hf.training import Spy, llama, measured, trainer
spy = Spy()
run = trainer(llama(), Path(sys.argv[1]), 5, GateWarmup(3), GateMonitor(every=1), spy, per_device_train_batch_size=2)
run.train()
if run.is_world_process_zero():
    torch.save({"none": spy.none, "values": spy.values, "logs": measured(run)}, sys.argv[2])
"""


@pytest.mark.slow
def test_two_processes_switch_together(tmp_path: Path) -> None:
    """DDP does not hang at the switch, and the gates of all processes are those of one."""
    launch(tmp_path, SWITCH, 2, str(tmp_path / "two"), str(tmp_path / "out.pt"))
    found = torch.load(tmp_path / "out.pt")
    alone = []
    for model in (llama(), llama().double()):
        spy = Spy()
        run = trainer(model, tmp_path / "one", 5, GateWarmup(3), GateMonitor(every=1), spy)
        run.train()
        assert found["none"] == spy.none == [True, True, True, False, False]
        alone.append((spy.values, list(measured(run).values())))
    (values, logs), (exact_values, exact_logs) = alone
    no_further_off(found["values"], values, exact_values)
    same_numbers(found["logs"].values(), logs, exact_logs)
