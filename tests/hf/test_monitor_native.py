"""Gates that a model was born with, watched as attached ones are: of a projection that holds queries too, the gate's rows count."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from gated_attn.errors import UnsupportedError
from gated_attn.hf import GateDecay, GateMonitor, GateWarmup, gates, native_gates, param_groups
from gated_attn.hf.attach import attach
from gated_attn.hf.native import NativeGate
from gated_attn.hf.watched import WatchedRows, watch
from tests.hf import tiny
from tests.hf.test_native import CASES, build
from tests.hf.training import State, batches, launch, measured, said, same_numbers, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning",  # the name of transformers 5.0, which we support
)
B, T = 2, 7
IDS = torch.arange(B * T).reshape(B, T)
FUSED = "qwen3_next bias"
TINY_ERROR = 96 * 42 * torch.finfo(torch.float64).eps
"""What the order of so many float64 additions, the most of any gate here, can change relative to a sum of positive numbers."""


def begun(model: nn.Module, *callbacks: Any, **settings: Any) -> State:
    state = State()
    for callback in callbacks or (GateMonitor(every=1, **settings),):
        callback.on_train_begin(None, state, None, model=model)
    return state


def loss(out: Tensor) -> Tensor:
    """No mean of squares, which a norm at the end makes a constant."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def step(model: nn.Module, monitor: GateMonitor, state: State, **inputs: Any) -> dict[str, float]:
    """What the monitor logs of one step in which no optimizer moves anything."""
    monitor.on_step_begin(None, state, None, model=model)
    model.zero_grad()
    loss(model(**({"input_ids": IDS} | inputs))[0]).backward()
    monitor.on_pre_optimizer_step(None, state, None, model=model)
    state.global_step += 1
    monitor.on_step_end(None, state, None, model=model)
    return state.log_history[-1]


def of(logs: dict[str, float], name: str) -> dict[str, float]:
    prefix = f"gate/{name}/"
    return {key.removeprefix(prefix): value for key, value in logs.items() if key.startswith(prefix)}


def seen_inputs(model: nn.Module) -> dict[str, list[Tensor]]:
    """Name of a gate -> what its attention module reads from now on."""
    found: dict[str, list[Tensor]] = {}
    for name, gate in native_gates(model).items():

        def reads(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            found.setdefault(name, []).append((args[0] if args else kwargs["hidden_states"]).detach())

        gate.module.register_forward_pre_hook(reads, with_kwargs=True)
    return found


def by_hand(gate: NativeGate, tensor: Tensor) -> Tensor:
    """(N, ...) -> (H, G, ...), written out for the two layouts: the gate's rows of a weight, a bias or their gradient."""
    H, G = gate.shape_HG
    heads = tensor.detach().double().reshape(H, tensor.shape[0] // H, *tensor.shape[1:])
    return heads[:, -G:] if gate.row.layout == "per_head" else heads


def learned(gate: NativeGate) -> list[Any]:
    """The projection's weight and bias, and the bias beside it, whose rows are heads."""
    beside = getattr(gate.module, gate.row.head_bias) if gate.row.head_bias else None
    return [parameter for parameter in (gate.layer.weight, gate.layer.bias, beside) if parameter is not None]


def norm(*tensors: Tensor | None) -> float:
    return math.sqrt(sum(float(one.square().sum()) for one in tensors if one is not None))


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_gate_s_own(case: str) -> None:
    dtype = torch.float32 if case == "inkling2" else torch.float64  # its router wants float32
    model = build(case, dtype)
    for parameter in model.parameters():
        if (
            parameter.dim() == 2 and not parameter.any()
        ):  # NeoMME's out projections, behind which gates would learn nothing
            nn.init.normal_(parameter, std=0.2)
    inputs, monitor = seen_inputs(model), GateMonitor(every=1)
    state = begun(model, monitor)
    logs = step(model, monitor, state)
    assert {key.split("/")[1] for key in logs if key != "step"} == set(native_gates(model)) == set(gates(model))
    for name, gate in native_gates(model).items():
        row = of(logs, name)
        with torch.no_grad():
            values = torch.cat([gate.values(x).double() for x in inputs[name]])
        assert row["mean"] == pytest.approx(float(values.mean()), rel=TINY_ERROR)
        assert row["below"] == int((values < 0.05).sum()) / values.numel()
        assert row["above"] == int((values > 0.95).sum()) / values.numel()
        # Between the start's rows alone and all rows of the projection in one product: a rounding for each term of it.
        assert row["change"] <= gate.n_in * torch.finfo(dtype).eps
        own = learned(gate)
        assert row["weight_norm"] == pytest.approx(norm(*(by_hand(gate, p) for p in own)), rel=TINY_ERROR)
        assert row["grad_norm"] == pytest.approx(norm(*(by_hand(gate, p.grad) for p in own)), rel=TINY_ERROR)
        assert row["grad_norm"] > 0
    assert not any(gate.layer._forward_hooks for gate in native_gates(model).values())


@torch.no_grad()
def changed(gate: NativeGate, rows: str) -> None:
    """Move the gate's rows, or all others, of its projection."""
    before = gate.weight_HGD.clone()
    gate.layer.weight.add_(torch.randn(gate.layer.weight.shape, generator=torch.Generator().manual_seed(3)))
    if rows == "gate":
        after = gate.weight_HGD.clone()
        gate.layer.weight.sub_(torch.randn(gate.layer.weight.shape, generator=torch.Generator().manual_seed(3)))
        gate.weight_HGD.copy_(after)
    else:
        gate.weight_HGD.copy_(before)


@pytest.mark.parametrize("case", [FUSED, "afmoe", "beam"])
def test_change_is_that_of_the_gate_s_rows(case: str) -> None:
    """For the same tokens; of the first layer, whose input is the same before and after."""
    model = build(case, torch.float64)
    inputs, monitor = seen_inputs(model), GateMonitor(every=1)
    state = begun(model, monitor)
    name, gate = next(iter(native_gates(model).items()))
    first = of(step(model, monitor, state), name)
    with torch.no_grad():
        start = gate.values(inputs[name][0]).double()
    if case == FUSED:
        changed(gate, "queries")
        row = of(step(model, monitor, state), name)
        assert row["weight_norm"] == first["weight_norm"]
        assert row["change"] == first["change"]
        assert row["mean"] == first["mean"]
        assert row["grad_norm"] != first["grad_norm"]
    changed(gate, "gate")
    row = of(step(model, monitor, state), name)
    with torch.no_grad():
        now = gate.values(inputs[name][0]).double()
    assert row["change"] == pytest.approx(float((now - start).square().mean().sqrt()), rel=TINY_ERROR)
    assert row["change"] > 0.1
    assert row["weight_norm"] == pytest.approx(norm(*(by_hand(gate, p) for p in learned(gate))), rel=TINY_ERROR)


def test_dead_heads_are_those_whose_gate_rows_have_no_gradient(caplog: pytest.LogCaptureFixture) -> None:
    """Their queries in the same weight do have one."""
    model = build(FUSED)
    name, gate = next(iter(native_gates(model).items()))
    with torch.no_grad():
        assert gate.bias_HG is not None
        gate.bias_HG[[1, 4]] = 300.0  # sigmoid is 1 to the last bit, its slope 0
    monitor = GateMonitor(every=1)
    step(model, monitor, begun(model, monitor))
    E = int(gate.module.head_dim)
    assert gate.layer.weight.grad is not None
    assert all(bool(gate.layer.weight.grad[2 * E * head : 2 * E * head + E].any()) for head in (1, 4))
    assert said(caplog) == [f"layer 0, {name}: no gradient in heads 1, 4, step 1: they cannot learn"]


def test_shut_and_still_native_gates_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = build(FUSED)
    name, gate = list(native_gates(model).items())[1]
    with torch.no_grad():
        assert gate.bias_HG is not None
        gate.bias_HG.fill_(-300.0)
    monitor = GateMonitor(every=1, after=2)
    state = begun(model, monitor)
    for _ in range(2):
        step(model, monitor, state)
    texts = [text for text in said(caplog) if name in text]
    assert texts[0] == f"layer 1, {name}: 100% of gates < 0.05 (heads 0, 1, 2, 3, 4, 5), step 1"
    assert "no gradient in step 1: the gate cannot learn" in texts[1]
    assert "the gate has not moved: its values changed by 0 in 2 steps" in texts[2]


@pytest.mark.parametrize("case", [FUSED, "afmoe"])
def test_padding_and_recomputation_change_no_mean(case: str) -> None:
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 4:] = 0
    found = []
    for way in ("", "checkpointed"):
        model = build(case).train()
        if way:
            model.gradient_checkpointing_enable()
        inputs, monitor = seen_inputs(model), GateMonitor(every=1)
        found.append(step(model, monitor, begun(model, monitor), attention_mask=mask))
        name, gate = next(iter(native_gates(model).items()))
        with torch.no_grad():
            values = gate.values(inputs[name][0])[mask.bool()].double()
        assert of(found[-1], name)["mean"] == pytest.approx(float(values.mean()), rel=TINY_ERROR)
    assert found[0] == pytest.approx(found[1], rel=TINY_ERROR)


LAYERS = {FUSED: "q_proj", "lfm3": "g_proj"}


def adapted(case: str, dropout: float = 0.0) -> Any:
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=[LAYERS[case], "v_proj"], lora_dropout=dropout)
    torch.manual_seed(4)
    return peft.get_peft_model(build(case), config)


@pytest.mark.parametrize("case", LAYERS)
def test_inside_a_lora_layer_the_adapter_counts(case: str) -> None:
    model = adapted(case).double()
    monitor, inputs = GateMonitor(every=1), seen_inputs(model)
    state = begun(model, monitor)
    name, gate = next(iter(native_gates(model).items()))
    assert name.startswith("base_model.model.")
    first = of(step(model, monitor, state), name)
    assert first["change"] == 0
    factor_a, factor_b = (getattr(gate.layer, side)["default"].weight for side in ("lora_A", "lora_B"))
    assert first["grad_norm"] == pytest.approx(
        norm(by_hand(gate, factor_b.grad)), rel=TINY_ERROR
    )  # A has none while B is 0
    with torch.no_grad():
        start = gate.values(inputs[name][0])
        factor_b.normal_()
    row = of(step(model, monitor, state), name)
    with torch.no_grad():
        values = gate.values(inputs[name][0])
    assert row["mean"] == pytest.approx(float(values.mean()), rel=TINY_ERROR)
    assert row["change"] == pytest.approx(float((values - start).square().mean().sqrt()), rel=TINY_ERROR)
    assert row["change"] > 0.05
    base = gate.layer.base_layer
    shared = [] if case == FUSED else [factor_a.detach()]
    weights = [by_hand(gate, p) for p in (base.weight, base.bias, factor_b) if p is not None]
    assert row["weight_norm"] == pytest.approx(norm(*weights, *shared), rel=TINY_ERROR)


@pytest.mark.parametrize("case", LAYERS)
def test_watching_draws_no_random_numbers(case: str) -> None:
    """Dropout inside the adapter goes the same way with the monitor and without."""
    found = []
    for callbacks in ((GateMonitor(every=1),), ()):
        model = adapted(case, dropout=0.5).train()
        state = begun(model, *callbacks) if callbacks else State()
        torch.manual_seed(6)
        for monitor in callbacks:
            step(model, monitor, state)
        if not callbacks:
            loss(model(input_ids=IDS)[0]).backward()
        found.append([torch.rand(3), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("attached", [True, False])
def test_of_the_copies_that_peft_trains_and_keeps_the_first_counts(
    attached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`modules_to_save`: the original stands aside, frozen."""
    model = attach(tiny.build("llama"), "output:headwise,std=1") if attached else build("lfm3")
    names = ["attn_gate"] if attached else ["g_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["v_proj"], modules_to_save=names))
    monitor = GateMonitor(every=1)
    state = begun(model, monitor)
    first = step(model, monitor, state)
    places = [f"base_model.model.model.layers.{i}.self_attn{'' if attached else '.g_proj'}" for i in (0, 1)]
    assert {key.rpartition("/")[0] for key in first if key != "step"} == {f"gate/{place}" for place in places}
    trained = [p for name, p in model.named_parameters() if p.requires_grad and ".0." in name and names[0] in name]
    assert of(first, places[0])["grad_norm"] == pytest.approx(norm(*(p.grad.double() for p in trained)), rel=TINY_ERROR)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(1.0)
    row = of(step(model, monitor, state), places[0])
    assert row["weight_norm"] == pytest.approx(norm(*(p.detach().double() for p in trained)), rel=TINY_ERROR)
    assert row["change"] > 0.01
    assert said(caplog) == []


def test_an_adapter_elsewhere_leaves_the_gate_frozen(caplog: pytest.LogCaptureFixture) -> None:
    model = peft.get_peft_model(build("afmoe"), peft.LoraConfig(r=3, target_modules=["v_proj"]))
    monitor = GateMonitor(every=1, after=1)
    state = begun(model, monitor)
    rows = [step(model, monitor, state) for _ in range(2)]
    assert not any(key.endswith("grad_norm") for row in rows for key in row)
    assert said(caplog) == []


class Packed(nn.Module):
    """A quantised linear layer; its codes are a parameter that nobody can add rows of."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes = (linear.weight.detach() / linear.weight.abs().max() * 127).round() + 128
        self.weight = nn.Parameter(codes.to(torch.uint8), requires_grad=False)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight.to(x.dtype) - 128) / 60)


def test_quantised_projections_show_values_only() -> None:
    model = build("qwen3_next")
    for name, gate in list(native_gates(model).items()):
        model.set_submodule(name, Packed(gate.layer))
    monitor = GateMonitor(every=1)
    logs = step(model, monitor, begun(model, monitor))
    for name in native_gates(model):
        row = of(logs, name)
        assert set(row) == {"mean", "below", "above", "change"}
        assert row["change"] == 0
        assert 0 < row["mean"] < 1


def test_the_start_is_kept_once_and_no_queries_with_it() -> None:
    watched = watch(build(FUSED))
    for one in watched.values():
        assert isinstance(one, WatchedRows)
        kept = [cell.cell_contents for cell in one._start.__closure__ or ()]
        H, G = one.shape_HG
        assert sum(t.numel() for t in kept if isinstance(t, Tensor)) == H * G * (one.native.n_in + 1)


def test_a_projection_that_gives_some_channels_is_refused() -> None:
    one = next(iter(watch(build(FUSED)).values()))
    x = torch.randn(B, T, one.native.n_in)  # type: ignore[attr-defined]
    with pytest.raises(
        UnsupportedError, match=r"q_proj of Qwen3NextAttention gave 48 of its 96 channels.*tensor parallel"
    ):
        one.values((x,), one.layer(x)[..., :48])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", ["qwen3_next", "lfm3", "laguna"])
def test_trainers_watch_them_too(case: str, compiled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = build(case)
    if compiled:
        model.compile(backend="eager")
        model(input_ids=IDS)
    run = trainer(model, tmp_path, 3, GateMonitor(every=2), remove_unused_columns=False)
    run.train()
    seen = measured(run)
    assert list(seen) == [1, 2]
    for name in native_gates(model):
        row = {key.rpartition("/")[2]: n for key, n in seen[2].items() if name.endswith(key.rpartition("/")[0])}
        assert row.keys() == {"weight_norm", "grad_norm", "mean", "below", "above", "change"}
        assert row["change"] > 0
    assert not [text for text in said(caplog) if "run" in text]


def test_gates_that_are_rows_of_the_queries_cannot_wait(tmp_path: Path) -> None:
    for callback, word in ((GateWarmup(2), "GateWarmup holds back"), (GateDecay(0.1), "GateDecay decays")):
        with pytest.raises(UnsupportedError, match=f"{word}.*layers.0.self_attn.q_proj holds queries as well"):
            trainer(build("qwen3_next"), tmp_path, 1, callback).train()


def test_gates_with_a_projection_of_their_own_can(tmp_path: Path) -> None:
    model = build("afmoe")
    before = {name: gate.weight_HGD.clone() for name, gate in native_gates(model).items()}
    run = trainer(model, tmp_path, 2, GateWarmup(2), GateMonitor(every=1), GateDecay(0.1), weight_decay=0.1)
    run.train()
    assert all(torch.equal(gate.weight_HGD, before[name]) for name, gate in native_gates(model).items())
    assert not any(key.endswith("grad_norm") for row in measured(run).values() for key in row)


SHARDED = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from gated_attn.hf import GateMonitor
from tests.hf.test_monitor_native import batches, build, native_gates, steps
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh, found = init_device_mesh("cpu", (world,)), {}
for case in ("qwen3_next bias", "lfm3"):
    for unit in ("layer", "projection"):
        model = build(case)
        if unit == "projection":
            for gate in native_gates(model).values():
                fully_shard(gate.layer, mesh=mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found[case, unit] = steps(model, [b[rank::world] for b in batches()])
if rank == 0:
    torch.save(found, sys.argv[1])
"""


def steps(model: nn.Module, rows: list[Tensor]) -> list[dict[str, float]]:
    optimizer = torch.optim.SGD(param_groups(model, 0.1))
    monitor = GateMonitor(every=1)
    state = begun(model, monitor)
    for tokens in rows:
        monitor.on_step_begin(None, state, None, model=model)
        model(input_ids=tokens, labels=tokens).loss.backward()
        monitor.on_pre_optimizer_step(None, state, None, model=model)
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        monitor.on_step_end(None, state, None, model=model)
    return state.log_history


@pytest.mark.slow
def test_sharded_rows_are_gathered(tmp_path: Path) -> None:
    """Four ranks with a quarter of the projection each log what one process does."""
    launch(tmp_path, SHARDED, 4, str(tmp_path / "out.pt"))
    found = torch.load(tmp_path / "out.pt")
    for case in ("qwen3_next bias", "lfm3"):
        plain, exact = steps(build(case), batches()), steps(build(case).double(), batches())
        for unit in ("layer", "projection"):
            assert len(found[case, unit]) == 3
            same_numbers(found[case, unit], plain, exact)
