"""Parameter groups, roles and LoRA targets of gated models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from gated_attn.errors import RecipeError, ShapeError, SpecError, UnsupportedError  # noqa: E402
from gated_attn.hf.attach import attach, gates  # noqa: E402
from gated_attn.hf.counts import count  # noqa: E402
from gated_attn.hf.groups import Rows, gate_parameters, lora_targets, param_groups, roles  # noqa: E402
from gated_attn.hf.sharding import sharding_plan  # noqa: E402
from tests.hf.builders import (  # noqa: E402
    ELEMENTWISE,
    FAMILIES,
    HEADWISE,
    NATIVE,
    gpt2,
    llama,
    neox,
    ours,
    phi3,
    qwen3_5,
    wake,
)

# peft 0.21 still reads a name that transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


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
