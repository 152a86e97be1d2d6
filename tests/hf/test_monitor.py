"""Attached gates that are watched while they train, by one process and by several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from gated_attn.errors import RecipeError, SpecError, UnsupportedError
from gated_attn.hf import GateMonitor, GateWarmup, gates
from gated_attn.hf.attach import attach
from gated_attn.records import HealthRecord
from tests.hf import tiny
from tests.hf.training import (
    AWAKE,
    VOCAB,
    Chain,
    Spy,
    batches,
    launch,
    llama,
    measured,
    no_further_off,
    said,
    same_numbers,
    steps,
    trainer,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning",  # the name of transformers 5.0, which we support
)


def in_any_order(values: Tensor) -> float:
    """How far two float64 sums of as many positive numbers can be apart, relative to them: a rounding for each addition."""
    return 2 * values.numel() * torch.finfo(torch.float64).eps / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity_gates_start_from_the_model_s_own_logits(dtype: torch.dtype) -> None:
    model, tokens = tiny.build("llama").to(dtype), torch.arange(3, 24).view(3, 7)
    before = model(tokens).logits
    assert torch.equal(attach(model, "output:headwise:2sigmoid,init=identity")(tokens).logits, before)


def test_identity_gates_learn_with_their_own_rate_and_the_monitor_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """at 10 times the rate the gate grows more than tenfold after step 1; at a hundredth of it, it has not moved.

    Under Adam the weight norm grows by the same factor at any rate, so the monitor judges the change of the gates' values.
    """
    for mult in (10.0, 0.01):
        caplog.clear()
        model = llama("output:headwise:2sigmoid,init=identity")
        run = trainer(model, tmp_path, 150, GateMonitor(every=50), gate_lr_mult=mult, per_device_train_batch_size=8)
        run.train()
        seen = measured(run)
        assert list(seen) == [1, 50, 100, 150]
        growth = [seen[150][f"{i}.self_attn/weight_norm"] / seen[1][f"{i}.self_attn/weight_norm"] for i in (0, 1)]
        change = [seen[150][f"{i}.self_attn/change"] for i in (0, 1)]
        warned = said(caplog)
        if mult == 10:
            assert min(growth) > 10
            assert min(change) > 0.1
            assert not any("moved" in text for text in warned)
        else:
            assert max(change) < 0.01
            assert len(warned) == 2
            assert warned[0].startswith(
                "layer 0, model.layers.0.self_attn: the gate has not moved: its values changed by 0.00"
            )
            assert "in 100 steps" in warned[0]


def test_a_shut_layer_is_named_with_its_heads_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama("output:headwise,bias=0,std=0.2")
    with torch.no_grad():
        gate = gates(model)["model.layers.0.self_attn.attn_gate"].proj
        gate.bias.copy_(torch.tensor([-9.0, -9.0, -9.0, -9.0]))
        gates(model)["model.layers.1.self_attn.attn_gate"].proj.bias.copy_(torch.tensor([9.0, 9.0, 9.0, 9.0]))
    run = trainer(model, tmp_path, 4, GateMonitor(every=1))
    run.train()
    texts = said(caplog)
    assert texts == [
        "layer 0, model.layers.0.self_attn: 100% of gates < 0.05 (heads 0, 1, 2, 3), step 1",
        "layer 1, model.layers.1.self_attn: 100% of gates > 0.95 (heads 0, 1, 2, 3), step 1",
    ]
    assert measured(run)[1]["0.self_attn/below"] == 1.0
    assert measured(run)[4]["1.self_attn/above"] == 1.0


def test_a_gate_that_starts_shut_or_open_on_purpose_is_not_saturated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for spec in ("output:headwise,init=open", "output:headwise,bias=-4", "output:headwise:tanh,op=add,init=identity"):
        trainer(llama(spec), tmp_path, 2, GateMonitor(every=1)).train()
    assert said(caplog) == []


def test_gates_without_gradient_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama("output:headwise:hardsigmoid,bias=0,std=0.01")
    with torch.no_grad():
        gates(model)["model.layers.0.self_attn.attn_gate"].proj.bias.fill_(-9)
        gates(model)["model.layers.1.self_attn.attn_gate"].proj.bias[2] = 9.0
    trainer(model, tmp_path, 1, GateMonitor()).train()
    texts = "\n".join(said(caplog))
    assert "layer 0, model.layers.0.self_attn: no gradient in step 1" in texts
    assert "layer 1, model.layers.1.self_attn: no gradient in heads 2, step 1" in texts


def test_waiting_gates_are_neither_dead_nor_still(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for callbacks in ((GateWarmup(3), GateMonitor(every=1, after=2)), (GateMonitor(every=1, after=2), GateWarmup(3))):
        run = trainer(llama(), tmp_path, 4, *callbacks, gate_lr_mult=50)
        run.train()
        assert said(caplog) == []
        assert ["0.self_attn/grad_norm" in row for row in measured(run).values()] == [False, False, False, True]


@pytest.mark.parametrize("compiled", ["no", "wrapped", "in place", "argument"])
def test_the_monitor_sees_compiled_models_too_and_changes_nothing(tmp_path: Path, compiled: str) -> None:
    """started on a model that is compiled and has run. The weights are those of a run without it.

    To the bit, with eager attention: for PyTorch's fused one a traced model builds its mask in another way.
    """
    weights = []
    for callbacks in ((GateMonitor(every=2),), ()):
        model: Any = llama(impl="eager")
        if compiled == "wrapped":
            model = torch.compile(model, backend="eager", fullgraph=True)
        elif compiled == "in place":
            model.compile(backend="eager", fullgraph=True)
        if compiled != "no":
            model(input_ids=Chain()[0]["input_ids"][None])
        extra = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled == "argument" else {}
        run = trainer(model, tmp_path, 5, *callbacks, remove_unused_columns=False, **extra)
        run.train()
        weights.append([p.detach().clone() for p in model.parameters()])
        if callbacks:
            seen = measured(run)
            assert list(seen) == [1, 2, 4]
            assert all(0 < row[f"{i}.self_attn/mean"] < 1 for row in seen.values() for i in (0, 1))
        inner = getattr(model, "_orig_mod", model)
        assert not inner._forward_pre_hooks
        assert all(not gate._forward_hooks for gate in gates(inner).values())
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_forward_that_no_hook_reaches_is_an_error(tmp_path: Path) -> None:
    model = llama()
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    model(Chain()[0]["input_ids"][None])
    with pytest.raises(UnsupportedError, match="saw none of the 2 gates run in step 1"):
        trainer(model, tmp_path, 2, GateMonitor()).train()


def test_values_are_the_model_s_and_padding_does_not_count(tmp_path: Path) -> None:
    values: dict[str, Tensor] = {}
    model = llama(attention_dropout=0.0)
    rows = [Chain(padding=4)[i] for i in range(4)]
    for name, gate in gates(model).items():
        gate.register_forward_hook(lambda _, __, out, name=name: values.setdefault(name, out.detach()))
    run = trainer(model, tmp_path, 1, GateMonitor(), data=rows)
    run.train()
    found = measured(run)[1]
    for i in (0, 1):
        g = values[f"model.layers.{i}.self_attn.attn_gate"][:, 4:].double()
        assert found[f"{i}.self_attn/mean"] == pytest.approx(float(g.mean()), rel=in_any_order(g))
        assert found[f"{i}.self_attn/below"] == int((g < 0.05).sum()) / g.numel()
        assert found[f"{i}.self_attn/above"] == int((g > 0.95).sum()) / g.numel()
        assert found[f"{i}.self_attn/change"] == 0


def test_accumulated_batches_are_all_measured(tmp_path: Path) -> None:
    """Two by two and four times, the numbers are those of eight at once."""
    rows, found = [Chain()[i] for i in range(8)], []
    for model, size in ((llama(), 2), (llama(), 8), (llama().double(), 8)):
        run = trainer(
            model, tmp_path, 1, GateMonitor(), data=rows, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
        )  # fmt: skip
        run.train()
        found.append(measured(run).values())
    same_numbers(*found)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "spec",
    ["output:elementwise,source=query", "output:headwise,source=constant", "output:shared", "value:headwise:silu",
     "dense:elementwise", "output:elementwise,rank=3,top_k=4", "output:headwise,fill",
     "output:headwise,source=lse,bias=0.4,sink_key", "weights:pairwise,bias=0"],
)  # fmt: skip
def test_every_source_is_recorded(
    tmp_path: Path, spec: str, checkpointing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(llama(spec), tmp_path, 3, GateMonitor(every=2), gradient_checkpointing=checkpointing)
    run.train()
    row = measured(run)[2]
    keys = {key.rpartition("/")[2] for key in row}
    norms = {"weight_norm", "grad_norm", "change"}
    wanted = norms | ({"mean"} if "lse" in spec else set() if "pairwise" in spec else {"mean", "below", "above"})
    assert keys == wanted
    assert all(value == value for value in row.values())
    assert row["0.self_attn/grad_norm"] > 0 if "0.self_attn/grad_norm" in row else True
    assert said(caplog) == []


def test_encoder_decoder_models_count_each_side_s_tokens(tmp_path: Path) -> None:
    model = attach(
        tiny.build("t5", seed=2, vocab_size=VOCAB, dropout_rate=0.0), {"self": AWAKE, "cross": "value:headwise,std=0.9"}
    )
    values: dict[str, Tensor] = {}
    for name, gate in gates(model).items():
        gate.register_forward_hook(lambda _, __, out, name=name: values.setdefault(name, out.detach()))
    mask = torch.ones(11, dtype=torch.long)
    mask[8:] = 0
    rows = [
        {"input_ids": Chain()[i]["input_ids"], "attention_mask": mask, "labels": Chain()[i + 9]["input_ids"]}
        for i in range(4)
    ]
    run = trainer(model, tmp_path, 1, GateMonitor(), data=rows)
    run.train()
    found = next(row for row in run.state.log_history if any(key.startswith("gate/") for key in row))
    assert len([key for key in found if key.endswith("/mean")]) == 6
    for name, g in values.items():
        on_memory = name.startswith("encoder") or "EncDec" in name
        g = g[:, :8] if on_memory else g
        mean = found[f"gate/{name.removesuffix('.attn_gate')}/mean"]
        assert mean == pytest.approx(float(g.double().mean()), rel=in_any_order(g)), name


def test_logs_go_where_they_are_told(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(logs)

    monitor = GateMonitor()
    run = trainer(llama(), tmp_path, 1, Listener(), monitor)
    monitor.log = run.log
    run.train()
    assert any("gate/model.layers.0.self_attn/mean" in row for row in seen)
    assert len([row for row in run.state.log_history if "gate/model.layers.0.self_attn/mean" in row]) == 1
    json.dumps(run.state.log_history)


def test_the_record_holds_every_head_and_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    run = trainer(llama(), tmp_path / "a", 4, GateMonitor(every=1, record=path), save_strategy="steps", save_steps=2)
    run.train()
    whole, logs = HealthRecord.load(path), measured(run)
    assert [point.step for point in whole.points] == [1, 2, 3, 4]
    for point in whole.points:
        for gate in point.gates:
            short = gate.name.removeprefix("model.layers.")
            for key in ("mean", "below", "above"):
                heads = getattr(gate, key)
                assert len(heads) == 4
                assert sum(heads) / 4 == pytest.approx(logs[point.step][f"{short}/{key}"], abs=1e-12)
            assert gate.grad_norm == logs[point.step][f"{short}/grad_norm"]
    again = trainer(llama(), tmp_path / "a", 4, GateMonitor(every=1, record=path), save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    resumed = HealthRecord.load(path)
    assert resumed.points[:2] == whole.points[:2]
    assert [point.step for point in resumed.points] == [1, 2, 3, 4]


def test_what_was_warned_of_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama("output:headwise,bias=0,std=0.2")
    with torch.no_grad():
        gates(model)["model.layers.1.self_attn.attn_gate"].proj.bias.fill_(9.0)
    trainer(model, tmp_path / "run", 2, GateMonitor(every=1, record=tmp_path / "health.json")).train()
    found = HealthRecord.load(tmp_path / "health.json").warnings
    assert [one.text for one in found] == said(caplog)
    assert [one.step for one in found] == [1]


def test_gates_that_nothing_trains_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    for gate in gates(model).values():
        gate.requires_grad_(False)
    trainer(model, tmp_path, 1, GateMonitor()).train()
    assert said(caplog) == [
        "none of the 2 gates is trainable (requires_grad=False), so they stay as they are; under PEFT name them in "
        'modules_to_save=["attn_gate"]'
    ]


def test_a_monitor_that_has_nothing_to_watch(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="every=0"):
        GateMonitor(0)
    with pytest.raises(RecipeError, match=r"low=0.99, high=0.95"):
        GateMonitor(low=0.99)
    alone: Any = llama()
    next(iter(gates(alone).values())).unshard = None  # as a gate on which fully_shard was called has
    with pytest.raises(UnsupportedError, match=r"keeps a copy of each Gate.*FSDP2 unit of its own"):
        trainer(alone, tmp_path, 1, GateMonitor()).train()
    bare = tiny.build("gpt2")
    with pytest.raises(SpecError, match="found no gates"):
        trainer(bare, tmp_path, 1, GateMonitor()).train()


@pytest.mark.parametrize(
    ("family", "spec"), [("qwen3", "key:elementwise,std=0.9"), ("gpt2", "key:elementwise,std=0.9"), ("phi3", AWAKE)]
)
def test_other_families_wait_and_are_watched(
    tmp_path: Path, family: str, spec: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = attach(tiny.build(family, seed=4, vocab_size=VOCAB), spec)
    spy = Spy()
    run = trainer(model, tmp_path, 3, GateWarmup(2), GateMonitor(every=3), spy)
    run.train()
    assert spy.none == [True, True, False]
    row = next(row for row in run.state.log_history if row["step"] == 3 and any(k.startswith("gate/") for k in row))
    assert len([key for key in row if key.endswith("/grad_norm")]) == 2
    assert said(caplog) == []


SHARDED = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from gated_attn.hf import GateMonitor
from tests.hf.training import batches, llama, steps
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = llama(sys.argv[1], num_attention_heads=2, num_key_value_heads=1)
if sys.argv[2] == "fsdp":
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wrapped = model
else:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
logs = steps(wrapped, model, [b[rank::world] for b in batches()], GateMonitor(every=1))
weights = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
empty = sum(p.to_local().numel() == 0 for n, p in model.named_parameters() if "attn_gate" in n and hasattr(p, "to_local"))
counts = torch.tensor([empty])
dist.all_reduce(counts)
if rank == 0:
    torch.save({"weights": weights, "logs": logs, "empty": int(counts)}, sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
@pytest.mark.parametrize("spec", [AWAKE, "output:elementwise:2sigmoid,std=0.7,bias=0.2,fill"])
def test_four_ranks_with_two_heads_train_as_one_process(tmp_path: Path, kind: str, spec: str) -> None:
    """ranks without a row of the gate; the same weights and the same monitor numbers as one process."""
    launch(tmp_path, SHARDED, 4, spec, kind, str(tmp_path / "out.pt"))
    found = torch.load(tmp_path / "out.pt")
    alone = []
    for model in (
        llama(spec, num_attention_heads=2, num_key_value_heads=1),
        llama(spec, num_attention_heads=2, num_key_value_heads=1).double(),
    ):
        logs = steps(model, model, batches(), GateMonitor(every=1))
        alone.append((logs, {name: parameter.detach() for name, parameter in model.named_parameters()}))
    (logs, weights), (exact_logs, exact_weights) = alone
    no_further_off(list(found["weights"].values()), list(weights.values()), list(exact_weights.values()))
    assert len(found["logs"]) == 3
    same_numbers(found["logs"], logs, exact_logs)
    if kind == "fsdp" and spec == AWAKE:
        assert found["empty"] > 0
