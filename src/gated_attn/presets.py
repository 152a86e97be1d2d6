"""Named gate specs: the paper's, the blogs', and what other projects ship, so that `GateSpec.parse("lfm3")` works."""

from __future__ import annotations

from typing import NamedTuple


class Preset(NamedTuple):
    """A named spec: its text, and who uses it under which name."""

    text: str
    used_by: str


PRESETS: dict[str, Preset] = {
    "paper": Preset("output:elementwise:sigmoid", "arXiv:2505.06708 G1, elementwise_attn_output_gate"),
    "paper-headwise": Preset("output:headwise:sigmoid", "arXiv:2505.06708 G1 headwise, headwise_attn_output_gate"),
    "nanogpt": Preset("output:headwise:sigmoid,in=12,init=half", "modded-nanogpt record of 2025-08-23, attn_gate"),
    "identity": Preset("output:headwise:2sigmoid,init=identity", "marin attn_gate; starts as the ungated model"),
    "blog": Preset("output:elementwise:sigmoid,bias=-2", "tutorial posts: gate mostly shut at the start"),
    "qwen3-next": Preset("output:elementwise:sigmoid", "Qwen3-Next, attn_output_gate, [q|g] per head in q_proj"),
    "qwen3.5": Preset("output:elementwise:sigmoid", "Qwen3.5, attn_output_gate, [q|g] per head in q_proj"),
    "lfm3": Preset("output:headwise:sigmoid", "LFM3, use_attention_gate, g_proj"),
    "afmoe": Preset("output:elementwise:sigmoid", "AFMoE (Trinity), gate_proj"),
    "laguna": Preset("output:headwise:softplus", "Laguna, gating per head, g_proj"),
    "laguna-elementwise": Preset("output:elementwise:softplus", "Laguna, gating per element, g_proj"),
    "step": Preset("output:headwise:sigmoid", "Step-3.5/3.7, use_head_wise_attn_gate, g_proj"),
    "olmo-core": Preset("output:headwise:sigmoid", "OLMo-core GateConfig headwise, w_g"),
    "olmo-core-elementwise": Preset("output:elementwise:sigmoid", "OLMo-core GateConfig elementwise, w_g"),
    "megatron": Preset("output:elementwise:sigmoid", "Megatron-LM attention_output_gate, in linear_qkv"),
    "megatron-headwise": Preset("output:headwise:sigmoid", "Megatron-LM (dev) head_wise_attn_gate, tail rows of linear_qkv"),
    "spark": Preset("output:elementwise:sigmoid", "Muse Spark/Glimmer, gate_proj"),
    "x-transformers": Preset("output:elementwise:sigmoid,init=half", "x-transformers attn_gate_values, to_v_gate"),
    "parameter-golf": Preset("output:headwise:2sigmoid,in=12,init=identity", "parameter-golf, gate_w"),
    "alignment": Preset("output:elementwise:2sigmoid,bias=0,init=identity", "stay1to0 gated_FT (arXiv:2606.09068), gate_proj_myself"),
    "navjak": Preset("output:elementwise:sigmoid,source=query,bias=0", "navjak gated_attention, gate_w: reads the query, not the paper's input"),
    "mla": Preset("output:elementwise:sigmoid,source=latent", "AXK2 q_gate_proj: reads the compressed query of latent attention"),
    "sink": Preset("output:headwise:sigmoid,source=lse", "gpt-oss and Granite sinks: one extra logit per head, as a gate"),
}  # fmt: skip
