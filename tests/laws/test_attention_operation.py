"""Laws 1, 2, 3, 5, 6, 7 and 8 for `gated_attention`: every impl, every form of gate, every kind of mask.

Sizes are distinct primes where they may be, 1 < KV heads < heads, and lengths stand either side of the block of 128 queries.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gated_attn.attention import IMPLS, PairLogits, Sink, explain, gated_attention
from gated_attn.attention.activations import activate
from gated_attn.errors import UnsupportedError

B, H, K, E, R = 2, 6, 3, 5, 7
FAST = [name for name in IMPLS if name != "reference"]
LENGTHS = [(11, 11), (7, 13), (13, 7), (1, 17), (127, 131), (128, 128), (257, 257)]
Make = Callable[[int, int, Any], Any]


def randn(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_()


def gate_values(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Awake: sigmoids of logits with standard deviation 5."""
    return torch.sigmoid(5 * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_()


def pair_logits(T: int, S: int, dtype: torch.dtype, activation: str, scale: float, bias: Tensor | None) -> PairLogits:
    return PairLogits(randn(B, T, H, R, dtype=dtype, scale=scale), randn(B, S, K, R, dtype=dtype), bias, activation)


GATES: dict[str, Make] = {
    "none": lambda T, S, d: None,
    "headwise": lambda T, S, d: gate_values(B, T, H, 1, dtype=d),
    "elementwise": lambda T, S, d: gate_values(B, T, H, E, dtype=d),
    "shared": lambda T, S, d: gate_values(B, T, 1, E, dtype=d),
    "constant": lambda T, S, d: gate_values(1, 1, H, 1, dtype=d),
    "sink": lambda T, S, d: Sink(randn(H, dtype=d, scale=2.0)),
    "sink key": lambda T, S, d: Sink(randn(H, dtype=d), randn(H, E, dtype=d)),
    "pairwise": lambda T, S, d: pair_logits(T, S, d, "sigmoid", 3.0, randn(1, dtype=d)),
    "pairwise with zeros": lambda T, S, d: pair_logits(T, S, d, "hardsigmoid", 5.0, None),
}  # fmt: skip
FILLABLE = ["headwise", "elementwise", "shared", "constant", "sink", "sink key"]


def padding(S: int) -> Tensor:
    """True at real keys: the first row has none at all, the second lacks a few."""
    keep = torch.rand(B, 1, 1, S) > 0.3
    keep[0] = False
    return keep


def as_float(keep: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    return torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, value)


MASKS: dict[str, Make] = {
    "none": lambda T, S, d: {},
    "causal": lambda T, S, d: {"causal": True},
    "window": lambda T, S, d: {"causal": True, "window": 3},
    "window both ways": lambda T, S, d: {"window": 2},
    "documents": lambda T, S, d: {"causal": True, "doc_ids": torch.randint(0, 3, (B, S)).sort()[0]},
    "bool": lambda T, S, d: {"mask": padding(S)},
    "float": lambda T, S, d: {"mask": torch.randn(T, S, dtype=d)},
    "per head": lambda T, S, d: {"mask": torch.randn(1, H, T, S, dtype=d)},
    "-inf": lambda T, S, d: {"causal": True, "mask": as_float(padding(S), -math.inf, d)},
    "finfo.min": lambda T, S, d: {"mask": as_float(padding(S), torch.finfo(d).min, d)},
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(17)


def leaves_of(*values: Any) -> list[Tensor]:
    flat = [item for value in values for item in (value if isinstance(value, tuple) else [value])]
    return [t for t in flat if isinstance(t, Tensor) and t.requires_grad]


def run(
    impl: str, q: Tensor, k: Tensor, v: Tensor, gate: Any, fill: Tensor | None, options: dict[str, Any]
) -> list[Tensor]:
    """Output and the gradient of every leaf (flex on the CPU has no backward pass: output alone)."""
    if impl == "flex":
        with torch.no_grad():
            return [gated_attention(q, k, v, gate, impl=impl, fill=fill, **options)]
    out = gated_attention(q, k, v, gate, impl=impl, fill=fill, **options)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    leaves = leaves_of(q, k, v, gate, fill)
    found = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True))]


def assert_agree(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(got, want, strict=False):
        a, b = a.detach(), b.detach()
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("impl", FAST)
def test_every_impl_gives_the_references_answer(impl: str, gate: str, mask: str) -> None:
    lengths = [(7, 11), (11, 7), (1, 5)] if impl == "flex" else LENGTHS
    for T, S in lengths:
        q, k, v = randn(B, T, H, E), randn(B, S, K, E), randn(B, S, K, E)
        g, options = GATES[gate](T, S, torch.float64), MASKS[mask](T, S, torch.float64)
        for fill in [None, randn(H, E)] if gate in FILLABLE else [None]:
            if fill is not None and T > 100:
                continue
            want = run("reference", q, k, v, g, fill, options)
            assert_agree(run(impl, q, k, v, g, fill, options), want)


def plain(q: Tensor, k: Tensor, v: Tensor, gate: Any, fill: Tensor | None, keep: Tensor, bias: Tensor | None) -> Tensor:
    """The formula once more, head by head, from nothing but matrix products: what the reference is held against."""
    out = torch.zeros(q.shape[0], q.shape[1], q.shape[2], v.shape[3], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            kv = h // (q.shape[2] // k.shape[2])
            scores = q[b, :, h] @ k[b, :, kv].T / math.sqrt(q.shape[3])
            if bias is not None:
                scores = scores + bias.expand(q.shape[0], q.shape[2], *bias.shape[-2:])[b, h]
            weights = torch.where(keep[b, h], scores, -math.inf).softmax(-1).nan_to_num(0.0)
            lse = torch.where(keep[b, h], scores, -math.inf).logsumexp(-1)
            if isinstance(gate, PairLogits):
                logits = gate.query_BTHR[b, :, h] @ gate.key_BSKR[b, :, kv].T / math.sqrt(gate.query_BTHR.shape[-1])
                weights = weights * activate(logits if gate.bias_1 is None else logits + gate.bias_1, gate.activation)
                g: Any = 1.0
            elif isinstance(gate, Sink):
                logit = gate.logit_H[h] + (
                    0 if gate.key_HE is None else q[b, :, h] @ gate.key_HE[h] / math.sqrt(q.shape[3])
                )
                g = torch.sigmoid(lse - logit)[:, None]
            else:
                g = 1.0 if gate is None else gate.expand(out.shape)[b, :, h]
            out[b, :, h] = g * (weights @ v[b, :, kv]) + (0.0 if fill is None else (1 - g) * fill[h])
    return out.detach()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("gate", GATES)
def test_the_reference_is_the_formula(gate: str, mask: str) -> None:
    for T, S in [(7, 11), (11, 7)]:
        q, k, v = randn(B, T, H, E), randn(B, S, K, E), randn(B, S, K, E)
        g, options = GATES[gate](T, S, torch.float64), MASKS[mask](T, S, torch.float64)
        position, key = torch.arange(T)[:, None] + S - T, torch.arange(S)
        keep = torch.ones(B, H, T, S, dtype=torch.bool)
        if options.get("causal"):
            keep &= key <= position
        if "window" in options:
            keep &= (position - key).abs() < options["window"]
        if "doc_ids" in options:
            docs = options["doc_ids"]
            own = torch.cat([torch.full((B, max(T - S, 0)), -1), docs[:, max(S - T, 0) :]], 1)
            keep &= (own[:, :, None] == docs[:, None])[:, None]
        bias = options.get("mask")
        if bias is not None:
            keep &= bias if bias.dtype == torch.bool else bias > -1e300
            bias = None if mask not in ("float", "per head") else bias
        fill = randn(H, E) if gate in FILLABLE else None
        got = run("reference", q, k, v, g, fill, options)[0]
        assert_agree([got], [plain(q, k, v, g, fill, keep, bias)])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["headwise", "elementwise", "shared", "sink", "pairwise"])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (3, 3), (127, 127), (129, 129), (5, 131)])
def test_a_shut_gate_leaves_exactly_nothing(impl: str, gate: str, T: int, S: int) -> None:
    q, k, v = randn(B, T, H, E), randn(B, S, K, E), randn(B, S, K, E)
    shut: dict[str, Any] = {
        "headwise": torch.zeros(B, T, H, 1, dtype=torch.float64),
        "elementwise": torch.zeros(B, T, H, E, dtype=torch.float64),
        "shared": torch.zeros(B, T, 1, E, dtype=torch.float64),
        "sink": Sink(torch.full((H,), 1e6, dtype=torch.float64)),
        "pairwise": PairLogits(
            torch.zeros(B, T, H, R, dtype=torch.float64), torch.zeros(B, S, K, R, dtype=torch.float64),
            torch.full((1,), -1e9, dtype=torch.float64), "sigmoid",
        ),
    }  # fmt: skip
    with torch.no_grad():
        out = gated_attention(q, k, v, shut[gate], causal=True, impl=impl)
    assert torch.equal(out, torch.zeros_like(out))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("std", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("gate", ["none", "headwise", "elementwise", "sink key", "pairwise"])
def test_low_precision_is_as_good_as_plain_low_precision(gate: str, std: float, dtype: torch.dtype) -> None:
    """Law 5: error vs float64 <= 2 x (the reference's error in that precision) + one rounding, outputs and gradients.

    PyTorch's own float32 kernel errs up to 4 times as much as the unfused reference, gate or no gate. There the plain side is
    that kernel without a gate, so what is tested is that the gate adds nothing to it.
    """
    T = S = 43
    q, k, v = (randn(B, n, h, E, dtype=dtype) for n, h in ((T, H), (S, K), (S, K)))
    g: Any = {
        "none": lambda: None,
        "headwise": lambda: torch.sigmoid(std * torch.randn(B, T, H, 1)).to(dtype).requires_grad_(),
        "elementwise": lambda: torch.sigmoid(std * torch.randn(B, T, H, E)).to(dtype).requires_grad_(),
        "sink key": lambda: Sink(randn(H, dtype=dtype, scale=std), randn(H, E, dtype=dtype, scale=std)),
        "pairwise": lambda: pair_logits(T, S, dtype, "sigmoid", std, None),
    }[gate]()
    exact_inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact_gate = g
    if isinstance(g, tuple):
        exact_gate = type(g)(*(t.detach().double().requires_grad_() if isinstance(t, Tensor) else t for t in g))
    elif g is not None:
        exact_gate = g.detach().double().requires_grad_()
    exact = run("reference", *exact_inputs, exact_gate, None, {"causal": True})  # type: ignore[arg-type]
    reference = run("reference", q, k, v, g, None, {"causal": True})
    fast = run("sdpa", q, k, v, g, None, {"causal": True})
    kernel = 0.0
    if dtype == torch.float32:
        ungated = run("reference", *exact_inputs, None, None, {"causal": True})  # type: ignore[arg-type]
        kernel = max(map(relative_error, run("sdpa", q, k, v, None, None, {"causal": True}), ungated))
    for want, slow, quick in zip(exact, reference, fast, strict=True):
        allowed = 2 * max(relative_error(slow, want), kernel) + torch.finfo(dtype).eps
        assert relative_error(quick, want) <= allowed


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", [*GATES])
@pytest.mark.parametrize("form", ["bool", "-inf", "finfo.min", "-1e9"])
def test_fully_masked_rows_are_zero_with_finite_gradients(impl: str, gate: str, form: str) -> None:
    T, S = 5, 7
    q, k, v = randn(B, T, H, E), randn(B, S, K, E), randn(B, S, K, E)
    keep = torch.rand(B, 1, T, S) > 0.4
    keep[0, :, 2], keep[1, :, :, 3] = False, False
    keep[1, :, :, 0] = True
    value = {"-inf": -math.inf, "finfo.min": torch.finfo(torch.float64).min, "-1e9": -1e9}
    mask = keep if form == "bool" else as_float(keep, value[form], torch.float64)
    g = GATES[gate](T, S, torch.float64)
    out, *gradients = run(impl, q, k, v, g, None, {"mask": mask})
    assert torch.equal(out[0, 2], torch.zeros(H, E, dtype=torch.float64))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    with torch.no_grad():  # what lies at a masked key reaches nothing, whatever it is
        k2, v2 = k.clone(), v.clone()
        k2[1, 3], v2[1, 3] = 1e4, -1e4
        assert torch.equal(
            gated_attention(q, k2, v2, g, mask=mask, impl=impl)[1], gated_attention(q, k, v, g, mask=mask, impl=impl)[1]
        )


@pytest.mark.parametrize("value", [-1e3, -1e6, -1e8, -5e8])
@pytest.mark.parametrize("gate", ["none", "headwise"])
@pytest.mark.parametrize("impl", ["sdpa", "auto"])
def test_rows_that_a_finite_mask_puts_far_below_zero_keep_their_gradients(impl: str, gate: str, value: float) -> None:
    """Softmax does not see what is added to a whole row, but PyTorch's fused backward pass next to 1e6 and more does."""
    T = S = 33
    q, k, v = (randn(B, S, heads, E, dtype=torch.float32) for heads in (H, K, K))
    g = GATES[gate](T, S, torch.float32)
    mask = torch.zeros(T, S)
    mask[3:9] = value
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (q, k, v, g)]
    wanted = run("reference", *exact, None, {"mask": mask.double()})  # type: ignore[arg-type]
    assert_agree([t.double() for t in run(impl, q, k, v, g, None, {"mask": mask})], wanted, 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_fully_masked_row_gets_the_fill_by_the_formula(impl: str) -> None:
    q, k, v, fill = randn(B, 3, H, E), randn(B, 5, K, E), randn(B, 5, K, E), randn(H, E)
    gate = gate_values(B, 3, H, 1)
    with torch.no_grad():
        out = gated_attention(q, k, v, gate, fill=fill, mask=torch.zeros(3, 5, dtype=torch.bool), impl=impl)
        assert_agree([out], [(1 - gate) * fill])
        out = gated_attention(q, k, v, Sink(randn(H)), fill=fill, mask=torch.zeros(3, 5, dtype=torch.bool), impl=impl)
        assert_agree([out], [fill.expand(B, 3, H, E)])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", [*GATES])
def test_inputs_are_never_modified(impl: str, gate: str) -> None:
    T, S = 5, 7
    tensors = [randn(B, T, H, E), randn(B, S, K, E), randn(B, S, K, E)]
    g = GATES[gate](T, S, torch.float64)
    mask = as_float(padding(S), -math.inf, torch.float64)
    watched = [*leaves_of(*tensors, g), mask]
    before = [(t._version, t.detach().clone()) for t in watched]
    run(impl, *tensors, g, None, {"mask": mask})  # type: ignore[arg-type]
    for tensor, (version, values) in zip(watched, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor.detach(), values)


@pytest.mark.parametrize("impl", IMPLS)
def test_an_explicit_impl_serves_or_raises_and_auto_explains(impl: str) -> None:
    q, k, v = randn(B, 5, H, E), randn(B, 5, K, E), randn(B, 5, K, E)
    calls: list[dict[str, Any]] = [{}, {"return_lse": True}, {"dropout": 0.5}, {"causal": True, "window": 2}]
    for options in calls:
        explanation = explain(q, k, v, impl=impl, **options)
        if explanation.impl is None:
            reason = explanation.reasons[impl]
            with pytest.raises(UnsupportedError, match=reason[:20]):
                gated_attention(q, k, v, impl=impl, **options)
        else:
            assert explanation.impl == impl
            gated_attention(q, k, v, impl=impl, **options)
        auto = explain(q, k, v, **options)
        assert auto.impl is not None
        assert set(auto.reasons) == set(IMPLS) - {auto.impl}
        assert all(auto.reasons.values())


@pytest.mark.parametrize("head_dim", [1, 4, 20, 33, 80, 96, 256])
@pytest.mark.parametrize("gate", ["headwise", "elementwise", "sink key", "pairwise"])
def test_any_head_width(gate: str, head_dim: int) -> None:
    T = 43
    q, k, v = randn(B, T, H, head_dim), randn(B, T, K, head_dim), randn(B, T, K, head_dim)
    g = {
        "headwise": gate_values(B, T, H, 1),
        "elementwise": gate_values(B, T, H, head_dim),
        "sink key": Sink(randn(H), randn(H, head_dim)),
        "pairwise": GATES["pairwise"](T, T, torch.float64),
    }[gate]
    assert_agree(run("sdpa", q, k, v, g, None, {"causal": True}), run("reference", q, k, v, g, None, {"causal": True}))


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_values_may_be_wider_than_keys(impl: str) -> None:
    q, k, v, g = randn(B, 5, H, E), randn(B, 7, K, E), randn(B, 7, K, 11), gate_values(B, 5, H, 11)
    keep = torch.ones(B, H, 5, 7, dtype=torch.bool)
    assert_agree(run(impl, q, k, v, g, None, {})[:1], [plain(q, k, v, g, None, keep, None)])


@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize(("b", "T", "S"), [(2, 0, 3), (2, 3, 0), (0, 3, 3), (2, 0, 0)])
@pytest.mark.parametrize("gate", [*GATES])
def test_empty_input_gives_empty_or_zero_output(impl: str, b: int, T: int, S: int, gate: str) -> None:
    q, k, v = randn(b, T, H, E), randn(b, S, K, E), randn(b, S, K, E)
    g = GATES[gate](T, S, torch.float64)
    if isinstance(g, PairLogits):
        g = g._replace(query_BTHR=g.query_BTHR[:b], key_BSKR=g.key_BSKR[:b])
    elif isinstance(g, Tensor):
        g = g[:b]
    out, *gradients = run(impl, q, k, v, g, None, {"causal": True})
    assert torch.equal(out, torch.zeros(b, T, H, E, dtype=torch.float64))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("impl", ["reference", "flex"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_log_sum_exp_is_of_the_scores_before_any_gate(impl: str, mask: str) -> None:
    T, S = 7, 11
    q, k, v, options = randn(B, T, H, E), randn(B, S, K, E), randn(B, S, K, E), MASKS[mask](T, S, torch.float64)
    with torch.no_grad():
        _, plain_lse = gated_attention(q, k, v, impl="reference", return_lse=True, **options)
        for gate in ("headwise", "sink", "pairwise"):
            _, lse = gated_attention(q, k, v, GATES[gate](T, S, torch.float64), impl=impl, return_lse=True, **options)
            seen = plain_lse > -math.inf
            assert torch.equal(lse > -math.inf, seen)
            assert (lse[seen] - plain_lse[seen]).abs().max() <= 1e-12


def test_the_sink_with_a_fill_is_one_extra_key_and_value() -> None:
    """gpt-oss' sink: sigmoid(lse - b - q k0) o + (1 - that) v0 is softmax over the keys and one more."""
    T = 7
    q, k, v = randn(B, T, H, E), randn(B, T, H, E), randn(B, T, H, E)
    b, k0, v0 = randn(H), randn(H, E), randn(H, E)
    scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(E)
    scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)
    extra = (b + torch.einsum("bthe,he->bth", q, k0) / math.sqrt(E)).transpose(1, 2)[..., None]
    weights = torch.cat([extra, scores], -1).softmax(-1)
    want = torch.einsum("bhts,bshe->bthe", weights, torch.cat([v0.expand(B, 1, H, E), v], 1))
    for impl in IMPLS:
        with torch.no_grad():
            assert_agree([gated_attention(q, k, v, Sink(b, k0), causal=True, fill=v0, impl=impl)], [want.detach()])


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("gate", ["none", "headwise", "sink", "pairwise"])
def test_dropout_drops_only_when_asked_and_keeps_the_mean(impl: str, gate: str) -> None:
    T = 5
    q, k, v = (randn(1, T, 2, E).detach() for _ in range(3))
    g: Any = {
        "none": None, "headwise": torch.rand(1, T, 2, 1, dtype=torch.float64), "sink": Sink(torch.zeros(2, dtype=torch.float64)),
        "pairwise": PairLogits(randn(1, T, 2, R).detach(), randn(1, T, 2, R).detach(), None, "sigmoid"),
    }[gate]  # fmt: skip
    want = gated_attention(q, k, v, g, impl=impl)
    assert torch.equal(gated_attention(q, k, v, g, impl=impl), want)
    torch.manual_seed(0)
    draws = torch.stack([gated_attention(q, k, v, g, dropout=0.5, impl=impl) for _ in range(3000)])
    assert not torch.equal(draws[0], draws[1])
    error = (draws.mean(0) - want).abs() / (draws.std(0) / math.sqrt(3000) + 1e-12)
    assert error.max() < 5, "the mean of many draws is the value without dropout, within 5 standard errors"


def test_the_reference_works_under_vmap_and_twice_differentiated() -> None:
    q, k, v, g = randn(4, 5, 2, 3), randn(4, 5, 2, 3), randn(4, 5, 2, 3), gate_values(4, 5, 2, 1)

    def one(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return gated_attention(q[None], k[None], v[None], g[None], causal=True, impl="reference")[0]

    assert_agree([torch.vmap(one)(q, k, v, g)], [gated_attention(q, k, v, g, causal=True, impl="reference")])
    per_sample = torch.vmap(torch.func.grad(lambda *args: one(*args).square().sum(), argnums=3))(q, k, v, g)
    whole = torch.autograd.grad(gated_attention(q, k, v, g, causal=True, impl="reference").square().sum(), g)[0]
    assert_agree([per_sample], [whole])
    small = [t[:1].detach().requires_grad_() for t in (q, k, v, g)]
    assert torch.autograd.gradgradcheck(lambda *t: gated_attention(*t, causal=True, impl="reference"), small)


@pytest.mark.parametrize("gate", ["headwise", "elementwise", "sink key", "pairwise"])
def test_gradients_are_those_of_finite_differences(gate: str) -> None:
    T, S = 3, 4
    q, k, v, g = randn(B, T, H, E), randn(B, S, K, E), randn(B, S, K, E), GATES[gate](T, S, torch.float64)
    leaves = leaves_of(q, k, v, g)

    def f(*tensors: Tensor) -> Tensor:
        rest = list(tensors[3:])
        value = type(g)(*(rest.pop(0) if isinstance(t, Tensor) else t for t in g)) if isinstance(g, tuple) else rest[0]
        return gated_attention(*tensors[:3], value, causal=True, impl="sdpa")

    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_with_large_logits_and_without_a_scale(dtype: torch.dtype) -> None:
    """1e4 fits float16, and what carries it to the scores must too; with scale=0 nothing carries it."""
    q, k, v = (torch.randn(B, 9, heads, E).to(dtype) for heads in (H, K, K))
    for logit in (1e4, -1e4, 3.0):
        sink = Sink(torch.full((H,), logit, dtype=dtype))
        for scale in (None, 1e-3, 0.0):
            want = gated_attention(q, k, v, sink, causal=True, scale=scale, impl="reference")
            got = gated_attention(q, k, v, sink, causal=True, scale=scale)
            assert torch.isfinite(got).all()
            assert (got - want).abs().max() <= 8 * torch.finfo(dtype).eps
    with pytest.raises(UnsupportedError, match="scale=0 takes away"):
        gated_attention(q, k, v, sink, scale=0.0, impl="sdpa")


def test_it_can_be_traced() -> None:
    """torch.jit.trace, deprecated as it is, is what ONNX tools of old and Neuron use."""
    q, k, v = (torch.randn(B, 9, heads, E) for heads in (H, K, K))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda q, k, v: gated_attention(q, k, v, torch.sigmoid(q), causal=True), (q, k, v))
    assert torch.equal(traced(q, k, v), gated_attention(q, k, v, torch.sigmoid(q), causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sink_gate_in_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Logits of size 100: a sigmoid of rounded logits would be off by whole units."""
    q = torch.zeros(1, 1, 1, 4, dtype=dtype)
    k, v = torch.zeros(1, 97, 1, 4, dtype=dtype), torch.ones(1, 97, 1, 4, dtype=dtype)
    for logit in (0.0, 4.0, 5.5):
        sink = Sink(torch.tensor([logit], dtype=dtype))
        want = 97 / (97 + math.exp(logit))
        for impl in ("reference", "sdpa"):
            got = float(gated_attention(q, k, v, sink, impl=impl)[0, 0, 0, 0])
            assert abs(got - want) <= 3 * torch.finfo(dtype).eps, (impl, logit, got, want)
