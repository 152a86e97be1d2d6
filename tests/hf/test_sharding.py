"""Sharding plans: the ranks' pieces give what the whole model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

transformers = pytest.importorskip("transformers")

from gated_attn.errors import ShapeError, UnsupportedError  # noqa: E402
from gated_attn.gate import Gate  # noqa: E402
from gated_attn.hf.attach import attach  # noqa: E402
from gated_attn.hf.sharding import Shard, head_range, sharding_plan  # noqa: E402
from gated_attn.nn.attention import GatedAttention  # noqa: E402
from gated_attn.nn.multihead import GatedMultiheadAttention  # noqa: E402
from tests.hf.builders import (  # noqa: E402
    ELEMENTWISE,
    FAMILIES,
    HEADWISE,
    llama,
    ours,
    qwen3_5,
    wake,
)

# peft 0.21 still reads a name that transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


SPECS = [
    "output:headwise,std=1", "output:elementwise:2sigmoid,std=1,bias=0.2", "output:shared,std=1", "value:headwise,std=1,bias=1",
    "value:elementwise,std=1,fill", "key:elementwise:2sigmoid,std=1", "query:headwise:silu,std=1", "dense:elementwise,std=1",
    "output:elementwise,rank=3,std=1", "output:headwise,source=query,std=1", "output:elementwise,source=constant",
    "output:headwise,source=lse,bias=0.4,sink_key,std=1", "output:headwise,std=1,fill", "weights:pairwise,std=1,bias=0.3",
    "output:elementwise,top_k=3,std=1",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("H", "KV", "tp"), [(8, 2, 4), (8, 4, 2), (6, 3, 3)])
def test_the_shards_of_ours_add_up_to_the_whole(spec: str, H: int, KV: int, tp: int) -> None:
    """the ranks' outputs and gradients, against one device, to 1e-6 (float64)."""
    D, E = 23, 5
    kind = {"head_dim": E, "bias": True, "qk_norm": True, "causal": True, "dtype": torch.float64}
    module = GatedAttention(D, H, kv_heads=KV, gate=spec, **kind)
    wake(module)
    dense = spec.startswith("dense")
    local = GatedAttention(D, H // tp, kv_heads=max(KV // tp, 1), gate=None if dense else spec, **kind)
    x = torch.randn(2, 7, D, dtype=torch.float64)
    weight = torch.randn(2, 7, D, dtype=torch.float64)
    whole = module(x)
    (whole * weight).sum().backward()
    plan = sharding_plan(module, tp)
    assert list(plan) == [name for name, _ in module.named_parameters()]
    pieces = [
        {n: plan[n].take(p.detach(), rank).clone().requires_grad_() for n, p in module.named_parameters()}
        for rank in range(tp)
    ]
    late = {"out_proj.bias": None}
    outs = []
    for mine in pieces:
        own = {n: p for n, p in mine.items() if not (dense and n.startswith("attn_gate"))}
        own["out_proj.bias"] = torch.zeros(D, dtype=torch.float64)
        outs.append(functional_call(local, own, (x,)))
    total = torch.stack(outs).sum(0) + pieces[0]["out_proj.bias"]
    if dense:
        gate = {n.removeprefix("attn_gate."): p for n, p in pieces[0].items() if n.startswith("attn_gate")}
        g = functional_call(module.attn_gate, gate, (x,))
        total = (total[:, :, None] * g).squeeze(2)
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-6)
    (total * weight).sum().backward()
    for name, parameter in module.named_parameters():
        grads = [torch.zeros_like(p[name]) if p[name].grad is None else p[name].grad for p in pieces]
        assert torch.equal(plan[name].join([p[name].detach() for p in pieces]), parameter.detach()), name
        if name in late or (dense and name.startswith("attn_gate")):
            grads = grads[:1] * tp
        torch.testing.assert_close(plan[name].join(grads, gradients=True), parameter.grad, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("spec", [HEADWISE, ELEMENTWISE, "value:headwise,std=1", "query:elementwise,std=1"])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_the_shards_of_transformers_models_add_up(family: str, spec: str) -> None:
    H, KV, tp = 8, 2, 4

    def make(heads: int, kv: int) -> nn.Module:
        sizes: dict[str, Any] = {
            "hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": heads,
            "num_key_value_heads": kv, "head_dim": 6, "vocab_size": 61, "pad_token_id": 0,
        }  # fmt: skip
        name = {"llama": "Llama", "phi3": "Phi3", "qwen3": "Qwen3"}[family]
        config = getattr(transformers, f"{name}Config")(**sizes)
        return attach(getattr(transformers, f"{name}ForCausalLM")(config), spec).double()

    model, local = make(H, KV), make(H // tp, 1)
    wake(model)
    prefix = "model.layers.0.self_attn."
    plan = {n.removeprefix(prefix): shard for n, shard in sharding_plan(model, tp).items() if n.startswith(prefix)}
    attention, mine = model.get_submodule(prefix[:-1]), local.get_submodule(prefix[:-1])
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    rotary = model.model.rotary_emb(x, torch.arange(5)[None])
    whole = attention(hidden_states=x, position_embeddings=rotary, attention_mask=None)[0]
    whole.square().sum().backward()
    pieces = [
        {n: plan[n].take(p.detach(), rank).clone().requires_grad_() for n, p in attention.named_parameters()}
        for rank in range(tp)
    ]
    call = {"hidden_states": x, "position_embeddings": rotary, "attention_mask": None}
    total = torch.stack([functional_call(mine, piece, (), call)[0] for piece in pieces]).sum(0)
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-6)
    total.square().sum().backward()
    for name, parameter in attention.named_parameters():
        full = plan[name].join([piece[name].grad for piece in pieces], gradients=True)
        torch.testing.assert_close(
            full, parameter.grad, rtol=0, atol=1e-6 * float(parameter.grad.abs().max() + 1), msg=name
        )


@pytest.mark.parametrize("family", [*FAMILIES, "ours", "qwen3_5", "multihead"])
def test_a_plan_names_every_parameter_once(family: str) -> None:
    special = {"ours": ours, "qwen3_5": qwen3_5, "multihead": lambda: GatedMultiheadAttention(44, 4, gate=ELEMENTWISE)}
    model = special.get(family, lambda: attach(FAMILIES[family](), ELEMENTWISE))()
    plan = sharding_plan(model, 2)
    assert list(plan) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        pieces = [plan[name].take(parameter, rank) for rank in range(2)]
        assert torch.equal(plan[name].join(pieces), parameter)
        cut = plan[name].axis is not None
        assert pieces[0].numel() == parameter.numel() // (2 if cut else 1)
    assert {"colwise", "rowwise", "replicated"} == {shard.kind for shard in plan.values()} | {"replicated"}


def test_a_gate_lies_with_its_heads() -> None:
    plan = sharding_plan(attach(llama(hidden_size=48, num_attention_heads=8), HEADWISE), 4)
    at = "model.layers.1.self_attn."
    queries, gate = plan[f"{at}q_proj.weight"], plan[f"{at}attn_gate.proj.weight"]
    assert (
        [held["q"] for held in gate.heads]
        == [held["q"] for held in queries.heads]
        == [range(2 * r, 2 * r + 2) for r in range(4)]
    )
    assert gate.ranks[3] == (slice(6, 8),)
    assert [held["k"] for held in plan[f"{at}k_proj.weight"].heads] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert plan[f"{at}k_proj.weight"].partial
    assert plan[f"{at}o_proj.weight"].kind == "rowwise"
    assert [head_range(2, 4, rank) for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]


def test_a_replicated_parameter_is_whole_on_every_rank() -> None:
    assert Shard("replicated").take(torch.ones(3), 1).shape == (3,)


def test_shards_that_cannot_be_name_both_numbers() -> None:
    with pytest.raises(ShapeError, match="has 4 heads, which tp=3 does not divide"):
        sharding_plan(attach(llama(), HEADWISE), 3)
    model = attach(llama(hidden_size=48, num_attention_heads=12, num_key_value_heads=3), HEADWISE)
    with pytest.raises(ShapeError, match="has 3 KV heads, and neither do they divide into tp=2"):
        sharding_plan(model, 2)
    with pytest.raises(ShapeError, match="tp=0: pass the number"):
        sharding_plan(model, 0)


def test_an_unknown_gate_fails_when_the_plan_is_made() -> None:
    """a tensor without an entry is an error of the plan, not of the run."""
    model = attach(llama(), HEADWISE)
    model.model.layers[1].self_attn.head_gate = nn.Linear(44, 4)
    with pytest.raises(UnsupportedError, match=r"head_gate.weight of shape \(4, 44\) is a parameter of attention"):
        sharding_plan(model, 2)
    wrong = attach(llama(), HEADWISE)
    wrong.model.layers[0].self_attn.attn_gate = Gate(HEADWISE, 44, 2)
    with pytest.raises(ShapeError, match=r"has 2 heads, and model\.layers\.0\.self_attn has 4 heads there"):
        sharding_plan(wrong, 2)
    stray = attach(llama(), HEADWISE)
    stray.model.layers[0].mlp.attn_gate = Gate(HEADWISE, 44, 4)
    with pytest.raises(UnsupportedError, match="stands in no attention"):
        sharding_plan(stray, 2)
    with pytest.raises(UnsupportedError, match="keeps the 2 largest of 4 heads"):
        sharding_plan(attach(llama(), "output:headwise,top_k=2"), 2)
    config = transformers.Olmo2Config(
        hidden_size=44, intermediate_size=37, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=61,
        pad_token_id=0,
    )  # fmt: skip
    olmo = attach(transformers.Olmo2ForCausalLM(config), HEADWISE)
    with pytest.raises(UnsupportedError, match="norms all 4 heads"):
        sharding_plan(olmo, 2)


def test_adapted_projections_are_cut_with_what_they_adapt() -> None:
    peft = pytest.importorskip("peft")
    model = attach(llama(), ELEMENTWISE)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "o_proj", "attn_gate.proj"], r=3))
    plan = sharding_plan(adapted, 2)
    at = "base_model.model.model.layers.0.self_attn."
    adapters = {name: shard for name, shard in plan.items() if "lora" in name and name.startswith(at)}
    kinds = {
        name.removeprefix(at).replace(".default", ""): (shard.kind, shard.axis, shard.partial)
        for name, shard in adapters.items()
    }
    assert kinds == {
        "q_proj.lora_A.weight": ("replicated", None, True), "q_proj.lora_B.weight": ("colwise", 0, False),
        "o_proj.lora_A.weight": ("rowwise", 1, False), "o_proj.lora_B.weight": ("replicated", None, True),
        "attn_gate.proj.lora_A.weight": ("replicated", None, True), "attn_gate.proj.lora_B.weight": ("colwise", 0, False),
    }  # fmt: skip
