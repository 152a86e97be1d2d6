"""Gates that models of transformers are born with: what the view says is what the model multiplies by."""

from __future__ import annotations

import copy
import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from gated_attn.errors import ShapeError, UnsupportedError
from gated_attn.hf import gates, layouts
from gated_attn.hf.attach import attach
from gated_attn.hf.layouts import LAYOUTS
from gated_attn.hf.native import READ_AS, NativeGate, native_gates, row_of

B, T, D, H, K, E, EV, VOCAB = 2, 7, 42, 6, 2, 8, 10, 61

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": H,
    "num_key_value_heads": K, "head_dim": E, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "use_cache": False,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
FULL = {"layer_types": ["full_attention"] * 2, "rope_parameters": ROPE}
BOTH = {"full_attention": ROPE, "sliding_attention": ROPE}
MOE = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MLA = {
    "num_key_value_heads": H, "q_lora_rank": 12, "kv_lora_rank": 11, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": EV, "n_group": 1, "topk_group": 1, **MOE,
}  # fmt: skip

FULL_TYPES = {"layer_types": ["full_attention"] * 2}
LINEAR_FULL = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
DENSE = {"mlp_layer_types": ["dense"] * 2}
SWA = {"swa_num_attention_heads": H, "swa_num_key_value_heads": K, "swa_head_dim": E, "sliding_window_size": 5}
INDEXER = {f"indexer_{key}": n for key, n in {"n_heads": 2, "kv_heads": 1, "head_dim": E, "budget": 4}.items()}
ELEMENTWISE, HEADWISE = "output:elementwise:sigmoid", "output:headwise:sigmoid"


class Case(NamedTuple):
    """A package of transformers, two of its classes, settings; the gate that it has, and the path of its out projection."""

    package: str
    config: str
    model: str
    settings: dict[str, Any] = {}  # noqa: RUF012 - read only
    spec: str = ELEMENTWISE
    out: str = "o_proj"


CASES = {
    "qwen3_next": Case("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", {**FULL, "num_experts": 0}),
    "qwen3_next bias": Case(
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**FULL, "num_experts": 0, "attention_bias": True},
        f"{ELEMENTWISE},bias=0",
    ),
    "qwen3_5": Case("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", FULL),
    "qwen3_5_moe": Case(
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**FULL, **MOE, "shared_expert_intermediate_size": 12},
    ),
    "qwen4_exp": Case(
        "qwen4_exp",
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {**FULL, **LINEAR_FULL, **MOE, **INDEXER, "indexer_compress_ratio": 2},
    ),
    "afmoe": Case("afmoe", "AfmoeConfig", "AfmoeForCausalLM", {**FULL_TYPES, "num_dense_layers": 2}),
    "hrm_text": Case("hrm_text", "HrmTextConfig", "HrmTextForCausalLM", {"num_key_value_heads": H}),
    "muse_glimmer": Case("muse_glimmer", "MuseGlimmerTextConfig", "MuseGlimmerTextModel"),
    "muse_spark": Case("muse_spark", "MuseSparkTextConfig", "MuseSparkTextModel", DENSE),
    "beam": Case("beam", "BeamConfig", "BeamForCausalLM", MOE, f"{ELEMENTWISE},bias=0"),
    "neomme": Case("neomme", "NeoMMEConfig", "NeoMMEModel", {"rope_parameters": BOTH}, out="output_projection.o_proj"),
    "inkling2": Case("inkling2", "Inkling2TextConfig", "Inkling2TextModel", {**SWA, **MOE}, out="o_proj.linear"),
    "hy_v4": Case("hy_v4", "HYV4Config", "HYV4Model", MLA),
    "lfm3": Case(
        "lfm3",
        "Lfm3Config",
        "Lfm3ForCausalLM",
        {**FULL_TYPES, "rope_parameters": {"full_attention": ROPE}, "use_attention_gate": True},
        HEADWISE,
    ),
    "step3p7": Case(
        "step3p7",
        "Step3p7TextConfig",
        "Step3p7TextModel",
        {**SLIDING, "num_attention_heads_per_layer": [H, H], "pad_token_id": 0},
        HEADWISE,
    ),
    "laguna": Case("laguna", "LagunaConfig", "LagunaForCausalLM", {**DENSE, **FULL_TYPES}, "output:headwise:softplus"),
    "laguna elementwise": Case(
        "laguna",
        "LagunaConfig",
        "LagunaForCausalLM",
        {**DENSE, **FULL_TYPES, "gating": "per-element"},
        "output:elementwise:softplus",
    ),
    "dots3_note": Case("dots3_note", "Dots3NoteTextConfig", "Dots3NoteTextModel", MLA, HEADWISE),
    "bailing_hybrid": Case(
        "bailing_hybrid", "BailingHybridConfig", "BailingHybridModel", {**MLA, **LINEAR_FULL}, HEADWISE
    ),
}


def build(case: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    """A tiny model of the case, its gates awake and every bias other than 0."""
    which = CASES[case]
    home = f"transformers.models.{which.package}"
    configs, models = (
        importlib.import_module(f"{home}.{kind}_{which.package}") for kind in ("configuration", "modeling")
    )
    config = getattr(configs, which.config)(**{**SMALL, **which.settings, **more})
    config._experts_implementation = "eager"  # the grouped one wants strides of 16 bytes
    torch.manual_seed(0)
    model = getattr(models, which.model)(config).eval()
    with torch.no_grad():
        for gate in native_gates(model).values():
            gate.weight_HGD.normal_(0, 5 * D**-0.5)
            if gate.row.head_bias:
                getattr(gate.module, gate.row.head_bias).normal_()
            elif gate.bias_HG is not None:
                gate.bias_HG.normal_()
    return model.to(dtype)


def seen(model: nn.Module, gate: NativeGate, out: str) -> tuple[Tensor, Tensor]:
    """What the attention module reads and what its out projection does, in the first call."""
    found: dict[str, Tensor] = {}

    def reads(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault("x", args[0] if args else kwargs["hidden_states"])

    def projects(_: nn.Module, args: Any) -> None:
        found.setdefault("out", args[0])

    handles = [
        gate.module.register_forward_pre_hook(reads, with_kwargs=True),
        gate.module.get_submodule(out).register_forward_pre_hook(projects),
    ]
    with torch.no_grad():
        model(torch.arange(B * T).reshape(B, T))
    for handle in handles:
        handle.remove()
    return found["x"], found["out"]


@torch.no_grad()
def shut_half(gate: NativeGate) -> None:
    """All logits 0: the view's rows are the model's own, so this makes every gate act(0)."""
    gate.weight_HGD.zero_()
    if gate.row.head_bias:
        getattr(gate.module, gate.row.head_bias).zero_()
    elif gate.bias_HG is not None:
        gate.bias_HG.zero_()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    # Inkling's router wants float32 beside bfloat16, which only its own loader makes.
    + [(case, torch.bfloat16) for case in CASES if case != "inkling2"],
)
def test_the_view_is_what_the_model_multiplies_by(case: str, dtype: torch.dtype) -> None:
    model, which = build(case, dtype), CASES[case]
    gates = native_gates(model)
    assert gates
    for name, gate in gates.items():
        assert str(gate.spec) == which.spec
        assert model.get_submodule(name) is gate.layer
        x, gated = seen(model, gate, which.out)
        values = gate.values(x)
        assert values.shape == (B, T, *gate.shape_HG)
        assert gate.logits(x).float().std() > 1  # awake
        shut_half(gate)
        again, half = seen(model, gate, which.out)
        assert torch.equal(x, again)
        heads_BTHE = half.reshape(B, T, H, -1)
        if gate.spec.activation == "sigmoid":  # act(0) is exactly 1/2, so the ungated output is known to the bit
            want = (2 * heads_BTHE * values).to(dtype)
            assert torch.equal(gated.reshape(want.shape), want)
        else:
            want = heads_BTHE.double() / gate.values(x).double() * values.double()
            torch.testing.assert_close(
                gated.reshape(want.shape).double(), want, rtol=3 * torch.finfo(dtype).eps, atol=1e-9
            )


@pytest.mark.parametrize("case", ["qwen3_next bias", "afmoe", "lfm3", "beam"])
def test_logits_are_those_of_the_rows(case: str) -> None:
    gate = next(iter(native_gates(build(case)).values()))
    x = torch.randn(B, T, D)
    want = torch.einsum("btd,hgd->bthg", x, gate.weight_HGD)
    want = want if gate.bias_HG is None else want + gate.bias_HG
    torch.testing.assert_close(gate.logits(x), want)


def test_the_rows_are_those_of_the_layout() -> None:
    gate = next(iter(native_gates(build("qwen3_next bias")).values()))
    rows = layouts.role_rows("per_head", layouts.Sizes(H, K, E), "elementwise")["gate"]
    assert torch.equal(gate.weight_HGD.flatten(0, 1), gate.layer.weight[rows])
    assert gate.bias_HG is not None
    assert torch.equal(gate.bias_HG.flatten(), gate.layer.bias[rows])


def test_checkpoints_are_read_as_the_models_hold_their_gates() -> None:
    """Every `READ_AS` entry against a tiny model of that type: the layout's names and numbers of rows, and the gate's bits."""
    models = {(model := build(case)).config.model_type: model for case in CASES}
    assert len(READ_AS) == 13
    for model_type, reads in READ_AS.items():
        layout = reads[-1]  # by the module's own names
        text = AutoConfig.for_model(model_type).get_text_config().model_type
        gate = next(iter(native_gates(models[text]).values()))
        sizes = layouts.Sizes(H, models[text].config.num_key_value_heads, E)
        state = gate.module.state_dict()
        names = LAYOUTS[layout].names
        stored = {key: state[f"{names[key]}.weight"] for key in LAYOUTS[layout].tensors}
        assert f"{names['out']}.weight" in state
        canonical = layouts.split(stored, sizes, layout, width=gate.spec.width)  # which refuses other numbers of rows
        assert torch.equal(canonical["gate"], gate.weight_HGD.flatten(0, 1)), model_type


@pytest.mark.parametrize("case", ["qwen3_next bias", "afmoe", "lfm3", "beam"])
def test_nothing_is_copied_or_remembered(case: str) -> None:
    model = build(case)
    gate = next(iter(native_gates(model).values()))
    storages = {p.untyped_storage().data_ptr() for p in gate.module.parameters()}
    assert gate.weight_HGD.untyped_storage().data_ptr() in storages
    assert gate.bias_HG is None or gate.bias_HG.untyped_storage().data_ptr() in storages
    x = torch.randn(B, T, D)
    before = gate.values(x)
    other = copy.deepcopy(model)
    shut_half(gate)
    assert torch.equal(gate.values(x), torch.full_like(before, 0.5))
    model.load_state_dict(other.state_dict())
    assert torch.equal(gate.values(x), before)
    model.to(torch.bfloat16)
    assert gate.values(x.bfloat16()).dtype == torch.bfloat16
    assert gate.weight_HGD.dtype == torch.bfloat16
    model.float().load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=True)
    assert torch.equal(gate(x), before)


def test_counts_agree_with_the_spec() -> None:
    for case in ("qwen3_next bias", "afmoe", "lfm3"):
        gate = next(iter(native_gates(build(case)).values()))
        count = gate.weight_HGD.numel() + (0 if gate.bias_HG is None else gate.bias_HG.numel())
        assert gate.spec.parameters(D, H, K, E) == count
        assert gate.n_in == D


def test_models_without_a_gate_have_none() -> None:
    assert native_gates(LlamaForCausalLM(LlamaConfig(**SMALL))) == {}
    assert native_gates(build("lfm3", use_attention_gate=False)) == {}
    assert row_of(nn.Linear(2, 3)) is None


def test_what_cannot_be_shown_is_refused() -> None:
    gate = next(iter(native_gates(build("afmoe")).values()))
    with pytest.raises(ShapeError, match=rf"reads {D} channels, and got shape \(2, 7, 41\)"):
        gate.logits(torch.randn(B, T, D - 1))
    gate.layer.weight = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"stored as torch.uint8.*logits\(\) and values\(\) work"):
        _ = gate.weight_HGD
    assert repr(gate) == "NativeGate('output:elementwise:sigmoid', gate_proj of AfmoeAttention)"


@pytest.mark.parametrize("case", CASES)
def test_gates_shows_attached_and_native_ones_alike(case: str) -> None:
    model = build(case, torch.float32)
    assert gates(model).keys() == native_gates(model).keys()
    other = attach(LlamaForCausalLM(LlamaConfig(**LLAMA)), "paper")
    for one in (*gates(model).values(), *gates(other).values()):
        x = torch.randn(2, 3, one.n_in)
        assert one(x).shape == one.logits(x).shape == (2, 3, *one.shape_HG)
        assert one.spec.position == "output"


@pytest.mark.parametrize(
    "options", [{}, {"qkv_bias": True}, {"qkv_bias": True, "scale_norm": True, "norm_layer": nn.LayerNorm}]
)
@pytest.mark.parametrize("kind", ["Attention", "AttentionRope"])
def test_timm_multiplies_by_what_the_view_says(timm_attention: Any, kind: str, options: dict[str, Any]) -> None:
    """What timm's own module projects, with its gate and without one; and nothing but a bias where the gate is shut."""
    torch.manual_seed(0)
    module = getattr(timm_attention, kind)(D, H, gated=True, **options).double().eval()
    nn.init.normal_(module.gate.weight, std=5 * D**-0.5)
    (gate,) = native_gates(nn.ModuleList([module])).values()
    x, found = torch.randn(B, T, D, dtype=torch.float64), []
    module.proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        module(x)
        own, module.gate = module.gate, None
        module(x)
        module.gate = own
        gated, plain = found
        assert torch.equal(gated, plain * gate.values(x).flatten(2))
        assert (gated - plain).abs().max() > 0.1
        gate.weight_HGD.zero_()
        module(x)
        if gate.bias_HG is None:
            assert torch.equal(found[-1], plain / 2)
            return
        gate.bias_HG.fill_(-1e3)
        assert torch.equal(module(x), module.proj.bias.expand(B, T, D))


LLAMA = {
    "vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 29,
}  # fmt: skip
