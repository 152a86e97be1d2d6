"""GatedMultiheadAttention: torch.nn.MultiheadAttention's answers with the gate off, its own formula with the gate awake."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gated_attn.errors import ShapeError, SpecError
from gated_attn.gate import Gate
from gated_attn.nn.multihead import GatedMultiheadAttention

# B batch, T queries, S keys, H heads, E head width, D model width, K and V the widths that keys and values come in.
B, T, S, H, E, K, V = 2, 5, 7, 3, 5, 11, 13
D = H * E
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "kdim-vdim": {"kdim": K, "vdim": V},
    "bias-kv": {"add_bias_kv": True},
    "zero-attn": {"add_zero_attn": True},
    "all-extras": {"add_bias_kv": True, "add_zero_attn": True, "kdim": K, "vdim": V},
}
SPECS = [
    "output:headwise", "output:elementwise", "output:shared", "output:elementwise:silu,rank=2", "output:headwise,in=3",
    "output:headwise,top_k=2",
    "output:elementwise,bias=-1,fill", "output:elementwise:tanh,op=add", "output:elementwise,source=constant",
    "output:headwise,source=query", "output:headwise,source=lse", "output:headwise,source=lse,bias=1,sink_key,fill",
    "value:elementwise", "value:headwise,fill", "key:headwise", "key:shared", "query:elementwise", "query:headwise,source=query",
    "dense:elementwise", "dense:headwise,fill", "weights:headwise", "weights:pairwise", "weights:pairwise,rank=2,bias=1",
]  # fmt: skip
SHUTTABLE = [
    "output:headwise,bias=0",
    "output:elementwise,bias=0",
    "output:shared,bias=0",
    "value:headwise,bias=0",
    "weights:headwise,bias=0",
    "weights:pairwise,bias=0",
]
CLOSED = -1e4
"""A gate logit whose sigmoid is exactly 0 in float32."""


def awake(module: nn.Module, std: float = 5.0) -> nn.Module:
    """Every gate parameter drawn anew with a large standard deviation, biases of the attention away from 0."""
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            if "attn_gate" in name:
                parameter.normal_(std=std)
            elif name.endswith("bias"):
                parameter.normal_()
    return module


def shut(module: nn.Module) -> nn.Module:
    for gate in (m for m in module.modules() if isinstance(m, Gate)):
        for name, parameter in gate.named_parameters():
            nn.init.constant_(parameter, CLOSED if name.endswith("bias") else 0.0)
    return module


def inputs(options: dict[str, Any], batch_first: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((T, D), (S, options.get("kdim", D)), (S, options.get("vdim", D)))
    return [
        torch.randn(*((B, n) if batch_first else (n, B)), width, dtype=dtype, requires_grad=True) for n, width in shapes
    ]


def rounding(exact: Tensor) -> float:
    return torch.finfo(torch.float32).eps * float(exact.detach().abs().max())


def assert_as_accurate(got: Tensor, stock: Tensor, exact: Tensor) -> None:
    """Our float32 error is at most twice that of torch's float32, plus one rounding."""
    got, stock, exact = got.detach(), stock.detach(), exact.detach()
    assert got.shape == exact.shape
    error, allowed = float((got - exact).abs().max()), 2 * float((stock - exact).abs().max()) + rounding(exact)
    assert error <= allowed


MASKS = [
    "none",
    "padding",
    "padding-float",
    "attn",
    "attn-float",
    "attn-3d",
    "attn-3d-float",
    "padding+attn",
    "float+float",
]


def masks(kind: str) -> dict[str, Tensor]:
    """torch's masks (True hides); every query keeps key 0, so that torch itself gives no NaN."""
    padding_BS = torch.arange(S) >= torch.tensor([S, 3])[:, None]
    hidden_TS, hidden_NTS = torch.rand(T, S) < 0.4, torch.rand(B * H, T, S) < 0.4
    hidden_TS[:, 0] = hidden_NTS[:, :, 0] = False
    float_TS = torch.randn(T, S).masked_fill(hidden_TS, -math.inf)
    float_BS = torch.randn(B, S).masked_fill(padding_BS, -math.inf)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding_BS},
        "padding-float": {"key_padding_mask": float_BS},
        "attn": {"attn_mask": hidden_TS},
        "attn-float": {"attn_mask": float_TS},
        "attn-3d": {"attn_mask": hidden_NTS},
        "attn-3d-float": {"attn_mask": torch.randn(B * H, T, S).masked_fill(hidden_NTS, -math.inf)},
        "padding+attn": {"key_padding_mask": padding_BS, "attn_mask": hidden_TS},
        "float+float": {"key_padding_mask": float_BS, "attn_mask": float_TS},
    }[kind]


def pair(options: dict[str, Any], **more: Any) -> tuple[nn.MultiheadAttention, GatedMultiheadAttention]:
    torch.manual_seed(5)
    stock = nn.MultiheadAttention(D, H, **options, **more)
    torch.manual_seed(5)
    return stock, GatedMultiheadAttention(D, H, **options, **more, gate=None)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_seed_gives_both_the_same_parameters(options: dict[str, Any]) -> None:
    stock, ours = pair(options)
    assert list(stock.state_dict()) == list(ours.state_dict())
    for name, tensor in stock.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", MASKS)
def test_forward_weights_and_gradients_equal_torch(options: dict[str, Any], kind: str) -> None:
    stock, ours = pair(options, batch_first=True)
    awake(stock), ours.load_state_dict(stock.state_dict())
    exact = copy.deepcopy(stock).double()
    xs = inputs(options)
    mask = masks(kind)
    double_mask = {name: m.double() if m.is_floating_point() else m for name, m in mask.items()}
    results = []
    for module, dtype, masked in (
        (ours, torch.float32, mask),
        (stock, torch.float32, mask),
        (exact, torch.float64, double_mask),
    ):
        leaves = [x.detach().to(dtype).requires_grad_() for x in xs]
        out, _ = module(*leaves, **masked, need_weights=False)  # so that torch, too, takes its fused attention
        _, weights = module(*leaves, **masked, average_attn_weights=False)
        grads = torch.autograd.grad(
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), [*leaves, *module.parameters()]
        )
        results.append([out, weights, weights.mean(1), *grads])
    for got, reference, truth in zip(*results, strict=True):
        assert_as_accurate(got, reference, truth)
    out, averaged = ours(*xs, **mask)
    assert torch.equal(out, results[0][0])
    assert_as_accurate(averaged, results[1][2], results[2][2])


@pytest.mark.parametrize("layout", ["self", "keys-are-values", "time-first", "single", "single-3d-mask"])
def test_layouts_equal_torch(layout: str) -> None:
    stock, ours = pair({}, batch_first=layout in ("self", "keys-are-values"))
    awake(stock), ours.load_state_dict(stock.state_dict())
    q, k, v = inputs({}, batch_first=layout != "time-first")
    mask = masks("padding+attn")
    if layout == "self":
        q = v = k
        mask = {"attn_mask": torch.ones(S, S, dtype=torch.bool).triu(1)}
    elif layout == "keys-are-values":
        v = k
    elif layout.startswith("single"):
        q, k, v = q[1], k[1], v[1]
        padding = {"key_padding_mask": mask["key_padding_mask"][1]}
        mask = padding if layout == "single" else {"attn_mask": masks("attn-3d")["attn_mask"][:H]}
    exact = copy.deepcopy(stock).double()(q.double(), k.double(), v.double(), **mask)
    for got, reference, truth in zip(ours(q, k, v, **mask), stock(q, k, v, **mask), exact, strict=True):
        assert_as_accurate(got, reference, truth)


@pytest.mark.parametrize("extras", [False, True])
def test_is_causal_is_a_mask_of_its_own(extras: bool) -> None:
    stock, ours = pair({"add_bias_kv": extras, "add_zero_attn": extras}, batch_first=True)
    x = torch.randn(B, S, D)
    later_SS = torch.ones(S, S, dtype=torch.bool).triu(1)
    expected, weights = stock(x, x, x, attn_mask=later_SS)
    for given in ({}, {"attn_mask": later_SS}, {"attn_mask": torch.zeros(S, S)}):
        out, got = ours(x, x, x, **given, is_causal=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(got, weights)
    few_SS = torch.eye(S, dtype=torch.bool).roll(-1, 1)  # forbids the next token only, so both masks matter
    both = {"attn_mask": later_SS | few_SS.T}
    both["attn_mask"][:, 0] = False
    out = ours(x, x, x, attn_mask=both["attn_mask"] & ~later_SS, is_causal=True)[0]
    torch.testing.assert_close(out, stock(x, x, x, **both)[0])


def test_is_causal_over_other_keys_counts_from_the_first() -> None:
    _, ours = pair({}, batch_first=True)
    q, k, v = inputs({})
    _, weights = ours(q, k, v, is_causal=True)
    assert torch.equal(weights[0] > 0, torch.ones(T, S, dtype=torch.bool).tril())


def test_bool_and_float_masks_meet() -> None:
    _, ours = pair({}, batch_first=True)
    q, k, v = inputs({})
    hidden, bias = masks("padding")["key_padding_mask"], torch.randn(T, S)
    hidden[1] = True  # a row with no key left tells a hidden key from one that is merely far down
    expected = ours(q, k, v, torch.zeros(B, S).masked_fill(hidden, -math.inf), attn_mask=bias)[0]
    torch.testing.assert_close(ours(q, k, v, hidden, attn_mask=bias)[0], expected, rtol=0, atol=0)
    half = torch.zeros(B, S, dtype=torch.float16).masked_fill(hidden, torch.finfo(torch.float16).min)
    torch.testing.assert_close(ours(q, k, v, half, attn_mask=bias)[0], expected, rtol=0, atol=0)


def test_stock_state_dict_misses_the_gate_only() -> None:
    stock = nn.MultiheadAttention(D, H)
    ours = GatedMultiheadAttention(D, H, gate="output:headwise,bias=-2")
    report = ours.load_state_dict(stock.state_dict(), strict=False)
    assert report.missing_keys == ["attn_gate.proj.weight", "attn_gate.proj.bias"]
    assert report.unexpected_keys == []


def test_from_torch_leaves_frozen_weights_frozen() -> None:
    stock = nn.MultiheadAttention(D, H, batch_first=True)
    stock.in_proj_weight.requires_grad_(False)
    module = GatedMultiheadAttention.from_torch(stock, "paper")
    assert not module.in_proj_weight.requires_grad
    assert not stock.in_proj_weight.requires_grad
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == {"in_proj_bias", "out_proj.weight", "out_proj.bias", "attn_gate.proj.weight"}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_from_torch_shares_the_parameters(options: dict[str, Any]) -> None:
    stock = nn.MultiheadAttention(D, H, **options, batch_first=True, dropout=0.1).eval()
    ours = GatedMultiheadAttention.from_torch(stock, gate="identity")
    mine = dict(ours.named_parameters())
    assert all(mine[name] is parameter for name, parameter in stock.named_parameters())
    assert (ours.training, ours.dropout) == (False, 0.1)
    xs = inputs(options)
    torch.testing.assert_close(ours(*xs)[0], stock(*xs)[0])


def by_formula(m: GatedMultiheadAttention, q: Tensor, k: Tensor, v: Tensor, keep_BTS: Tensor) -> tuple[Tensor, Tensor]:
    """(output, softmax weights), sample by sample and head by head, written apart from the module; float64."""
    gate: Any = m.attn_gate
    position, source = gate.spec.position, gate.spec.source
    weights = (
        m.in_proj_weight.chunk(3)
        if m.in_proj_weight is not None
        else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    )
    biases = (0, 0, 0) if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
    heads = [(x @ w.T + b).view(*x.shape[:2], H, E) for x, w, b in zip((q, k, v), weights, biases, strict=True)]
    places = ("query", "key", "value")
    if position in places:
        i = places.index(position)
        g = gate(heads[0] if source == "query" else (q, k, v)[i])
        fill = 0 if gate.fill_HE is None else (1 - g) * gate.fill_HE
        heads[i] = g * heads[i] + fill
    queries, keys, values = heads
    for extra, wanted in (
        ((m.bias_k, m.bias_v), m.bias_k is not None),
        ((torch.zeros(1, 1, D), torch.zeros(1, 1, D)), m.add_zero_attn),
    ):
        if wanted:
            keys = torch.cat([keys, extra[0].view(1, 1, H, E).expand(B, 1, H, E)], 1)
            values = torch.cat([values, extra[1].view(1, 1, H, E).expand(B, 1, H, E)], 1)
    appended = keys.shape[1] - keep_BTS.shape[2]
    keep_BTS = torch.cat([keep_BTS, keep_BTS.new_ones(B, T, appended)], 2)
    scores = torch.einsum("bthe,bshe->bhts", queries, keys) / math.sqrt(E)
    scores = scores.masked_fill(~keep_BTS[:, None], -math.inf)
    probabilities = scores.softmax(-1)
    used = probabilities
    if gate.spec.width == "pairwise":
        a, c = gate.query_proj(queries), gate.key_proj(keys)
        logits = torch.einsum("bthr,bshr->bhts", a, c) / math.sqrt(a.shape[-1]) + (
            0 if gate.bias is None else gate.bias
        )
        used = probabilities * logits.sigmoid()
    out = torch.einsum("bhts,bshe->bthe", used, values)
    if gate.spec.width != "pairwise" and position in ("output", "weights"):
        if source == "lse":
            sink = gate.bias if gate.sink_key is None else gate.bias + (queries * gate.sink_key).sum(-1) / math.sqrt(E)
            g = (scores.logsumexp(-1).transpose(1, 2) - sink).sigmoid()[..., None]
        else:
            g = gate(queries if source == "query" else q)
        out = out + g if gate.spec.op == "add" else out * g + (0 if gate.fill_HE is None else (1 - g) * gate.fill_HE)
    out = out.flatten(2) @ m.out_proj.weight.T + (0 if m.out_proj.bias is None else m.out_proj.bias)
    if position == "dense":
        g = gate(q)[:, :, 0]
        out = out * g + (0 if gate.fill_HE is None else (1 - g) * gate.fill_HE[0])
    return out, probabilities


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("name", ["plain", "all-extras"])
def test_awake_gates_follow_the_formula(text: str, name: str) -> None:
    torch.manual_seed(7)
    options = OPTIONS[name]
    module = awake(GatedMultiheadAttention(D, H, batch_first=True, gate=text, dtype=torch.float64, **options))
    xs = inputs(options, dtype=torch.float64)
    hidden = masks("padding+attn")
    keep = ~(hidden["key_padding_mask"][:, None] | hidden["attn_mask"])
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        expected, probabilities = by_formula(module, *xs, keep)
    finally:
        torch.set_default_dtype(default)
    out, weights = module(*xs, **hidden, average_attn_weights=False)
    # float64's rounding, times the few hundred terms of the sums.
    close = {"rtol": 0, "atol": 512 * torch.finfo(torch.float64).eps * float(expected.detach().abs().max())}
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(weights, probabilities, rtol=0, atol=512 * torch.finfo(torch.float64).eps)
    parameters = [p for p in module.parameters() if p.requires_grad]
    direction = torch.randn_like(out)
    got = torch.autograd.grad((out * direction).sum(), [*xs, *parameters])
    assert all(g is not None and g.isfinite().all() for g in got)
    assert all(g.abs().max() > 0 for g in got)


@pytest.mark.parametrize("text", SPECS)
def test_one_answer_in_every_call_form(text: str) -> None:
    torch.manual_seed(11)
    module = awake(GatedMultiheadAttention(D, H, batch_first=True, gate=text))
    q, k, v = inputs({})
    mask = masks("padding+attn")
    out, weights = module(q, k, v, **mask)
    assert torch.equal(module(q, k, v, **mask, need_weights=False)[0], out)
    assert torch.equal(module.eval()(q, k, v, **mask)[0], out)
    with torch.inference_mode():
        torch.testing.assert_close(module(q, k, v, **mask)[0], out)
    module.batch_first = False
    turned = module(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), **mask)
    torch.testing.assert_close(turned[0].transpose(0, 1), out)
    torch.testing.assert_close(turned[1], weights)
    alone = module(q[1], k[1], v[1], mask["key_padding_mask"][1], attn_mask=mask["attn_mask"])
    torch.testing.assert_close(alone[0], out[1])
    torch.testing.assert_close(alone[1], weights[1])
    short = 3  # sample 1 has three keys; without its padding it says the same
    shorter = module(q[1], k[1, :short], v[1, :short], attn_mask=mask["attn_mask"][:, :short])[0]
    torch.testing.assert_close(shorter, out[1])


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile counts its recompilations per code object, and every module here shares one forward."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("text", SHUTTABLE)
def test_a_shut_gate_leaves_the_bias_on_every_path(text: str) -> None:
    module = shut(awake(GatedMultiheadAttention(D, H, batch_first=True, dropout=0.25, gate=text)))
    q, k, v = (x.detach() for x in inputs({}))
    bias = module.out_proj.bias
    for mode in (True, False):
        module.train(mode)
        for need_weights in (True, False):
            out = module(q, k, v, **masks("padding"), need_weights=need_weights)[0]
            assert torch.equal(out, bias.expand_as(out))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    out = compiled(q, k, v, **masks("padding"), need_weights=False)[0]
    assert torch.equal(out, bias.expand_as(out))
    out = module(q[0], k[0], v[0])[0]
    assert torch.equal(out, bias.expand_as(out))


def test_dense_gate_shuts_the_bias_too() -> None:
    module = shut(awake(GatedMultiheadAttention(D, H, gate="dense:elementwise,bias=0")))
    assert not module(*inputs({}, batch_first=False))[0].any()


def test_weights_are_those_before_the_gate() -> None:
    torch.manual_seed(13)
    gated = shut(GatedMultiheadAttention(D, H, batch_first=True, gate="output:headwise,bias=0"))
    q, k, v = inputs({})
    _, weights = gated(q, k, v, **masks("padding"))
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, T))
    stock = nn.MultiheadAttention(D, H, batch_first=True)
    stock.load_state_dict({n: t for n, t in gated.state_dict().items() if "attn_gate" not in n})
    torch.testing.assert_close(weights, stock(q, k, v, **masks("padding"))[1])


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_averaged_weights_never_hold_all_heads() -> None:
    heads, n = 7, 53
    module = GatedMultiheadAttention(heads * 2, heads, batch_first=True).eval()
    x = torch.randn(1, n, heads * 2)
    with torch.no_grad(), Largest() as seen:
        module(x, x, x)
    assert seen.numel == n * n
    with torch.no_grad(), Largest() as everything:
        module(x, x, x, average_attn_weights=False)
    assert everything.numel == heads * n * n  # the probe does see a (B, H, T, S) where there is one


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(17)
    module = awake(GatedMultiheadAttention(D, H, batch_first=True, dropout=0.5))
    xs = inputs({})
    assert not torch.equal(module(*xs)[0], module(*xs)[0])
    assert torch.equal(module(*xs)[1], module(*xs)[1])  # the weights are those before dropout
    module.eval()
    first = module(*xs)[0]
    assert torch.equal(first, module(*xs)[0])
    module.dropout = 0.0
    assert torch.equal(first, module(*xs)[0])


def hide(form: str, hidden: Tensor) -> Tensor:
    if form == "bool":
        return hidden
    return torch.zeros(hidden.shape).masked_fill(
        hidden, -math.inf if form == "-inf" else torch.finfo(torch.float32).min
    )


@pytest.mark.parametrize(
    "text", ["none", "output:elementwise", "output:headwise,source=lse", "value:headwise", "weights:pairwise"]
)
@pytest.mark.parametrize("form", ["bool", "-inf", "finfo.min"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_fully_padded_sample_attends_to_nothing(text: str, form: str, need_weights: bool, training: bool) -> None:
    torch.manual_seed(19)
    module = awake(GatedMultiheadAttention(D, H, batch_first=True, gate=text)).train(training)
    q, k, v = inputs({})
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[0, 4:] = True
    hidden[1] = True
    out, weights = module(q, k, v, hide(form, hidden), need_weights=need_weights)
    assert torch.equal(out[1], module.out_proj.bias.expand(T, D))
    if need_weights:
        assert not weights[1].any()
    direction = torch.randn(T, D)
    names = [n for n, _ in module.named_parameters()]
    together = torch.autograd.grad((out[0] * direction).sum() + 0 * out[1].sum(), list(module.parameters()))
    alone, _ = module(q[:1], k[:1], v[:1], hide(form, hidden[:1]))
    expected = torch.autograd.grad((alone[0] * direction).sum(), list(module.parameters()))
    for name, got, want in zip(names, together, expected, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
    everything = torch.autograd.grad(module(q, k, v, hide(form, hidden))[0].square().sum(), [q, k, v])
    assert all(g.isfinite().all() for g in everything)
    assert not everything[1][1].any()  # what hidden keys say moves nothing


WIDE, PAIRS = 14, 2  # torch's encoder fast path serves even numbers of heads only, so this is where it would strike


@contextmanager
def prototype_warnings_off() -> Iterator[None]:
    """torch's own notices: nested tensors are a prototype, and an encoder of our layers builds none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True, but self.use_nested_tensor is False")
        yield


def swap(layer: nn.Module) -> None:
    for name in ("self_attn", "multihead_attn"):
        if hasattr(layer, name):
            setattr(layer, name, awake(GatedMultiheadAttention.from_torch(getattr(layer, name), "output:headwise")))


def counting(module: nn.Module) -> list[int]:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    for attention in (m for m in module.modules() if isinstance(m, GatedMultiheadAttention)):
        # A hook would itself switch torch's fast path off, so the call is counted where it arrives.
        forward = attention.forward
        attention.forward = lambda *a, _forward=forward, **k: (count(), _forward(*a, **k))[1]
    return calls


MODES = {"train": nullcontext, "eval": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("swapped", ["before", "after"])
def test_encoder_really_calls_it(mode: str, padded: bool, swapped: str) -> None:
    torch.manual_seed(23)
    layer = nn.TransformerEncoderLayer(WIDE, PAIRS, 19, dropout=0.0, batch_first=True)
    with prototype_warnings_off():
        if swapped == "before":
            swap(layer)
        encoder = nn.TransformerEncoder(layer, 3)
        if swapped == "after":
            assert encoder.use_nested_tensor
            for each in encoder.layers:
                swap(each)
        x = torch.randn(B, S, WIDE)
        hidden = torch.arange(S) >= torch.tensor([S, 4])[:, None] if padded else None
        expected = encoder(x, src_key_padding_mask=hidden)
        calls = counting(encoder)
        encoder.train(mode == "train")
        with MODES[mode]():
            out = encoder(x, src_key_padding_mask=hidden)
    real = torch.ones(B, S, dtype=torch.bool) if hidden is None else ~hidden
    torch.testing.assert_close(out[real], expected[real])
    if swapped == "after" and padded and mode in ("no_grad", "inference"):
        assert not out[~real].any()  # the encoder did go through nested tensors, whose padding comes back as zeros
        assert calls[0] == 2 * 3  # a nested call hands over to the padded one
    else:
        assert calls[0] == 3


@pytest.mark.parametrize("mode", MODES)
def test_decoder_layer_calls_both(mode: str) -> None:
    layer = nn.TransformerDecoderLayer(WIDE, PAIRS, 19, dropout=0.0, batch_first=True)
    swap(layer)
    x, memory = torch.randn(B, T, WIDE), torch.randn(B, S, WIDE)
    expected = layer(x, memory)
    calls = counting(layer)
    layer.train(mode == "train")
    with MODES[mode]():
        torch.testing.assert_close(layer(x, memory), expected)
    assert calls[0] == 2


def test_out_proj_is_called_as_a_module() -> None:
    module = GatedMultiheadAttention(D, H)
    calls: list[int] = []
    module.out_proj.register_forward_hook(lambda *_: calls.append(1))
    module(*inputs({}, batch_first=False))
    assert calls == [1]

    class LowRank(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.up, self.down = base, nn.Linear(2, D, bias=False), nn.Linear(D, 2, bias=False)
            self.weight, self.bias = base.weight, base.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    module.out_proj = LowRank(module.out_proj)
    module(*inputs({}, batch_first=False))[0].sum().backward()
    assert module.out_proj.up.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GatedMultiheadAttention(D, 4), r"embed_dim=15 .* num_heads=4"),
        (lambda: GatedMultiheadAttention(D, H, dropout=1.0), r"dropout=1.0"),
        (lambda: _call(q=(B, T, D + 1)), r"query \(2, 5, 16\).*query is 16 wide .* 15"),
        (lambda: _call(k=(B, S, D - 1)), r"key is 14 wide"),
        (lambda: _call(v=(B, S + 1, D)), r"key \(2, 7, 15\), value \(2, 8, 15\)"),
        (lambda: _call(q=(B + 1, T, D)), r"query \(3, 5, 15\).*batch sizes differ"),
        (lambda: _call(q=(T, D)), r"query \(5, 15\), key \(2, 7, 15\)"),
        (lambda: _call(key_padding_mask=torch.zeros(B, T, dtype=torch.bool)), r"key_padding_mask .*\(2, 5\).*\(2, 7\)"),
        (lambda: _call(key_padding_mask=torch.zeros(B, S, dtype=torch.int64)), r"key_padding_mask is torch.int64"),
        (lambda: _call(attn_mask=torch.zeros(S, T)), r"attn_mask .*\(7, 5\).*\(5, 7\) or \(6, 5, 7\)"),
        (lambda: _call(attn_mask=torch.zeros(B, T, S)), r"attn_mask .*\(2, 5, 7\).*\(5, 7\) or \(6, 5, 7\)"),
        (lambda: _call(attn_mask=torch.zeros(T, S, dtype=torch.uint8)), r"attn_mask is torch.uint8"),
    ],
)
def test_errors_name_both_sides(call: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()


def _call(q: Any = (B, T, D), k: Any = (B, S, D), v: Any = (B, S, D), **more: Any) -> None:
    GatedMultiheadAttention(D, H, batch_first=True)(torch.zeros(q), torch.zeros(k), torch.zeros(v), **more)


def test_a_latent_gate_has_nothing_to_read() -> None:
    with pytest.raises(SpecError, match="no latent query"):
        GatedMultiheadAttention(D, H, gate="output:headwise,source=latent")


def test_a_gated_module_is_not_gated_again() -> None:
    with pytest.raises(SpecError, match="swapped already, gate=output:elementwise:sigmoid; swap stock modules once"):
        GatedMultiheadAttention.from_torch(GatedMultiheadAttention(D, H), "paper-headwise")


def test_jagged_tensors_keep_their_offsets() -> None:
    module = awake(GatedMultiheadAttention(D, H, batch_first=True))
    rows = [torch.randn(n, D) for n in (3, 5)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    out = x + module(x, x, x, need_weights=False)[0]
    for row, got in zip(rows, out.unbind(), strict=True):
        torch.testing.assert_close(got, row + module(row, row, row)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [-1e9, -1e30, -math.inf])
def test_a_float32_mask_hides_whole_samples_in_every_dtype(dtype: torch.dtype, hidden: float) -> None:
    module = awake(GatedMultiheadAttention(D, H, batch_first=True)).to(dtype)
    x, padding = torch.randn(2, 5, D, dtype=dtype), torch.tensor([[0.0] * 5, [hidden] * 5])
    out, weights = module(x, x, x, key_padding_mask=padding)
    assert torch.equal(out[1], module.out_proj.bias.expand(5, D))
    assert torch.equal(weights[1], torch.zeros(5, 5, dtype=dtype))
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


def test_nested_keys_and_values_come_in_pairs() -> None:
    attention = GatedMultiheadAttention(D, H, batch_first=True)
    with prototype_warnings_off():
        key, value = (torch.nested.as_nested_tensor([torch.randn(3, D), torch.randn(n, D)]) for n in (5, 4))
        with pytest.raises(ShapeError, match=r"nested keys have lengths \[3, 5\] and values \[3, 4\]"):
            attention(key, key, value)


def test_nested_tensors_take_no_masks() -> None:
    module = GatedMultiheadAttention(D, H, batch_first=True)
    with prototype_warnings_off():
        x = torch.nested.as_nested_tensor([torch.randn(3, D), torch.randn(5, D)])
        with pytest.raises(ShapeError, match="carry their own lengths"):
            module(x, x, x, torch.zeros(2, 5, dtype=torch.bool))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "text",
    ["output:elementwise", "output:headwise,source=lse", "value:headwise", "weights:pairwise", "dense:elementwise"],
)
def test_compiled_equals_eager(text: str) -> None:
    module = awake(GatedMultiheadAttention(D, H, batch_first=True, gate=text))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    xs = inputs({})
    mask = masks("padding")
    out, weights = compiled(*xs, **mask)
    eager, eager_weights = module(*xs, **mask)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(weights, eager_weights)
    for got, want in zip(torch.autograd.grad(out.sum(), xs), torch.autograd.grad(eager.sum(), xs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch imports its own
def test_inductor_equals_eager() -> None:
    module = awake(GatedMultiheadAttention(D, H, batch_first=True))
    xs = inputs({})
    torch.testing.assert_close(
        torch.compile(module, fullgraph=True)(*xs, **masks("padding")), module(*xs, **masks("padding"))
    )


@pytest.mark.parametrize("grad", [nullcontext, torch.no_grad])
def test_exported_serves_other_sizes(grad: Any) -> None:
    module = awake(GatedMultiheadAttention(D, H, batch_first=True)).eval()
    batch, queries, keys = torch.export.Dim("batch"), torch.export.Dim("queries"), torch.export.Dim("keys")
    shapes = ({0: batch, 1: queries}, {0: batch, 1: keys}, {0: batch, 1: keys}, {0: batch, 1: keys})
    q, k, v = (x.detach() for x in inputs({}))
    with grad():
        exported = torch.export.export(
            module, (q, k, v, masks("padding")["key_padding_mask"]), dynamic_shapes=shapes
        ).module()
        q, k, v = torch.randn(3, 11, D), torch.randn(3, 17, D), torch.randn(3, 17, D)
        hidden = torch.arange(17) >= torch.tensor([17, 2, 0])[:, None]
        torch.testing.assert_close(exported(q, k, v, hidden), module(q, k, v, hidden))


def test_per_sample_gradients_with_vmap() -> None:
    module = awake(GatedMultiheadAttention(D, H, batch_first=True, impl="reference"))
    parameters = dict(module.named_parameters())
    xs = [x.detach() for x in inputs({})]

    def loss(parameters: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (q, k, v))[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(parameters, *xs)
    for sample in range(B):
        one = torch.func.grad(loss)(parameters, *(x[sample] for x in xs))
        for name, gradient in one.items():
            torch.testing.assert_close(each[name][sample], gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["plain", "extras"])
def test_autocast_stays_close(options: dict[str, Any], dtype: torch.dtype) -> None:
    module = awake(GatedMultiheadAttention(D, H, batch_first=True, **options), std=1.0)
    xs = inputs({})
    full = module(*xs)[0].detach()
    with torch.autocast("cpu", dtype):
        out, _ = module(*xs)
    low = copy.deepcopy(module).to(dtype)(*(x.to(dtype) for x in xs))[0]
    assert out.dtype == dtype
    one_rounding = torch.finfo(dtype).eps * float(full.abs().max())
    assert float((out - full).detach().abs().max()) <= 2 * float((low - full).detach().abs().max()) + one_rounding
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


def test_copies_are_whole_and_apart() -> None:
    module = awake(GatedMultiheadAttention(D, H, batch_first=True, gate="output:headwise,bias=0"))
    xs = inputs({})
    before = module(*xs)[0]
    assert torch.equal(pickle.loads(pickle.dumps(module))(*xs)[0], before)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    fresh = GatedMultiheadAttention(D, H, batch_first=True, gate="output:headwise,bias=0")
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert torch.equal(fresh(*xs)[0], before)
    twin = shut(copy.deepcopy(module))
    assert torch.equal(twin(*xs)[0], module.out_proj.bias.expand_as(before))
    assert torch.equal(module(*xs)[0], before)


def test_empty_sequences() -> None:
    module = GatedMultiheadAttention(D, H, batch_first=True)
    out, weights = module(torch.zeros(B, 0, D), torch.zeros(B, S, D), torch.zeros(B, S, D))
    assert (out.shape, weights.shape) == ((B, 0, D), (B, 0, S))
    out, weights = module(torch.randn(B, T, D), torch.zeros(B, 0, D), torch.zeros(B, 0, D))
    assert torch.equal(out, module.out_proj.bias.expand(B, T, D))
    assert weights.shape == (B, T, 0)
