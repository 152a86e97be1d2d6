"""`GatedAttention` beyond the laws: cross attention, caches, errors, precision, and each option doing what it says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gated_attn.errors import ShapeError, SpecError, UnsupportedError
from gated_attn.nn import GatedAttention, KVCache, Rope
from gated_attn.nn.attention import positions_in_documents

DIM, HEADS, KV, WIDTH = 23, 6, 3, 10
GATES = [
    "none", "paper", "paper-headwise", "output:headwise,source=query", "value:headwise", "key:elementwise",
    "dense:elementwise", "weights:pairwise", "sink,sink_key,fill",
]  # fmt: skip


def make(gate: str = "paper", **options: Any) -> GatedAttention:
    torch.manual_seed(7)
    attn = GatedAttention(DIM, HEADS, **{"kv_heads": KV, "head_dim": WIDTH, "gate": gate, **options})
    for parameter in [] if attn.attn_gate is None else attn.attn_gate.parameters():
        torch.nn.init.normal_(parameter, std=5 * parameter.shape[-1] ** -0.5)
    return attn


def test_without_a_gate_it_is_plain_grouped_attention() -> None:
    attn, x = make("none", causal=True, bias=True, rope=None).double(), torch.randn(2, 7, DIM, dtype=torch.float64)
    q = attn.q_proj(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    k, v = (p(x).unflatten(-1, (KV, WIDTH)).transpose(1, 2).repeat_interleave(2, 1) for p in (attn.k_proj, attn.v_proj))
    want = attn.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    assert (attn(x) - want).abs().max() < 1e-12


def test_the_papers_gate_by_hand() -> None:
    attn, x = make("paper", causal=True).double(), torch.randn(2, 7, DIM, dtype=torch.float64)
    bare = make("none", causal=True).double()
    bare.load_state_dict({name: value for name, value in attn.state_dict().items() if "attn_gate" not in name})
    bare.out_proj = torch.nn.Identity()
    assert attn.attn_gate is not None
    gate = torch.sigmoid(x @ attn.attn_gate.proj.weight.T)
    assert (attn(x) - attn.out_proj(gate * bare(x))).abs().max() < 1e-12


@pytest.mark.parametrize("gate", [g for g in GATES if g != "weights:pairwise"])
def test_in_cross_attention_the_gate_reads_the_query_side(gate: str) -> None:
    attn = make(gate, kv_dim=17)
    x, memory = torch.randn(2, 5, DIM), torch.randn(2, 9, 17)
    out = attn(x, memory)
    assert out.shape == (2, 5, DIM)
    if attn.attn_gate is None or gate.startswith(("sink", "value", "key")):
        return
    seen: list[torch.Tensor] = []
    attn.attn_gate.register_forward_hook(lambda module, args, value: seen.append(value))
    attn(x, memory)
    attn(x, 3 * memory.flip(1))
    assert torch.equal(seen[0], seen[1]), "changing the memory changed the gate"
    assert seen[0].shape[1] == 5


def test_a_memorys_cache_is_computed_once() -> None:
    attn = make("value:headwise", kv_dim=17)
    x, memory = torch.randn(2, 5, DIM), torch.randn(2, 9, 17)
    whole = attn(x, memory)
    out, cache = attn(x[:, :2], memory, cache=KVCache())
    assert cache.length == 9
    again, same = attn(x[:, 2:], torch.full_like(memory, torch.nan), cache=cache)
    assert same is cache
    assert (torch.cat([out, again], 1) - whole).abs().max() < 1e-5


@pytest.mark.parametrize("gate", GATES)
def test_one_prefix_continues_in_several_ways(gate: str) -> None:
    attn = make(gate, causal=True, rope=Rope(WIDTH)).double()
    x = torch.randn(1, 6, DIM, dtype=torch.float64)
    _, prefix = attn(x[:, :4], cache=KVCache())
    first, _ = attn(x[:, 4:5], cache=prefix)
    attn(x[:, 5:6], cache=prefix)
    again, longer = attn(x[:, 4:5], cache=prefix)
    assert torch.equal(first, again)
    assert (prefix.length, longer.length) == (4, 5)


def test_a_cached_step_with_documents_counts_positions_within_them() -> None:
    attn = make("output:headwise,source=query", causal=True, rope=Rope(WIDTH)).double()
    x, docs = torch.randn(1, 9, DIM, dtype=torch.float64), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    whole, cache, parts = attn(x, doc_ids=docs), KVCache(), []
    for end in (3, 5, 6, 9):
        out, cache = attn(x[:, cache.length : end], doc_ids=docs[:, :end], cache=cache)
        parts.append(out)
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-12


def test_positions_start_anew_in_each_document() -> None:
    assert positions_in_documents(torch.tensor([[5, 5, 2, 2, 2, 5]])).tolist() == [[0, 1, 0, 1, 2, 0]]
    assert positions_in_documents(torch.zeros(2, 3, dtype=torch.long)).tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("gate", GATES)
def test_empty_sequences_give_empty_outputs(gate: str, batch: int, tokens: int) -> None:
    attn = make(gate, causal=True, rope=Rope(WIDTH), qk_norm=True)
    out, cache = attn(torch.randn(batch, tokens, DIM), cache=KVCache())
    assert out.shape == (batch, tokens, DIM)
    assert cache.length == tokens
    assert torch.isfinite(out).all()
    attn(torch.randn(batch, tokens, DIM)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", GATES)
def test_autocast_trains_with_float32_weights(gate: str, dtype: torch.dtype) -> None:
    attn, x = make(gate, causal=True, rope=Rope(WIDTH), qk_norm=True), torch.randn(2, 7, DIM)
    exact = attn(x)
    with torch.autocast("cpu", dtype):
        out = attn(x)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in attn.parameters())
    with torch.no_grad():
        plain = (copy.deepcopy(attn).to(dtype)(x.to(dtype)).float() - exact).abs().max()
        rounding = torch.finfo(dtype).eps * exact.abs().max()
        assert (out.float() - exact).abs().max() <= 2 * plain + rounding


@pytest.mark.parametrize("gate", GATES)
def test_low_precision_modules_run(gate: str) -> None:
    attn = make(gate, causal=True, rope=Rope(WIDTH), dtype=torch.bfloat16)
    out = attn(torch.randn(2, 7, DIM, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()


def test_dropout_is_for_training_only() -> None:
    attn, x = make("paper", dropout=0.5), torch.randn(2, 7, DIM)
    assert not torch.equal(attn(x), attn(x))
    attn.eval()
    assert torch.equal(attn(x), attn(x))


def test_a_named_impl_serves_or_raises() -> None:
    attn, x = make("paper", impl="flex", causal=True), torch.randn(2, 7, DIM)
    with pytest.raises(UnsupportedError, match="no backward pass on the CPU"):
        attn(x)
    with torch.no_grad():
        assert (attn(x) - make("paper", impl="sdpa", causal=True)(x)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 5}, ShapeError, "width 23 does not divide into 5 heads; pass head_dim"),
        ({"heads": 0}, ShapeError, "0 heads"),
        ({"kv_heads": 4, "head_dim": 8}, ShapeError, "6 heads cannot share 4 key/value heads"),
        (
            {"head_dim": 10, "rope": Rope(8)},
            ShapeError,
            r"rope is for heads of width 8, and these have 10; pass Rope\(10",
        ),
        ({"head_dim": 8, "gate": "paper,source=latent"}, SpecError, "pass q_latent_dim or use source=hidden"),
        ({"head_dim": 8, "gate": "papr"}, SpecError, "papr"),
        ({"head_dim": 8, "gate": 1.0}, SpecError, "not 1.0"),
        ({"head_dim": 8, "impl": "sdpaa"}, UnsupportedError, "unknown impl 'sdpaa'.*did you mean 'sdpa'"),
        ({"head_dim": 8, "window": 0}, ShapeError, "window=0"),
        ({"head_dim": 8, "window": 2.5}, ShapeError, "window=2.5"),
        ({"head_dim": 8, "dropout": 1.0}, ShapeError, "dropout=1.0"),
    ],
)
def test_impossible_modules(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GatedAttention(DIM, **{"heads": HEADS, **options})


def test_impossible_calls() -> None:
    with pytest.raises(ShapeError, match=r"x of shape \(2, 5, 24\); this attention takes \(batch, tokens, 23\)"):
        make()(torch.randn(2, 5, 24))
    with pytest.raises(ShapeError, match=r"x of shape \(5, 23\)"):
        make()(torch.randn(5, 23))
    with pytest.raises(ShapeError, match=r"memory of shape \(2, 5, 23\); this attention takes \(batch, tokens, 17\)"):
        make(kv_dim=17)(torch.randn(2, 5, 23), torch.randn(2, 5, 23))
    with pytest.raises(ShapeError, match="pass the memory"):
        make(kv_dim=17)(torch.randn(2, 5, 23))
    with pytest.raises(ShapeError, match="causal=True and window=None have no meaning over a memory"):
        make(causal=True)(torch.randn(2, 5, 23), torch.randn(2, 5, 23))
    with pytest.raises(ShapeError, match="causal=False and window=3 have no meaning over a memory"):
        make(window=3)(torch.randn(2, 5, 23), torch.randn(2, 5, 23))
    x = torch.randn(2, 5, 23)
    for positions in (torch.arange(5), torch.zeros(2, 1, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long)):
        with pytest.raises(
            ShapeError, match=r"positions of shape .* for x of shape \(2, 5, 23\); pass one per new token, \(2, 5\) or"
        ):
            make(rope=Rope(WIDTH))(x, positions=positions)
    with pytest.raises(ShapeError, match=r"doc_ids of shape \(2, 4\) for 0 cached and 5 new tokens"):
        make()(x, doc_ids=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ShapeError, match="over a memory pass a mask"):
        make()(x, x, positions=torch.arange(5)[None])
    with pytest.raises(UnsupportedError, match="use source=hidden"):
        make("value:headwise,source=latent", q_latent_dim=7)(torch.randn(2, 5, 23), torch.randn(2, 5, 23))


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_inductor_gives_the_same_numbers(gate: str) -> None:
    torch._dynamo.reset()
    attn, x = make(gate, causal=True, rope=Rope(WIDTH)), torch.randn(2, 7, DIM)
    compiled = torch.compile(attn, fullgraph=True)
    assert (compiled(x) - attn(x)).abs().max() < 1e-5
    counter = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for tokens in (7, 7, 9, 11, 13):
        x = torch.randn(2, tokens, DIM)
        assert (compiled(x) - attn(x)).abs().max() < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - counter <= 1, "one more graph, for any length"
