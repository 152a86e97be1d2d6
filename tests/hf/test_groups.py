"""Parameter groups, roles, LoRA targets, shards and counts of gated models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

from gated_attn.errors import RecipeError, ShapeError, SpecError, UnsupportedError  # noqa: E402
from gated_attn.gate import Gate  # noqa: E402
from gated_attn.hf.attach import attach, gates  # noqa: E402
from gated_attn.hf.counts import count  # noqa: E402
from gated_attn.hf.groups import Rows, gate_parameters, lora_targets, param_groups, roles  # noqa: E402
from gated_attn.hf.sharding import Shard, head_range, sharding_plan  # noqa: E402
from gated_attn.models.decoder import Decoder, DecoderConfig  # noqa: E402
from gated_attn.nn.attention import GatedAttention  # noqa: E402
from gated_attn.nn.multihead import GatedMultiheadAttention  # noqa: E402

# peft 0.21 still reads a name that transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

HEADWISE = "output:headwise,bias=0.3,std=0.9"
ELEMENTWISE = "output:elementwise:2sigmoid,std=0.7"


def llama(**changes: Any) -> nn.Module:
    sizes = {
        "hidden_size": 44, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 10, "vocab_size": 61, "max_position_embeddings": 64,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=44, intermediate_size=37, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
            vocab_size=61, tie_word_embeddings=True,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=44, n_layer=2, n_head=4, vocab_size=61, n_positions=64)
    )


def phi3() -> nn.Module:
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            hidden_size=48, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=61, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=44, d_kv=10, d_ff=37, num_layers=2, num_heads=4, vocab_size=61, decoder_start_token_id=0
        )
    )


def neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            hidden_size=44, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, vocab_size=61
        )
    )


def qwen3_5() -> nn.Module:
    return transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            hidden_size=44, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            vocab_size=61, layer_types=["full_attention", "full_attention"],
        )
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "qwen3": qwen3, "gpt2": gpt2, "phi3": phi3, "t5": t5, "gpt_neox": neox,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def ours() -> nn.Module:
    return Decoder(
        DecoderConfig(vocab_size=61, layers=2, heads=4, kv_heads=2, dim=44, ffn_dim=37, head_dim=10, gate=ELEMENTWISE)
    )


@pytest.mark.parametrize("family", [*FAMILIES, "ours"])
@pytest.mark.parametrize(
    "spec", [HEADWISE, "value:elementwise,fill", "output:headwise,source=lse,sink_key", "weights:pairwise,bias=0"]
)  # fmt: skip
def test_every_trainable_parameter_is_in_one_group(family: str, spec: str) -> None:
    model = ours() if family == "ours" else attach(FAMILIES[family](), spec)
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    groups = param_groups(model, 1e-3, weight_decay=0.1, gate_lr_mult=10, gate_weight_decay=0.02)
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in model.parameters() if p.requires_grad}
    assert id(frozen) not in ids
    inside = {id(p) for gate in gates(model).values() for p in gate.parameters()}
    for group in groups:
        own = {id(p) for p in group["params"]}
        is_gate = group["name"].startswith("gate")
        assert own <= inside if is_gate else own.isdisjoint(inside)
        assert group["lr"] == pytest.approx(1e-2 if is_gate else 1e-3)
        decay = {"gate weights": 0.02, "gate vectors": 0.0, "weights": 0.1, "vectors": 0.0}[group["name"]]
        assert group["weight_decay"] == decay
    torch.optim.AdamW(groups)


def test_fills_and_sink_keys_are_vectors_and_not_decayed() -> None:
    model = attach(llama(), "output:headwise,source=lse,sink_key,fill")
    groups = {group["name"]: group["params"] for group in param_groups(model, 1e-3, gate_weight_decay=1.0)}
    assert "gate weights" not in groups
    assert len(groups["gate vectors"]) == 2 * 3


def test_bad_numbers_and_frozen_models_have_no_groups() -> None:
    model = attach(llama(), HEADWISE)
    with pytest.raises(RecipeError, match=r"gate_lr_mult=-1: must be at least 0"):
        param_groups(model, 1e-3, gate_lr_mult=-1)
    with pytest.raises(RecipeError, match=r"none of the \d+ parameters is trainable"):
        param_groups(model.requires_grad_(False), 1e-3)


def test_decay_switched_on_leaves_moments_and_zero_changes_no_byte() -> None:
    """the groups of two decays fit one optimizer checkpoint."""
    torch.manual_seed(1)
    model = attach(llama(), ELEMENTWISE)
    tokens = torch.randint(0, 61, (2, 7))
    optimizer = torch.optim.AdamW(param_groups(model, 1e-2))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    saved = optimizer.state_dict()
    other = torch.optim.AdamW(param_groups(model, 1e-2, gate_weight_decay=0.5))
    other.load_state_dict(saved)
    assert [g["name"] for g in other.param_groups] == [g["name"] for g in optimizer.param_groups]
    for key, state in saved["state"].items():
        assert all(torch.equal(value, other.state_dict()["state"][key][name]) for name, value in state.items())


@pytest.mark.parametrize("family", [*FAMILIES, "ours", "qwen3_5"])
def test_roles_tile_the_output_axis(family: str) -> None:
    model = {"ours": ours, "qwen3_5": qwen3_5}.get(family, lambda: attach(FAMILIES[family](), ELEMENTWISE))()
    parameters = dict(model.named_parameters())
    found = roles(model)
    seen = set()
    for name, rows in found.items():
        covered = sorted(row for slices in rows.slices.values() for s in slices for row in range(s.start, s.stop))
        assert covered == list(range(parameters[name].shape[rows.axis])), name
        assert torch.equal(rows.join(rows.split(parameters[name])), parameters[name])
        seen |= set(rows.slices)
    assert seen == {"q", "gate", "k", "v", "out"}
    assert set(gate_parameters(model)) <= set(found)


class Block(NamedTuple):
    """Attention of one model: how it is called, alone and causal, and where its projections and its heads' outputs lie."""

    model: nn.Module
    path: str
    call: Callable[[Any, Tensor], Tensor]
    fused: str
    out: str
    sizes: tuple[int, int, int, int]


def unturned(attention: Any, x: Tensor, width: int) -> Tensor:
    """transformers' attention with rotary positions that rotate by 0."""
    turn = (x.new_ones(*x.shape[:2], width), x.new_zeros(*x.shape[:2], width))
    return attention(hidden_states=x, position_embeddings=turn, attention_mask=None)[0]


def multihead() -> nn.Module:
    model = nn.TransformerEncoderLayer(44, 4, 37, batch_first=True)
    return attach(model, "output:headwise,source=constant,bias=0.3")


def causal(attention: Any, x: Tensor) -> Tensor:
    hidden_TT = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return attention(x, x, x, need_weights=False, attn_mask=hidden_TT)[0]


# path, call, fused child, out projection, (D, H, K, E)
BLOCKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gpt2": (gpt2, ("transformer.h.1.attn", lambda a, x: a(x)[0], "c_attn.", "c_proj", (44, 4, 4, 11))),
    "gpt_neox": (
        neox, ("gpt_neox.layers.1.attention", lambda a, x: unturned(a, x, 2), "query_key_value.", "dense", (44, 4, 4, 11))
    ),
    "phi3": (phi3, ("model.layers.1.self_attn", lambda a, x: unturned(a, x, 12), "qkv_proj.", "o_proj", (48, 4, 2, 12))),
    "qwen3_5": (qwen3_5, ("model.layers.1.self_attn", lambda a, x: unturned(a, x, 4), "", "o_proj", (44, 4, 2, 16))),
    "multihead": (multihead, ("self_attn", causal, "in_proj_", "out_proj", (44, 4, 4, 11))),
}  # fmt: skip


def block(family: str) -> Block:
    """With every weight and bias drawn; the number 1 in every token's first channel stands in for a bias."""
    make, where = BLOCKS[family]
    built = Block(make().double().eval(), *where)
    wake(built.model.get_submodule(built.path))
    return built


def tokens(one: Block) -> Tensor:
    x_BTD = torch.randn(2, 5, one.sizes[0], dtype=torch.float64)
    x_BTD[..., 0] = 1
    return x_BTD


@torch.no_grad()
def run(one: Block, x_BTD: Tensor) -> Tensor:
    return one.call(one.model.get_submodule(one.path), x_BTD)


@torch.no_grad()
def settle(one: Block, role: str, value: float | Tensor) -> None:
    """Make what `roles` calls so the same for every token: each row of the weight gives its number in `value`."""
    for name, rows in roles(one.model).items():
        if name.startswith(f"{one.path}.{one.fused}") and ".attn_gate." not in name and role in rows.slices:
            parameter = one.model.get_parameter(name)
            pieces = rows.split(parameter)
            pieces[role].zero_()
            if parameter.dim() == 2:
                pieces[role].select(1 - rows.axis, 0).copy_(torch.as_tensor(value))
            parameter.copy_(rows.join(pieces))


@pytest.mark.parametrize("family", BLOCKS)
def test_roles_are_what_attention_does_with_the_rows(family: str) -> None:
    """Against the model's own forward.

    Without values the block gives its bias; with keys that are all the same it gives the mean of what each token so far gives
    alone, whatever the queries are, and with queries that are all the same it does not; and a gate of 1, 1/2, 0 does so.
    """
    D, H, K, E = block(family).sizes
    x_BTD = tokens(block(family))
    keys, queries = torch.randn(K * E, dtype=torch.float64), torch.randn(H * E, dtype=torch.float64)

    def with_(**values: float | Tensor) -> Block:
        torch.manual_seed(7)
        one = block(family)
        if family == "qwen3_5":
            values = {"gate": 1e3, **values}
        for role, value in values.items():
            settle(one, role, value)
        return one

    plain = with_()
    out = plain.model.get_submodule(plain.path).get_submodule(plain.out)
    bias = torch.zeros(D, dtype=torch.float64) if out.bias is None else out.bias.detach()
    alone = torch.cat([run(plain, x_BTD[:, t : t + 1]) for t in range(5)], 1)
    means = alone.cumsum(1) / torch.arange(1, 6)[:, None]
    got = run(plain, x_BTD)
    assert (got - means).abs().max() > 1e-2
    assert torch.equal(run(with_(v=0.0), x_BTD), bias.expand_as(got))
    for values in ({"k": keys}, {"k": 0.0}, {"q": 0.0}):
        torch.testing.assert_close(run(with_(**values), x_BTD), means, rtol=1e-9, atol=1e-9)
    assert (run(with_(q=queries), x_BTD) - means).abs().max() > 1e-2
    if family == "qwen3_5":
        assert torch.equal(run(with_(gate=0.0), x_BTD), got / 2)
        assert not run(with_(gate=-1e3), x_BTD).any()


@pytest.mark.parametrize("family", BLOCKS)
def test_rows_of_a_head_move_the_output_of_that_head_alone(family: str) -> None:
    one = block(family)
    _, H, K, E = one.sizes
    attention, x_BTD = one.model.get_submodule(one.path), tokens(one)
    with torch.no_grad():  # what the heads give, instead of their projection
        attention.get_submodule(one.out).weight = nn.Parameter(torch.eye(H * E, dtype=torch.float64))
    before_BTHE = run(one, x_BTD).unflatten(-1, (H, E))
    seen = set()
    for name, rows in roles(one.model).items():
        if not name.startswith(f"{one.path}.{one.fused}") or ".attn_gate." in name or "out" in rows.slices:
            continue
        parameter = one.model.get_parameter(name)
        kept = parameter.detach().clone()
        for role in rows.slices.keys() & {"q", "gate", "k", "v"}:
            heads = K if role in ("k", "v") else H
            for head in range(heads):
                pieces = rows.split(kept)
                pieces[role].chunk(heads, rows.axis)[head].add_(torch.rand(()))
                with torch.no_grad():
                    parameter.copy_(rows.join(pieces))
                moved_H = (run(one, x_BTD).unflatten(-1, (H, E)) - before_BTHE).abs().amax((0, 1, 3)) > 1e-9
                # A bias of the keys adds the same number to all scores of a query, which softmax does not see.
                seen_at_all = not (role == "k" and name.endswith("bias"))
                want_H = [seen_at_all and h // (H // heads) == head for h in range(H)]
                assert moved_H.tolist() == want_H, (name, role, head)
                seen.add(role)
        with torch.no_grad():
            parameter.copy_(kept)
    assert seen >= {"q", "k", "v"}
    assert ("gate" in seen) == (family == "qwen3_5")


def test_native_rows_interleave_queries_and_gate() -> None:
    rows = roles(qwen3_5())["model.layers.0.self_attn.q_proj.weight"]
    assert rows.slices["q"] == tuple(slice(32 * h, 32 * h + 16) for h in range(4))
    assert rows.slices["gate"] == tuple(slice(32 * h + 16, 32 * h + 32) for h in range(4))


def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz, as Muon does it."""
    x = g / (g.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@pytest.mark.parametrize("layout", ["qwen3_5", "phi3", "gpt2"])
def test_muon_on_packed_is_muon_on_separate_role_by_role(layout: str) -> None:
    """the roles' pieces are orthogonalised apart, whatever tensor they lie in."""
    model = {"qwen3_5": qwen3_5, "phi3": phi3, "gpt2": gpt2}[layout]()
    child = {"qwen3_5": "q_proj", "phi3": "qkv_proj", "gpt2": "c_attn"}[layout]
    name, rows = next((n, r) for n, r in roles(model).items() if n.endswith(f"{child}.weight"))
    weight = model.get_parameter(name)
    grad = torch.randn(weight.shape, dtype=torch.float64)
    separate = {role: orthogonal(piece.contiguous()) for role, piece in rows.split(grad).items()}
    packed = rows.join(separate)
    whole = orthogonal(grad)
    for role, piece in rows.split(packed).items():
        assert torch.equal(piece, separate[role])
        assert not torch.allclose(piece, rows.split(whole)[role])


def test_a_packed_weight_is_refused() -> None:
    model = attach(llama(), HEADWISE)
    model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(torch.zeros(880, 1))
    with pytest.raises(ShapeError, match=r"q_proj.weight is \(880, 1\); 4 heads, 2 KV heads of width 10 have 40 rows"):
        roles(model)
    with pytest.raises(ShapeError, match="axis 0 has 2 rows"):
        Rows(0, {"q": (slice(0, 2),)}).join({"q": torch.zeros(3)})


@pytest.mark.parametrize("family", ["llama", "qwen3", "t5", "phi3", "gpt2"])
@pytest.mark.parametrize("spec", [ELEMENTWISE, "value:headwise,std=1", "query:headwise,rank=3,std=1"])
def test_peft_adapts_what_was_asked_for(family: str, spec: str) -> None:
    peft = pytest.importorskip("peft")
    for what in ("q", "gate", "both"):
        model = attach(FAMILIES[family](), spec)
        tied = family in ("phi3", "gpt2")
        if tied and what != "gate":
            with pytest.raises(UnsupportedError, match=r"peft adapts whole modules"):
                lora_targets(model, what)
            continue
        targets = lora_targets(model, what)
        kind = "SEQ_2_SEQ_LM" if family == "t5" else "CAUSAL_LM"
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2, task_type=kind))
        layers = {name for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
        is_gate = {".attn_gate." in f"{name}." for name in layers}
        assert is_gate == {"q": {False}, "gate": {True}, "both": {True, False}}[what]
        assert len(layers) == len(targets)
        names = ("q_proj", "q") if family != "t5" else ("q",)
        assert all(".attn_gate." in name or name.rpartition(".")[2] in names for name in layers)
        groups = {group["name"]: group["params"] for group in param_groups(adapted, 1e-3)}
        # peft takes whatever stands in its layer for its own, and leaves it trainable.
        inside = any("q_proj.attn_gate" in name or "q.attn_gate" in name for name in gate_parameters(adapted))
        assert ("gate weights" in groups) == (what != "q" or inside)
        assert ("weights" in groups) == (what != "gate")
        found = roles(adapted)
        trained = [name for name, p in adapted.named_parameters() if p.requires_grad and "lora_B" in name]
        assert set(trained) <= set(found)
        tokens = torch.randint(3, 61, (2, 5))
        adapted(input_ids=tokens, labels=tokens).loss.backward()
        assert all(adapted.get_parameter(name).grad.abs().sum() > 0 for name in trained)
        assert lora_targets(adapted, what) == targets


def test_an_mlp_target_never_touches_a_gate() -> None:
    peft = pytest.importorskip("peft")
    model = attach(llama(), HEADWISE)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["gate_proj"], r=2))
    layers = [name for name, module in adapted.named_modules() if hasattr(module, "lora_A")]
    assert len(layers) == 2
    assert all(name.endswith("mlp.gate_proj") for name in layers)


def test_targets_that_are_not_there() -> None:
    with pytest.raises(SpecError, match=r"unknown LoRA target 'gates'; legal: q, gate, both; did you mean 'gate'"):
        lora_targets(llama(), "gates")
    with pytest.raises(SpecError, match="no gate with a linear layer"):
        lora_targets(attach(llama(), "output:headwise,source=constant"), "gate")
    with pytest.raises(UnsupportedError, match=r"\n  model\.layers\.\*\.self_attn\.q_proj: holds q and gate$"):
        lora_targets(qwen3_5(), "q")
    assert lora_targets(qwen3_5(), "both") == [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]


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


def wake(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


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


def flops(model: nn.Module, tokens: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi3", "gpt_neox"])
@pytest.mark.parametrize(
    "spec",
    [HEADWISE, ELEMENTWISE, "output:shared,rank=3", "value:elementwise,in=7,fill", "key:headwise", "dense:elementwise",
     "output:elementwise,source=query", "output:headwise,source=constant", "output:headwise,source=lse,sink_key"],
)  # fmt: skip
def test_counts_are_torch_s(family: str, spec: str) -> None:
    """parameters, and the FLOPs that a gate adds according to torch's own counter."""
    model = FAMILIES[family]()
    tokens = torch.randint(3, 61, (2, 6))
    before, numbers = flops(model, tokens), sum(p.numel() for p in model.parameters())
    attach(model, spec)
    found = count(model)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.gate_parameters == found.parameters - numbers
    per_token = found.gate_flops * tokens.numel()
    if "lse" not in spec:  # a sink key is multiplied with the queries inside attention
        assert flops(model, tokens) - before == per_token


@pytest.mark.parametrize("spec", [None, HEADWISE, "output:elementwise,source=query", "dense:elementwise,rank=3"])
@pytest.mark.parametrize(("layers", "groups", "inner"), [(6, 1, 1), (5, 2, 1), (7, 3, 2)])
def test_albert_s_shared_layers_count_as_often_as_they_run(
    layers: int, groups: int, inner: int, spec: str | None
) -> None:
    config = transformers.AlbertConfig(
        vocab_size=61, embedding_size=13, hidden_size=44, intermediate_size=37, num_attention_heads=4, num_hidden_layers=layers,
        num_hidden_groups=groups, inner_group_num=inner,
    )  # fmt: skip
    model = transformers.AlbertForMaskedLM(config).eval()
    before = linear_flops(model)
    if spec is not None:
        attach(model, spec)
    found = count(model)
    assert found.flops == linear_flops(model)
    assert found.gate_flops == linear_flops(model) - before


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_all_linear_layers_count_as_torch_counts_them(family: str) -> None:
    model = attach(FAMILIES[family](), ELEMENTWISE).eval()
    assert count(model).flops == linear_flops(model)


def linear_flops(model: nn.Module) -> float:
    """Per token, without what attention multiplies."""
    ids_BT = torch.randint(3, 61, (2, 6))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids_BT)
    found = counter.get_flop_counts()["Global"]
    return sum(n for operation, n in found.items() if str(operation) in ("aten.mm", "aten.addmm")) / ids_BT.numel()


def test_counts_by_hand() -> None:
    D, H, E, layers = 44, 4, 10, 2
    for spec, weights in (("output:headwise", D * H), ("output:elementwise", D * H * E)):
        found = count(attach(llama(), spec))
        assert (found.gate_parameters, found.gate_flops) == (layers * weights, layers * 2 * weights)
        assert found.parameter_overhead == pytest.approx(100 * layers * weights / (found.parameters - layers * weights))
        assert f"+{found.parameter_overhead:.3g}%" in str(found)
    pairwise = count(attach(llama(), "weights:pairwise,rank=3"))
    assert pairwise.gate_flops == layers * 2 * 3 * E * (H + 2)
    native = count(qwen3_5())
    assert native.gate_parameters == 2 * 4 * 16 * 44
    own = count(ours())
    assert own.gate_parameters == 2 * D * H * E
    assert Shard("replicated").take(torch.ones(3), 1).shape == (3,)


NATIVE: dict[str, Callable[[], nn.Module]] = {
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            hidden_size=44, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            vocab_size=61, layer_types=["linear_attention", "full_attention"], num_experts=0, mlp_only_layers=[0, 1],
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        )
    ),
    "afmoe": lambda: transformers.AfmoeForCausalLM(
        transformers.AfmoeConfig(
            hidden_size=44, intermediate_size=37, moe_intermediate_size=12, num_hidden_layers=2, num_dense_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=61, num_experts=2, num_experts_per_tok=1,
            layer_types=["full_attention", "full_attention"],
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", [*NATIVE, "qwen3_5"])
def test_native_gates_are_gates_too(family: str) -> None:
    """Separate ones are a group and a LoRA target of their own; fused ones are rows of the queries' weight."""
    model = (NATIVE | {"qwen3_5": qwen3_5})[family]()
    fused = family != "afmoe"
    groups = {group["name"] for group in param_groups(model, 1e-3)}
    assert ("gate weights" in groups) != fused
    found = [rows for rows in roles(model).values() if "gate" in rows.slices]
    assert all(("q" in rows.slices) == fused for rows in found)
    H, E, D = 4, 16, 44
    assert count(model).gate_parameters == len(found) * H * E * D
    plan = sharding_plan(model, 2)
    assert list(plan) == [name for name, _ in model.named_parameters()]
    if not fused:
        assert lora_targets(model, "gate") == [f"model.layers.{i}.self_attn.gate_proj" for i in (0, 1)]
        assert plan["model.layers.0.self_attn.gate_proj.weight"].ranks == ((slice(0, 32),), (slice(32, 64),))


def check_everything(model: nn.Module) -> None:
    assert list(sharding_plan(model, 2)) == [name for name, _ in model.named_parameters()]
    assert {group["name"] for group in param_groups(model, 1e-3)} >= {"gate weights", "weights", "vectors"}
    assert count(model).gate_parameters == sum(p.numel() for gate in gates(model).values() for p in gate.parameters())


@pytest.mark.parametrize("spec", [HEADWISE, "value:elementwise,std=1"])
def test_plain_torch_models_are_served(spec: str) -> None:
    model = attach(nn.TransformerEncoderLayer(44, 4, 37, batch_first=True), spec)
    check_everything(model)
    thirds = {"q": (slice(0, 44),), "k": (slice(44, 88),), "v": (slice(88, 132),)}
    assert roles(model)["self_attn.in_proj_weight"].slices == roles(model)["self_attn.in_proj_bias"].slices == thirds
    with pytest.raises(UnsupportedError, match="peft adapts whole modules"):
        lora_targets(model, "q")
    assert lora_targets(model, "gate") == ["self_attn.attn_gate.proj"]


@pytest.mark.parametrize("spec", [HEADWISE, "value:elementwise,std=1"])
def test_timm_models_are_served(spec: str, timm_attention: Any) -> None:
    fused = attach(nn.ModuleList([timm_attention.Attention(44, 4, qkv_bias=True)]), spec)
    check_everything(fused)
    thirds = {"q": (slice(0, 44),), "k": (slice(44, 88),), "v": (slice(88, 132),)}
    assert roles(fused)["0.qkv.weight"].slices == roles(fused)["0.qkv.bias"].slices == thirds
    apart = attach(nn.ModuleList([timm_attention.AttentionRope(44, 4, qkv_fused=False, num_kv_heads=2)]), spec)
    check_everything(apart)
    assert roles(apart)["0.k_proj.weight"].slices == {"k": (slice(0, 22),)}
    assert lora_targets(apart, "q") == ["0.q_proj"]
