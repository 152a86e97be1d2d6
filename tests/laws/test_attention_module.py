"""Laws 1 to 3 for `GatedAttention`: one answer on every path, the gate on every path, gates awake.

In float64, so that two paths agree to a few roundings or not at all. Sizes: 1 < KV heads < heads, lengths and widths odd.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gated_attn.attention import PairLogits, Sink
from gated_attn.gate import Gate
from gated_attn.nn import GatedAttention, KVCache, Rope

DIM, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 23, 6, 3, 10, 13
CLOSE = 1e-11

SPECS = [
    "none",
    "output:headwise:sigmoid",
    "output:elementwise:sigmoid,bias=-2",
    "output:shared:hardsigmoid,bias=1",
    "output:headwise:2sigmoid,in=5",
    "output:elementwise:nssigmoid,rank=3",
    "output:elementwise:softplus,fill",
    "output:headwise:silu,op=add",
    "output:headwise:sigmoid,top_k=2",
    "output:elementwise:tanh,top_k=7",
    "output:headwise:sigmoid,source=query,bias=0",
    "output:elementwise:sigmoid,source=query,rank=3",
    "output:elementwise:sigmoid,source=latent",
    "output:headwise:linear,source=constant,bias=0.5",
    "output:headwise:sigmoid,source=lse",
    "output:headwise:sigmoid,source=lse,bias=1,fill,sink_key",
    "weights:headwise:sigmoid",
    "weights:pairwise:sigmoid,bias=1",
    "weights:pairwise:hardsigmoid,rank=3",
    "value:headwise:sigmoid",
    "value:elementwise:sigmoid,fill",
    "key:headwise:softplus",
    "key:elementwise:2sigmoid",
    "query:headwise:sigmoid",
    "query:elementwise:sigmoid,source=query",
    "dense:headwise:sigmoid",
    "dense:elementwise:sigmoid,bias=none",
]
DIFFERENT = [SPECS[i] for i in (0, 1, 3, 6, 8, 10, 14, 15, 17, 19, 25)]
TRACED = [pytest.param(spec, marks=() if spec in DIFFERENT else pytest.mark.slow) for spec in SPECS]
"""Every spec; those whose graphs differ from each other always, the others, which take minutes, with the slow tests."""


def build(spec: str, std: float = 5.0, **options: object) -> GatedAttention:
    torch.manual_seed(11)
    latent = 7 if "latent" in spec else None
    attn = GatedAttention(
        DIM, HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, gate=spec, qk_norm=True, rope=Rope(HEAD_DIM), bias=True, causal=True,
        q_latent_dim=latent, dtype=torch.float64, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    wake(attn, std)
    return attn


def wake(attn: GatedAttention, std: float) -> None:
    for parameter in [] if attn.attn_gate is None else attn.attn_gate.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std * parameter.shape[-1] ** -0.5)


def inputs(batch: int = 3, tokens: int = TOKENS) -> Tensor:
    return torch.randn(batch, tokens, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def gradients(attn: GatedAttention, out: Tensor, weight: Tensor) -> dict[str, Tensor]:
    attn.zero_grad()
    (out * weight).sum().backward()
    return {name: p.grad.clone() for name, p in attn.named_parameters() if p.grad is not None}


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    got, want = got.detach(), want.detach()
    assert (got - want).abs().max() <= CLOSE * max(1.0, float(want.abs().max()))


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_close(got[name], want[name])


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("std", [0.0, 1.0, 5.0])
def test_alone_equals_batched(spec: str, std: float) -> None:
    attn, x = build(spec, std), inputs()
    together = attn(x)
    for row in range(len(x)):
        assert_close(attn(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(spec: str, side: str) -> None:
    attn, x = build(spec), inputs()
    short = x[:1, :8]
    weight = torch.randn(1, 8, DIM, dtype=torch.float64)
    want = gradients(attn, attn(short), weight)
    junk = 100 * torch.randn(1, 5, DIM, dtype=torch.float64)
    padded = torch.cat([junk, short] if side == "left" else [short, junk], 1)
    real = slice(5, None) if side == "left" else slice(None, 8)
    keep = torch.zeros(1, 1, 1, 13, dtype=torch.bool)
    keep[..., real] = True
    positions = (torch.arange(13) - (5 if side == "left" else 0)).clamp(min=0)[None]
    out = attn(padded, mask=keep, positions=positions)[:, real]
    assert_close(out, attn(short))
    assert_same_gradients(gradients(attn, out, weight), want)


def test_packed_documents_equal_each_alone(spec: str) -> None:
    attn, x = build(spec), inputs(batch=1, tokens=14)
    lengths = [5, 1, 1, 7]
    doc_ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    weight = torch.randn(1, 14, DIM, dtype=torch.float64)
    packed = attn(x, doc_ids=doc_ids)
    alone = torch.cat([attn(part) for part in x.split(lengths, 1)], 1)
    assert_close(packed, alone)
    assert_same_gradients(gradients(attn, packed, weight), gradients(attn, alone, weight))


@pytest.mark.parametrize("window", [None, 4])
def test_chunks_through_the_cache_equal_one_pass(spec: str, window: int | None) -> None:
    attn, x = build(spec, window=window), inputs()
    cache, parts = KVCache(), []
    for part in x.split([5, 3, 1, 1, 1, 2], 1):
        out, cache = attn(part, cache=cache)
        parts.append(out)
    assert cache.length == TOKENS
    assert_close(torch.cat(parts, 1), attn(x))


def test_window_and_future_hide_what_they_should(spec: str) -> None:
    attn, x = build(spec, window=4), inputs()
    changed = x.clone()
    changed[:, 5] += 1.0
    moved = (attn(changed) - attn(x)).abs().amax((0, 2)) > 1e-9
    assert not moved[:5].any(), "an earlier token saw a later one"
    assert not moved[9:].any(), "a token saw past its window"
    assert moved[5]


def test_train_mode_without_dropout_equals_eval_mode(spec: str) -> None:
    attn, x = build(spec), inputs()
    assert torch.equal(attn.train()(x), attn.eval()(x))


def test_checkpointed_gradients_are_the_same(spec: str) -> None:
    attn, x = build(spec), inputs()
    weight = torch.randn(3, TOKENS, DIM, dtype=torch.float64)
    want = gradients(attn, attn(x), weight)
    assert_same_gradients(gradients(attn, checkpoint(attn, x, use_reentrant=False), weight), want)


def test_reference_and_sdpa_agree(spec: str) -> None:
    reference, fast, x = build(spec, impl="reference"), build(spec, impl="sdpa"), inputs()
    weight = torch.randn(3, TOKENS, DIM, dtype=torch.float64)
    a, b = reference(x), fast(x)
    assert_close(b, a)
    assert_same_gradients(gradients(fast, b, weight), gradients(reference, a, weight))


def test_every_parameter_learns(spec: str) -> None:
    attn, x = build(spec, std=1.0), inputs()
    found = gradients(attn, attn(x), torch.randn(3, TOKENS, DIM, dtype=torch.float64))
    for name, _ in attn.named_parameters():
        assert name in found, f"{name} got no gradient"
        assert found[name].abs().max() > 0, f"{name} has gradient 0"


def test_copies_are_independent(spec: str) -> None:
    attn, x = build(spec), inputs()
    before = attn(x)
    twin = copy.deepcopy(attn)
    again = pickle.loads(pickle.dumps(attn))
    assert torch.equal(twin(x), before)
    assert torch.equal(again(x), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(attn(x), before)


@pytest.mark.parametrize("spec", TRACED)
def test_compiled_equals_eager(spec: str) -> None:
    torch._dynamo.reset()
    attn, x = build(spec), inputs()
    weight = torch.randn(3, TOKENS, DIM, dtype=torch.float64)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    assert_close(out, attn(x))
    assert_same_gradients(gradients(attn, out, weight), gradients(attn, attn(x), weight))


@pytest.mark.parametrize("spec", TRACED)
def test_one_graph_serves_every_length(spec: str) -> None:
    torch._dynamo.reset()
    attn = build(spec)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager", dynamic=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for batch, tokens in ((3, 13), (2, 17), (5, 29)):
        x = inputs(batch, tokens)
        assert_close(compiled(x), attn(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.parametrize("spec", TRACED)
def test_exported_with_dynamic_sizes_equals_eager(spec: str) -> None:
    attn, x = build(spec).eval(), inputs()
    keep = torch.ones(3, 1, 1, TOKENS, dtype=torch.bool)
    batch, tokens = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("tokens", min=2, max=512)
    shapes = {"x_BTD": {0: batch, 1: tokens}, "memory_BSD": None, "mask": {0: batch, 3: tokens}}
    program = torch.export.export(attn, (x, None), {"mask": keep}, dynamic_shapes=shapes)
    other = inputs(batch=2, tokens=29)
    keep = torch.rand(2, 1, 1, 29) > 0.3
    assert_close(program.module()(other, None, mask=keep), attn(other, mask=keep))


def _shut(gate: Gate) -> None:
    """Make the module give a gate that is exactly 0, in whichever form its spec has."""
    whole = gate.forward

    def forward(x: Tensor, key_BSKE: Tensor | None = None) -> Tensor | Sink | PairLogits:
        value = whole(x, key_BSKE)
        if isinstance(value, Sink):
            return Sink(value.logit_H + 1e6, None)
        if isinstance(value, PairLogits):
            return PairLogits(
                0 * value.query_BTHR, 0 * value.key_BSKR, value.query_BTHR.new_full((1,), -1e9), value.activation
            )
        return torch.zeros_like(value)

    gate.forward = forward  # type: ignore[method-assign,assignment]


SHUTTABLE = [
    s for s in SPECS if s.split(":")[0] in ("output", "value", "weights") and "add" not in s and "fill" not in s
]


@pytest.mark.parametrize("tokens", [1, 2, TOKENS, 127, 128, 129])
@pytest.mark.parametrize("spec", SHUTTABLE)
def test_a_shut_gate_leaves_the_out_projections_bias(spec: str, tokens: int) -> None:
    attn, x = build(spec), inputs(batch=2, tokens=tokens)
    assert attn.attn_gate is not None
    _shut(attn.attn_gate)
    bias = attn.out_proj.bias.expand(2, tokens, DIM)
    for impl in ("reference", "sdpa"):
        attn.impl = impl
        for mode in (attn.train(), attn.eval()):
            assert torch.equal(mode(x), bias)
            assert torch.equal(mode(x, cache=KVCache())[0], bias)
            assert torch.equal(checkpoint(mode, x, use_reentrant=False), bias)
            with torch.inference_mode():
                assert torch.equal(mode(x), bias)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.startswith("dense")])
def test_a_shut_dense_gate_leaves_nothing(spec: str) -> None:
    attn, x = build(spec), inputs()
    assert attn.attn_gate is not None
    _shut(attn.attn_gate)
    assert torch.equal(attn(x), torch.zeros_like(x))
