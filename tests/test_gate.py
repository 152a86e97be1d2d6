"""`Gate`: shapes, values and gradients of every kind of gate, and starts that hold exactly."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from gated_attn.attention.activations import activate, log_activate
from gated_attn.attention.call import PairLogits, Sink, apply_gate
from gated_attn.errors import ShapeError, SpecError
from gated_attn.gate import Gate, keep_largest
from gated_attn.spec import ACTIVATIONS, NON_NEGATIVE, TARGETS, GateSpec

B, T, D, H, K, E = 2, 7, 23, 6, 3, 10
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(spec: str, **options: Any) -> Gate:
    torch.manual_seed(3)
    return Gate(spec, D, H, kv_heads=K, head_dim=E, latent_dim=11, **options)


def wake(gate: Gate, std: float = 5.0) -> Gate:
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter, std=std * parameter.shape[-1] ** -0.5)
    return gate


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("output:headwise", (B, T, H, 1)), ("output:elementwise", (B, T, H, E)), ("output:shared", (B, T, 1, E)),
        ("value:headwise", (B, T, K, 1)), ("key:elementwise", (B, T, K, E)), ("key:shared", (B, T, 1, E)),
        ("query:headwise", (B, T, H, 1)), ("dense:headwise", (B, T, 1, 1)), ("dense:elementwise", (B, T, 1, D)),
        ("weights:headwise", (B, T, H, 1)), ("output:headwise,rank=2,in=5", (B, T, H, 1)),
    ],
)  # fmt: skip
def test_shape_is_heads_by_gate_width(spec: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(B, T, D)
    gate = wake(make(spec))(x)
    assert isinstance(gate, Tensor)
    assert gate.shape == shape
    assert gate.dtype == x.dtype


@pytest.mark.parametrize(
    "spec", ["output:headwise,source=query", "output:elementwise,source=query", "query:elementwise,source=query,rank=3"]
)
def test_a_query_gate_reads_each_heads_own_query(spec: str) -> None:
    gate, q = wake(make(spec)), torch.randn(B, T, H, E)
    before = gate(q)
    assert before.shape == (B, T, H, 1 if "headwise" in spec else E)
    q[:, :, 4] += 1
    moved = (gate(q) != before).any(-1).any(0).any(0)
    assert moved.tolist() == [False, False, False, False, True, False]


def test_the_formula() -> None:
    gate = wake(make("output:elementwise,bias=-1"))
    x = torch.randn(B, T, D)
    want = torch.sigmoid(x.double() @ gate.proj.weight.double().T + gate.proj.bias.double()).unflatten(-1, (H, E))
    assert (gate(x).double() - want).abs().max() < 1e-6
    narrow = wake(make("output:headwise,in=12"))
    assert narrow.proj.weight.shape == (H, 12)
    changed = x.clone()
    changed[..., 12:] = torch.nan
    assert torch.equal(narrow(changed), narrow(x)), "channels behind the first 12 are not read"


def test_different_tokens_get_different_gates_and_constant_ones_do_not() -> None:
    x = torch.randn(1, 2, D)
    assert (wake(make("output:headwise"))(x)[0, 0] != wake(make("output:headwise"))(x)[0, 1]).all()
    constant = wake(make("output:headwise,source=constant"))
    assert constant(x).shape == (1, 1, H, 1)
    assert torch.equal(constant(x), constant(100 * x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["2sigmoid", "linear"])
@pytest.mark.parametrize("extra", ["", ",rank=3", ",in=5", ",bias=0"])
@pytest.mark.parametrize("head", ["output:headwise", "value:elementwise", "dense:elementwise"])
def test_identity_is_exactly_one(head: str, activation: str, extra: str, dtype: torch.dtype) -> None:
    if activation == "linear" and extra == ",bias=0":
        return
    gate = make(f"{head}:{activation},init=identity{extra}", dtype=dtype)
    values = gate(100 * torch.randn(B, T, D, dtype=dtype))
    assert torch.equal(values, torch.ones_like(values))
    wake(gate)
    gate.reset_parameters()
    assert torch.equal(gate(torch.randn(B, T, D, dtype=dtype)), values)


@pytest.mark.parametrize("activation", ["silu", "tanh", "linear"])
def test_an_added_identity_adds_exactly_nothing(activation: str) -> None:
    gate = make(f"output:elementwise:{activation},op=add,init=identity")
    out = torch.randn(B, T, H, E)
    assert torch.equal(gate.modulate(out, torch.randn(B, T, D)), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("init", TARGETS)
def test_starts_hold_to_one_rounding(init: str, dtype: torch.dtype) -> None:
    values = make(f"output:headwise,init={init}", dtype=dtype)(torch.randn(B, T, D, dtype=dtype))
    assert (values.double() - TARGETS[init]).abs().max() <= 2 * torch.finfo(dtype).eps * TARGETS[init] * 4


@pytest.mark.parametrize(
    "spec",
    [
        "output:elementwise:2sigmoid,init=identity",
        "output:headwise,rank=3,init=half",
        "weights:pairwise:2sigmoid,init=identity",
    ],
)
def test_every_start_can_learn(spec: str) -> None:
    gate = make(spec)
    if gate.spec.width == "pairwise":
        pair = gate(torch.randn(B, T, H, E), torch.randn(B, T, K, E))
        assert isinstance(pair, PairLogits)
        (pair.query_BTHR.sum(2) * pair.key_BSKR.sum(2) * torch.randn(B, T, E)).sum().backward()
    else:
        value = gate(torch.randn(B, T, D))
        (value * torch.randn_like(value)).sum().backward()
    moving = [float(p.grad.abs().max()) for p in gate.parameters() if p.grad is not None]
    assert max(moving) > 0, "with every factor at zero nothing would ever move"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_computed_in_float32_and_rounded_once(activation: str, dtype: torch.dtype) -> None:
    logits = torch.linspace(-20, 20, 4001).to(dtype)
    want = activate(logits.double(), activation).to(torch.float32).to(dtype)
    got = activate(logits, activation)
    assert got.dtype == dtype
    different = (got != want).float().mean()
    assert different < 0.01, "float64 and float32 may differ where they straddle a rounding boundary, no more"
    assert ((got.double() - want.double()).abs() <= torch.finfo(dtype).eps * want.double().abs()).all()


def test_bfloat16_gates_are_not_stuck_at_one() -> None:
    logits = torch.tensor([6.3], dtype=torch.bfloat16)
    assert torch.sigmoid(logits.double()) < 1
    x = torch.full((1,), -17.6, dtype=torch.float16, requires_grad=True)
    activate(x, "sigmoid").backward()
    assert float(log_activate(x.detach(), "sigmoid")[0]) == pytest.approx(-17.6, abs=0.01)


@pytest.mark.parametrize("activation", ["sigmoid", "2sigmoid", "nssigmoid", "hardsigmoid"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_bounded_activations_stay_in_their_bounds(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = ((torch.rand(10_000, dtype=torch.float64) - 0.5) * 2e4).sort()[0].to(dtype)
    gate = activate(logits, activation)
    top = 2.0 if activation == "2sigmoid" else 1.0
    bottom = 0.5 if activation == "nssigmoid" else 0.0
    assert torch.isfinite(gate).all()
    assert gate.min() >= bottom
    assert gate.max() <= top
    assert (gate.diff() >= 0).all()


@pytest.mark.parametrize("activation", NON_NEGATIVE)
def test_log_activations_are_logarithms_with_finite_gradients(activation: str) -> None:
    logits = torch.linspace(-30, 30, 601, dtype=torch.float64, requires_grad=True)
    logs = log_activate(logits, activation)
    gate = activate(logits.detach(), activation)
    alive = gate > 0
    assert (logs.exp() - gate)[alive].abs().max() < 1e-12
    assert (logs[~alive] == -math.inf).all()
    (slope,) = torch.autograd.grad(logs[alive].sum(), logits)
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize(
    ("spec", "axis", "k"),
    [("output:headwise,top_k=2", 2, 2), ("output:elementwise:tanh,top_k=7", 3, 7), ("output:shared,top_k=1", 3, 1)],
)
def test_top_k_keeps_the_k_largest_and_their_gradients(spec: str, axis: int, k: int) -> None:
    gate, x = wake(make(spec)), torch.randn(B, T, D)
    whole = activate(gate.logits(x), gate.spec.activation)
    kept = gate(x)
    assert isinstance(kept, Tensor)
    on = kept != 0
    assert (on.sum(axis) == k).all()
    assert torch.equal(kept[on], whole[on])
    lowest_kept = torch.where(on, whole, math.inf).amin(axis)
    highest_dropped = torch.where(on, -math.inf, whole).amax(axis)
    assert (lowest_kept >= highest_dropped).all()
    logits = torch.randn(B, T, H, 1, requires_grad=True)
    (slope,) = torch.autograd.grad(keep_largest(logits, 2, 2).sum(), logits)
    assert torch.equal(slope, (keep_largest(logits, 2, 2) != 0).float())


def test_top_k_of_equal_gates_still_keeps_k() -> None:
    assert (keep_largest(torch.full((1, 1, 6, 1), 0.5), 4, 2) != 0).sum() == 4


def test_the_sink_and_the_pairwise_gate_hand_over_their_parameters() -> None:
    sink = make("output:headwise,source=lse,bias=2,sink_key,fill")(torch.empty(0))
    assert isinstance(sink, Sink)
    assert sink.logit_H.tolist() == [2.0] * H
    assert sink.key_HE is not None
    assert sink.key_HE.shape == (H, E)
    pair = make("weights:pairwise,rank=4,bias=1")(torch.randn(B, T, H, E), torch.randn(B, 5, K, E))
    assert isinstance(pair, PairLogits)
    assert pair.query_BTHR.shape == (B, T, H, 4)
    assert pair.key_BSKR.shape == (B, 5, K, 4)
    with pytest.raises(ShapeError, match=r"queries and keys: call gate\(q_BTHE, k_BSKE\)"):
        make("weights:pairwise")(torch.randn(B, T, H, E))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_is_rounded_once(dtype: torch.dtype) -> None:
    x, gate = torch.randn(B, T, H, E, dtype=dtype), torch.rand(B, T, H, 1)
    assert torch.equal(apply_gate(x, gate), (x.float() * gate).to(dtype))
    fill = torch.randn(H, E)
    assert torch.equal(apply_gate(x, gate, fill), (x.float() * gate + (1 - gate) * fill).to(dtype))


@pytest.mark.parametrize("spec", ["output:headwise", "output:elementwise,rank=3"])
def test_a_wrong_width_says_both(spec: str) -> None:
    with pytest.raises(ShapeError, match=rf"reads {D} channels of hidden, and got shape \(2, 7, 24\)"):
        make(spec)(torch.randn(B, T, D + 1))
    with pytest.raises(ShapeError, match="reads 10 channels of query_key"):
        make("weights:pairwise")(torch.randn(B, T, H, E), torch.randn(B, T, K, E + 1))
    with pytest.raises(ShapeError, match="reads 12 channels"):
        make("output:headwise,in=12")(torch.randn(B, T, 11))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("output:headwise,top_k=7", r"'top_k=7' keeps more than there are: 6 heads"),
        ("output:elementwise,top_k=11", r"'top_k=11' keeps more than there are: 6 heads of 10"),
        ("output:headwise,in=24", r"'in=24' asks for more channels than hidden has \(23\)"),
    ],
)
def test_sizes_that_cannot_serve_a_spec(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make(spec)


def test_latent_needs_its_width() -> None:
    with pytest.raises(SpecError, match="pass latent_dim"):
        Gate("output:headwise,source=latent", D, H)
    assert make("output:headwise,source=latent").proj.weight.shape == (H, 11)


@pytest.mark.parametrize(
    "spec", ["output:headwise,fill", "sink,sink_key", "weights:pairwise", "output:headwise,source=constant"]
)
def test_it_copies_and_prints_itself(spec: str) -> None:
    gate = wake(make(spec))
    for twin in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        assert twin.spec == gate.spec
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), gate.parameters(), strict=True))
    assert str(GateSpec.parse(spec)) in repr(gate)


def test_device_and_dtype_reach_every_parameter() -> None:
    for spec in (
        "output:elementwise,fill,bias=1,rank=2",
        "sink,sink_key,fill",
        "weights:pairwise,bias=0",
        "output:headwise,source=constant",
    ):
        gate = Gate(spec, D, H, kv_heads=K, head_dim=E, device="meta", dtype=torch.bfloat16)
        assert {(p.device.type, p.dtype) for p in gate.parameters()} == {("meta", torch.bfloat16)}


def test_under_autocast_the_sigmoid_is_still_float32() -> None:
    gate, x = wake(make("output:elementwise")), torch.randn(B, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        got = gate(x)
        logits = gate.logits(x)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(got, torch.sigmoid(logits.float()).to(got.dtype))
