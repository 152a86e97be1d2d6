"""Gated encoder and decoder layers and the encoder-decoder: torch's answers without gates, no attention with them shut."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gated_attn.errors import SpecError
from gated_attn.gate import Gate
from gated_attn.nn.layers import GatedDecoderLayer, GatedEncoderLayer, GatedTransformer
from gated_attn.nn.multihead import GatedMultiheadAttention

# B batch, S source tokens, T target tokens, D model width, H heads (even: torch's fast path serves no odd number), F feed-forward.
B, S, T, D, H, F = 3, 7, 5, 14, 2, 19
KINDS: dict[str, tuple[Any, Any]] = {
    "encoder": (nn.TransformerEncoderLayer, GatedEncoderLayer),
    "decoder": (nn.TransformerDecoderLayer, GatedDecoderLayer),
    "transformer": (nn.Transformer, GatedTransformer),
}
NO_GATES = {"encoder": {"gate": None}, "decoder": {"gate": None, "cross_gate": None}, "transformer": {"gate": None}}
CLOSED = -1e4


def sizes(kind: str) -> tuple[int, ...]:
    return (D, H, 2, 2, F) if kind == "transformer" else (D, H, F)


def build(cls: Any, kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="enable_nested_tensor is True"
        )  # torch's own, norm_first or odd heads
        return cls(*sizes(kind), **{"dropout": 0.0, "batch_first": True, **more})


def gated(kind: str, text: str | None = "output:elementwise,bias=0", **more: Any) -> nn.Module:
    gates = dict.fromkeys(NO_GATES[kind], text)
    return awake(build(KINDS[kind][1], kind, **gates, **more))


def awake(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "attn_gate" in name:
                parameter.normal_(std=5.0)
            elif name.endswith("bias"):
                parameter.normal_()
    return module


def shut(module: nn.Module) -> nn.Module:
    for gate in (m for m in module.modules() if isinstance(m, Gate)):
        for name, parameter in gate.named_parameters():
            nn.init.constant_(parameter, CLOSED if name.endswith("bias") else 0.0)
    return module


def attentions(module: nn.Module) -> list[GatedMultiheadAttention]:
    return [m for m in module.modules() if isinstance(m, GatedMultiheadAttention)]


def inputs(kind: str, batch_first: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    lengths = {"encoder": (S,), "decoder": (T, S), "transformer": (S, T)}[kind]
    return [torch.randn(*((B, n) if batch_first else (n, B)), D, dtype=dtype, requires_grad=True) for n in lengths]


def padding(length: int) -> Tensor:
    return torch.arange(length) >= torch.tensor([length, length - 2, 2])[:, None]


def later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def masks(kind: str, form: str) -> dict[str, Any]:
    """torch's masks, by argument name; no row is fully hidden."""
    prefixes = {"encoder": ("src",), "decoder": ("tgt", "memory"), "transformer": ("src", "tgt", "memory")}[kind]
    length = {"src": S, "tgt": T, "memory": S}
    chosen: dict[str, Any] = {}
    for prefix in prefixes:
        if "padding" in form:
            chosen[f"{prefix}_key_padding_mask"] = padding(length[prefix])
        if "causal" in form and prefix != "memory":
            chosen[f"{prefix}_mask"] = later(length[prefix])
        if "float" in form:
            columns, rows = length[prefix], T if prefix == "memory" else length[prefix]
            chosen[f"{prefix}_mask"] = torch.randn(rows, columns)
        if "hint" in form and prefix == "tgt":
            chosen["tgt_is_causal"] = True
    return chosen


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"norm_first": True}, {"bias": False}, {"activation": "gelu"}], ids=str)
def test_one_seed_gives_both_the_same_parameters(kind: str, more: dict[str, Any]) -> None:
    stock, ours = (
        build(cls, kind, **more, **extra) for cls, extra in zip(KINDS[kind], ({}, NO_GATES[kind]), strict=True)
    )
    assert list(stock.state_dict()) == list(ours.state_dict())
    for name, tensor in stock.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("form", ["none", "padding", "causal", "causal+hint", "float", "padding+causal"])
def test_forward_and_gradients_equal_torch(kind: str, norm_first: bool, batch_first: bool, form: str) -> None:
    stock, ours = (
        build(cls, kind, norm_first=norm_first, batch_first=batch_first, **extra)
        for cls, extra in zip(KINDS[kind], ({}, NO_GATES[kind]), strict=True)
    )
    awake(stock), ours.load_state_dict(stock.state_dict())
    exact = copy.deepcopy(stock).double()
    xs, mask, results = inputs(kind, batch_first), masks(kind, form), []
    for module, dtype in ((ours, torch.float32), (stock, torch.float32), (exact, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in xs]
        given = {n: m.to(dtype) if isinstance(m, Tensor) and m.is_floating_point() else m for n, m in mask.items()}
        out = module(*leaves, **given)
        direction = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        grads = torch.autograd.grad((out * direction).sum(), [*leaves, *module.parameters()])
        results.append([t.detach() for t in (out, *grads)])
    for got, reference, truth in zip(*results, strict=True):
        one_rounding = torch.finfo(torch.float32).eps * float(truth.abs().max())
        assert float((got - truth).abs().max()) <= 2 * float((reference - truth).abs().max()) + 2 * one_rounding


@pytest.mark.parametrize("kind", KINDS)
def test_single_samples_equal_torch(kind: str) -> None:
    stock, ours = (build(cls, kind, **extra) for cls, extra in zip(KINDS[kind], ({}, NO_GATES[kind]), strict=True))
    xs = [x[0] for x in inputs(kind)]
    torch.testing.assert_close(ours(*xs), stock(*xs))


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_adds_the_gates_only(kind: str) -> None:
    stock, ours = build(KINDS[kind][0], kind), build(KINDS[kind][1], kind)
    report = ours.load_state_dict(stock.state_dict(), strict=False)
    assert report.unexpected_keys == []
    assert len(report.missing_keys) == len(attentions(ours)) == {"encoder": 1, "decoder": 2, "transformer": 6}[kind]
    assert all(".attn_gate." in key for key in report.missing_keys)


MODES = {"train": nullcontext, "eval": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True])
def test_shut_gates_shut_every_attention_in_every_mode(kind: str, norm_first: bool, mode: str, padded: bool) -> None:
    module = shut(gated(kind, norm_first=norm_first)).train(mode == "train")
    seen: list[bool] = []
    for attention in attentions(module):
        forward = attention.forward  # counted here, since a hook would itself switch torch's fast path off

        def watched(
            *args: Any, _forward: Callable[..., Any] = forward, _bias: Tensor = attention.out_proj.bias, **kwargs: Any
        ) -> Any:
            out = _forward(*args, **kwargs)
            seen.append(torch.equal(out[0], _bias.expand_as(out[0])))
            return out

        attention.forward = watched  # type: ignore[method-assign]
    with MODES[mode]():
        module(*inputs(kind), **masks(kind, "padding" if padded else "none"))
    assert seen == [True] * len(attentions(module))


@pytest.mark.parametrize("kind", KINDS)
def test_one_answer_in_every_mode(kind: str) -> None:
    module, xs, mask = gated(kind), inputs(kind), masks(kind, "padding")
    expected = module(*xs, **mask)
    module.eval()
    for mode in MODES.values():
        with mode():
            torch.testing.assert_close(module(*xs, **mask), expected)


def test_stock_encoder_around_our_layer_skips_nothing() -> None:
    layer = gated("encoder")
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x, hidden = inputs("encoder")[0].detach(), padding(S)
    expected = encoder(x, src_key_padding_mask=hidden)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x, src_key_padding_mask=hidden), expected)
    shut(encoder)
    with torch.no_grad():
        assert not torch.allclose(encoder(x, src_key_padding_mask=hidden), expected)


@pytest.mark.parametrize(
    "text", ["output:elementwise", "value:headwise", "output:headwise,source=lse", "weights:pairwise"]
)
def test_padding_says_nothing(text: str) -> None:
    module = gated("transformer", text)
    src, tgt = (x.detach() for x in inputs("transformer"))
    together = module(src, tgt, **masks("transformer", "padding+causal"))
    for i in range(B):
        n_src, n_tgt = int((~padding(S)[i]).sum()), int((~padding(T)[i]).sum())
        alone = module(src[i : i + 1, :n_src], tgt[i : i + 1, :n_tgt], tgt_mask=later(n_tgt), src_mask=later(n_src))
        torch.testing.assert_close(together[i, :n_tgt], alone[0])
    loud = [x.masked_fill(padding(x.shape[1])[..., None], 1e3) for x in (src, tgt)]
    again = module(*loud, **masks("transformer", "padding+causal"))
    torch.testing.assert_close(again[~padding(T)], together[~padding(T)])


@pytest.mark.parametrize("mode", MODES)
def test_a_fully_padded_source_gives_no_nan(mode: str) -> None:
    module = gated("transformer").train(mode == "train")
    src, tgt = inputs("transformer")
    hidden = padding(S)
    hidden[1] = True
    with MODES[mode]():
        out = module(src, tgt, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
    assert out.isfinite().all()
    if mode in ("train", "eval"):
        others = torch.tensor([0, 2])
        direction = torch.randn(2, T, D)
        got = torch.autograd.grad((out[others] * direction).sum(), list(module.parameters()))
        kept = module(
            src[others], tgt[others], src_key_padding_mask=hidden[others], memory_key_padding_mask=hidden[others]
        )
        for a, b in zip(got, torch.autograd.grad((kept * direction).sum(), list(module.parameters())), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_causal_hint_alone_is_the_mask() -> None:
    module = gated("transformer")
    src, tgt = inputs("transformer")
    expected = module(src, tgt, tgt_mask=later(T))
    torch.testing.assert_close(module(src, tgt, tgt_is_causal=True), expected)
    additive = torch.zeros(T, T).masked_fill(later(T), -math.inf)
    torch.testing.assert_close(module(src, tgt, tgt_mask=additive), expected)


def test_each_attention_gets_its_own_gate() -> None:
    gate = {"encoder": "paper-headwise,layers=1", "cross": "output:shared"}
    module = build(GatedTransformer, "transformer", gate=gate)
    found = [str(a.attn_gate.spec) if a.attn_gate is not None else None for a in attentions(module)]
    encoder = str(GatedMultiheadAttention(D, H, gate=gate["encoder"]).attn_gate.spec)
    assert found == [None, encoder, None, "output:shared:sigmoid", None, "output:shared:sigmoid"]
    module(*inputs("transformer")).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_gates_keep_the_start_that_their_spec_names() -> None:
    stock = build(nn.Transformer, "transformer")
    identity = build(GatedTransformer, "transformer", gate="identity")
    identity.load_state_dict(stock.state_dict(), strict=False)
    xs = inputs("transformer")
    torch.testing.assert_close(identity(*xs), stock(*xs))
    random = build(GatedTransformer, "transformer", gate="output:elementwise,std=0.5")
    weights = [a.attn_gate.proj.weight for a in attentions(random)]
    assert all(0.4 < float(w.detach().std()) < 0.6 for w in weights)
    assert not any(
        torch.equal(weights[0], w) for w in weights[1:]
    )  # torch's stacks are copies of one layer; gates start apart


def test_custom_stacks_are_used_as_they_come() -> None:
    encoder = nn.TransformerEncoder(
        build(GatedEncoderLayer, "encoder", gate="value:headwise"), 1, enable_nested_tensor=False
    )
    module = build(GatedTransformer, "transformer", custom_encoder=encoder, gate=None)
    assert [a.attn_gate is not None for a in attentions(module)] == [True, False, False, False, False]


def test_unknown_places_are_named() -> None:
    with pytest.raises(SpecError, match="no place 'memory'; legal: encoder, decoder, cross"):
        GatedTransformer(D, H, gate={"memory": "paper"})
    with pytest.raises(SpecError, match="sideways"):
        GatedEncoderLayer(D, H, gate="sideways:headwise")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_equals_eager(kind: str) -> None:
    module, xs, mask = gated(kind), inputs(kind), masks(kind, "padding+causal")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    out, eager = compiled(*xs, **mask), module(*xs, **mask)
    torch.testing.assert_close(out, eager)
    for got, want in zip(torch.autograd.grad(out.sum(), xs), torch.autograd.grad(eager.sum(), xs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_every_length(kind: str) -> None:
    module = gated(kind)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for more in (0, 4, 9):
        xs = [torch.randn(B + more, x.shape[1] + more, D) for x in inputs(kind)]
        torch.testing.assert_close(compiled(*xs), module(*xs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch imports its own
def test_inductor_equals_eager(kind: str) -> None:
    module, xs, mask = gated(kind), inputs(kind), masks(kind, "padding+causal")
    torch.testing.assert_close(torch.compile(module, fullgraph=True)(*xs, **mask), module(*xs, **mask))


@pytest.mark.parametrize("kind", KINDS)
def test_exported_serves_other_sizes(kind: str) -> None:
    module = gated(kind).eval()
    batch, source, target = (torch.export.Dim(name) for name in ("batch", "source", "target"))
    lengths = {"encoder": (source,), "decoder": (target, source), "transformer": (source, target)}[kind]
    name = "memory_key_padding_mask" if kind != "encoder" else "src_key_padding_mask"
    names = {"encoder": ("src",), "decoder": ("tgt", "memory"), "transformer": ("src", "tgt")}[kind]
    shapes = {n: {0: batch, 1: length} for n, length in zip(names, lengths, strict=True)} | {
        name: {0: batch, 1: source}
    }
    xs = [x.detach() for x in inputs(kind)]
    exported = torch.export.export(module, tuple(xs), {name: padding(S)}, dynamic_shapes=shapes).module()
    xs = [torch.randn(2, 11 if length is source else 13, D) for length in lengths]
    hidden = torch.arange(11) >= torch.tensor([4, 0])[:, None]
    torch.testing.assert_close(exported(*xs, **{name: hidden}), module(*xs, **{name: hidden}))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_changes_nothing(kind: str) -> None:
    module, xs, mask = gated(kind), inputs(kind), masks(kind, "padding")
    parameters = [*xs, *module.parameters()]
    plain = torch.autograd.grad(module(*xs, **mask).square().sum(), parameters)
    again = torch.autograd.grad(checkpoint(module, *xs, use_reentrant=False, **mask).square().sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_trains_in_low_precision(kind: str, dtype: torch.dtype) -> None:
    module, xs = build(KINDS[kind][1], kind), inputs(kind)
    full = module(*xs).detach()
    with torch.autocast("cpu", dtype):
        out = module(*xs, **masks(kind, "none"))
    low = copy.deepcopy(module).to(dtype)(*(x.to(dtype) for x in xs)).float().detach()
    error = float((out.detach().float() - full).abs().max())
    assert error <= 2 * float((low - full).abs().max()) + torch.finfo(dtype).eps * float(full.abs().max())
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_per_sample_gradients_with_vmap(kind: str) -> None:
    module, xs = gated(kind, impl="reference").double(), [x.detach().double() for x in inputs(kind)]
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, tuple(x[None] for x in sample)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, *(0 for _ in xs)))(parameters, *xs)
    for sample in range(B):
        one = torch.func.grad(loss)(parameters, *(x[sample] for x in xs))
        for name, gradient in one.items():
            torch.testing.assert_close(each[name][sample], gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_whole_and_apart(kind: str) -> None:
    module, xs = gated(kind), inputs(kind)
    before = module(*xs)
    assert torch.equal(pickle.loads(pickle.dumps(module))(*xs), before)
    twin = shut(copy.deepcopy(module))
    assert not torch.allclose(twin(*xs), before)
    assert torch.equal(module(*xs), before)
