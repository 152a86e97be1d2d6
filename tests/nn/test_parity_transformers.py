"""`GatedAttention` with loaded weights equals the gated attention layers that transformers ships.

The layers run inside their own models, so masks and rotary positions are the models' own; the attention input is recorded
on its way in and given to ours. Sizes: 1 < KV heads < heads, so that no layout can be mistaken for another.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gated_attn.nn import GatedAttention, Rope

pytest.importorskip("transformers")

HEADS, KV_HEADS, HEAD_DIM, DIM, TOKENS, VOCAB = 6, 2, 8, 40, 13, 31
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"transformers.models.{name}")
    except ImportError:
        pytest.skip(f"this transformers has no {name}")


def _qwen3_5() -> Any:
    module = _module("qwen3_5")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = module.Qwen3_5TextConfig(**SIZES, layer_types=["full_attention"] * 2, rope_parameters=rope)
    return module.Qwen3_5ForCausalLM(config)


def _qwen3_next() -> Any:
    module = _module("qwen3_next")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = module.Qwen3NextConfig(**SIZES, layer_types=["full_attention"] * 2, num_experts=0, rope_parameters=rope)
    return module.Qwen3NextForCausalLM(config)


def _lfm3() -> Any:
    module = _module("lfm3")
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    config = module.Lfm3Config(
        **SIZES,
        layer_types=["full_attention"] * 2,
        use_attention_gate=True,
        pad_token_id=0,
        use_sandwich_norm=False,
        rope_parameters=rope,
    )
    return module.Lfm3ForCausalLM(config)


def _laguna(gating: str) -> Callable[[], Any]:
    def build() -> Any:
        module = _module("laguna")
        config = module.LagunaConfig(
            **SIZES,
            layer_types=["full_attention"] * 2,
            mlp_layer_types=["dense"] * 2,
            num_attention_heads_per_layer=[HEADS] * 2,
            gating=gating,
        )
        return module.LagunaForCausalLM(config)

    return build


CASES: dict[str, tuple[Callable[[], Any], str, bool]] = {
    "qwen3_5": (_qwen3_5, "qwen3.5", True),
    "qwen3_next": (_qwen3_next, "qwen3-next", True),
    "lfm3": (_lfm3, "lfm3", False),
    "laguna per head": (_laguna("per-head"), "laguna", False),
    "laguna per element": (_laguna("per-element"), "laguna-elementwise", False),
}
"""name -> (tiny model, our spec, whether its norms are stored as offsets from 1)."""


def _rope(model: Any) -> Rope:
    """RoPE as the model's config states it, whichever of its shapes the family uses."""
    parameters = dict(model.config.rope_parameters)
    parameters = dict(parameters.get("full_attention", parameters))
    fraction = parameters.pop("partial_rotary_factor", None) or 1.0
    theta = parameters.pop("rope_theta")
    scaling = None if parameters["rope_type"] == "default" else parameters
    return Rope(HEAD_DIM, theta=theta, fraction=fraction, scaling=scaling)


def _load(theirs: Any, spec: str, rope: Rope, zero_centred: bool) -> GatedAttention:
    ours = GatedAttention(
        DIM, HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, gate=spec, qk_norm=True, norm_eps=theirs.q_norm.eps
        if hasattr(theirs.q_norm, "eps") else theirs.q_norm.variance_epsilon, rope=rope, causal=True,
    )  # fmt: skip
    state = {
        name.replace("o_proj", "out_proj"): tensor.detach().clone() for name, tensor in theirs.state_dict().items()
    }
    if "g_proj.weight" in state:
        state["attn_gate.proj.weight"] = state.pop("g_proj.weight")
    else:  # q_proj is [query | gate] per query head
        packed = state["q_proj.weight"].view(HEADS, 2, HEAD_DIM, DIM)
        state["q_proj.weight"] = packed[:, 0].reshape(-1, DIM)
        state["attn_gate.proj.weight"] = packed[:, 1].reshape(-1, DIM)
    for norm in ("q_norm.weight", "k_norm.weight"):
        state[norm] = state[norm] + (1.0 if zero_centred else 0.0)
    ours.load_state_dict(state)
    return ours


@pytest.mark.parametrize("std", [0.02, 1.0, 5.0])
@pytest.mark.parametrize("case", CASES)
def test_attention_layers_equal_transformers(case: str, std: float) -> None:
    build, spec, zero_centred = CASES[case]
    torch.manual_seed(7)
    model = build().eval()
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    assert len(layers) == 2
    seen: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        for name, parameter in layer.named_parameters():
            torch.nn.init.normal_(parameter, std=std * parameter.shape[-1] ** -0.5 if "norm" not in name else 0.3)
        layer.register_forward_hook(
            lambda _, args, kwargs, out: seen.append((kwargs.get("hidden_states", args[0] if args else None), out[0])),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(torch.randint(VOCAB, (3, TOKENS)), use_cache=False)
        for layer, (hidden, expected) in zip(layers, seen, strict=True):
            out = _load(layer, spec, _rope(model), zero_centred)(hidden)
            scale = expected.abs().max()
            # float32 rounding of a sum over at most max(DIM, H * E) products, on both sides
            assert (out - expected).abs().max() <= 2 * 48 * torch.finfo(torch.float32).eps * scale
            assert scale > 0
