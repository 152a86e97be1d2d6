"""`Canonical`: a gated Llama-like language model as plain tensors and sizes, which every export target is written from.

Shapes: D model width, H heads, E head width, G gate width (1 or E).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gated_attn.errors import UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf.layouts import fold_2sigmoid
from gated_attn.models.decoder import Decoder
from gated_attn.spec import GateSpec

DECODER = {
    "embed": "embed", "norm": "norm", "head": "head",
    "attn_norm": "layers.{i}.attn_norm", "ffn_norm": "layers.{i}.ffn_norm",
    "q": "layers.{i}.attn.q_proj", "k": "layers.{i}.attn.k_proj", "v": "layers.{i}.attn.v_proj", "o": "layers.{i}.attn.out_proj",
    "q_norm": "layers.{i}.attn.q_norm", "k_norm": "layers.{i}.attn.k_norm", "gate": "layers.{i}.attn.attn_gate",
    "ffn_gate": "layers.{i}.ffn.gate_proj", "ffn_up": "layers.{i}.ffn.up_proj", "ffn_down": "layers.{i}.ffn.down_proj",
}  # fmt: skip
LLAMA = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attn_norm": "model.layers.{i}.input_layernorm", "ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "q": "model.layers.{i}.self_attn.q_proj", "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj", "o": "model.layers.{i}.self_attn.o_proj",
    "q_norm": "model.layers.{i}.self_attn.q_norm", "k_norm": "model.layers.{i}.self_attn.k_norm",
    "gate": "model.layers.{i}.self_attn.attn_gate",
    "ffn_gate": "model.layers.{i}.mlp.gate_proj", "ffn_up": "model.layers.{i}.mlp.up_proj",
    "ffn_down": "model.layers.{i}.mlp.down_proj",
}  # fmt: skip
"""Canonical module name -> its path in a model; `{i}` is the layer."""

NORMS = ("norm", "attn_norm", "ffn_norm", "q_norm", "k_norm")
PROJECTIONS = ("q", "k", "v", "o")
ROPES = ("default", "linear", "llama3", "yarn")
"""Ways of stretching positions that every target computes alike at every length."""

_FOLDED = {"sigmoid": ("sigmoid", 1.0), "2sigmoid": ("sigmoid", 2.0), "softplus": ("softplus", 1.0)}
"""Activation -> (the one that stays in the gate, the power of two that moves into the out projection)."""


class GateWeights(NamedTuple):
    """g = activation(weight_HGD x + bias_HG), from the hidden state."""

    weight_HGD: Tensor
    bias_HG: Tensor | None
    activation: str


@dataclass(frozen=True)
class Canonical:
    """A model as targets read it.

    Fields:
        sizes: a transformers configuration's own words, `hidden_size` and so on.
        rope: transformers' `rope_parameters`, `partial_rotary_factor` included.
        tensors: `embed.weight`, `3.q.weight`, `3.q.bias`, ...: canonical module, behind its layer's number; without gates.
        gates: one per layer, None where a layer has none. Factors are in the out projections already.
        folded: whether any were.
        reasons: what the model has that no target can express.
        own: whether it is a Decoder, which a recipe trains.
    """

    sizes: dict[str, Any]
    rope: dict[str, Any]
    tensors: dict[str, Tensor]
    gates: tuple[GateWeights | None, ...]
    folded: bool
    reasons: tuple[str, ...]
    own: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["embed.weight"].dtype

    @property
    def qk_norm(self) -> bool:
        return "0.q_norm.weight" in self.tensors

    @property
    def has_bias(self) -> bool:
        """Whether any projection or gate has a bias."""
        gated = any(gate is not None and gate.bias_HG is not None for gate in self.gates)
        return gated or any(name.endswith(".bias") for name in self.tensors)


def paths(names: Mapping[str, str], layers: int) -> dict[str, str]:
    """Canonical module -> path, for every layer: `{"embed": "model.embed_tokens", "0.q": "model.layers.0.self_attn.q_proj"}`."""
    return {
        f"{i}.{name}" if "{i}" in path else name: path.format(i=i)
        for name, path in names.items()
        for i in range(layers if "{i}" in path else 1)
    }


def canonical(model: nn.Module, context: int | None = None) -> Canonical:
    """Read a `Decoder`, or transformers' Qwen3 or Llama with gates as `self_attn.attn_gate`; UnsupportedError for others.

    context: the longest sequence to promise, where the model itself does not say (a Decoder).
    """
    if isinstance(model, Decoder):
        names, (sizes, rope, reasons) = DECODER, _decoder(model, context or 2048)
    elif _model_type(model) in ("qwen3", "llama") and hasattr(model, "lm_head"):
        names, (sizes, rope, reasons) = LLAMA, _llama(model, context)
    else:
        raise UnsupportedError(
            f"cannot export a {type(model).__name__}; pass a gated_attn.models.Decoder, or transformers' Qwen3ForCausalLM or "
            "LlamaForCausalLM with gates attached (adapters merged)"
        )
    layers = sizes["num_hidden_layers"]
    wanted = paths(names, layers)
    tensors, unknown = _tensors(model, wanted, sizes["tie_word_embeddings"])
    reasons += [f"tensor {name}: no target has a place for it" for name in unknown[:3]]
    if rope["rope_type"] not in ROPES:
        reasons.append(f"rope_type {rope['rope_type']!r}; targets compute {', '.join(ROPES)} alike")
    if any("ffn" in name and name.endswith(".bias") for name in tensors):
        reasons.append("the feed-forward has biases, no target's has")
    modules, gates, folded = dict(model.named_modules()), [], False
    strays = (m.spec for path, m in modules.items() if isinstance(m, Gate) and path not in wanted.values())
    reasons += [
        f"gate {spec}: {why}"
        for spec in dict.fromkeys(strays)
        for why in gate_reasons(spec) or ["it lies elsewhere than at the output of its layer's attention"]
    ]
    for i in range(layers):
        gate = modules.get(wanted[f"{i}.gate"])
        assert gate is None or isinstance(gate, Gate)
        refused = [] if gate is None else gate_reasons(gate.spec)
        reasons += [f"layer {i}, gate {gate.spec}: {why}" for why in refused if gate is not None]
        gates.append(None if gate is None or refused else gate_weights(gate, sizes))
        factor = 1.0 if gate is None or refused else _FOLDED[gate.spec.activation][1]
        folded = folded or factor != 1.0
        if factor != 1.0:
            assert factor == 2.0  # the one fold there is
            tensors[f"{i}.o.weight"] = fold_2sigmoid(tensors[f"{i}.o.weight"])
    return Canonical(sizes, rope, tensors, tuple(gates), folded, tuple(_grouped(reasons)), isinstance(model, Decoder))


def gate_reasons(spec: GateSpec) -> list[str]:
    """Why no stock model has this gate; empty if some may."""
    return [
        why
        for refused, why in (
            (spec.position not in ("output", "weights"), f"position {spec.position}; stock models gate attention's output"),
            (spec.width == "pairwise", "one gate per query-key pair; stock models gate whole heads or channels"),
            (spec.source not in ("hidden", "constant"), f"source={spec.source}; stock gates read the hidden state"),
            (spec.activation not in _FOLDED, f"activation {spec.activation}; stock gates are sigmoid or softplus"),
            (spec.op != "mul", "op=add; stock gates multiply"),
            (spec.top_k is not None, f"top_k={spec.top_k}; stock gates keep every head"),
            (spec.fill, "fill; a stock gate that is shut gives 0"),
        )
        if refused
    ]  # fmt: skip


@torch.no_grad()
def gate_weights(gate: Gate, sizes: Mapping[str, Any]) -> GateWeights:
    """The gate as one full matrix: rank factors multiplied out (in float64, rounded once), unread channels 0, heads separate."""
    D, H = sizes["hidden_size"], sizes["num_attention_heads"]
    groups, G = gate.shape_HG
    if gate.n_in:
        weight, bias = gate.proj.weight.detach(), gate.proj.bias
        if gate.down is not None:
            weight = (weight.double() @ gate.down.weight.double()).to(weight.dtype)
        weight = torch.cat([weight, weight.new_zeros(len(weight), D - gate.n_in)], 1).cpu()
    else:
        assert gate.bias is not None
        bias, weight = gate.bias, torch.zeros(groups * G, D, dtype=gate.bias.dtype)
    weight_HGD = weight.view(groups, G, D).expand(H, G, D)
    bias_HG = None if bias is None or not bias.any() else bias.detach().cpu().view(groups, G).expand(H, G)
    return GateWeights(weight_HGD, bias_HG, _FOLDED[gate.spec.activation][0])


def _tensors(model: nn.Module, wanted: dict[str, str], tied: bool) -> tuple[dict[str, Tensor], list[str]]:
    """(canonical tensors, names of those that have no canonical place)."""
    places = {path: name for name, path in wanted.items()}
    gates = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Gate))
    tensors, unknown = {}, []
    for name, tensor in model.state_dict().items():
        path, _, kind = name.rpartition(".")
        if name.startswith(gates) or (tied and path == wanted["head"]):
            continue
        if path in places and kind in ("weight", "bias"):
            tensors[f"{places[path]}.{kind}"] = tensor.detach().cpu()
        else:
            unknown.append(name)
    return tensors, unknown


def _decoder(model: Decoder, context: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(sizes, rope, reasons) of the reference decoder."""
    c = model.decoder_config
    attentions: list[Any] = [layer.attn for layer in model.layers]
    first, rope, windows = attentions[0], attentions[0].rope, [a.window for a in attentions]
    sizes = {
        "vocab_size": c.vocab_size, "hidden_size": c.dim, "intermediate_size": c.ffn_dim, "num_hidden_layers": c.layers,
        "num_attention_heads": first.heads, "num_key_value_heads": first.kv_heads, "head_dim": first.head_dim,
        "max_position_embeddings": context, "rms_norm_eps": c.norm_eps, "tie_word_embeddings": c.tie_embeddings,
        "initializer_range": c.initializer_range, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    reasons = [
        why
        for refused, why in (
            (any(windows), f"windows {windows}; targets are exported with full attention"),
            (not all(a.causal for a in attentions), "attention is not causal"),
            (any(a.q_down is not None for a in attentions), "queries are compressed (q_latent_dim)"),
            (rope is None or any(a.rope != rope for a in attentions), "the layers do not share one rotary embedding"),
            (any(m.eps != c.norm_eps for m in model.modules() if isinstance(m, nn.RMSNorm)), "the norms' eps differ"),
        )
        if refused
    ]  # fmt: skip
    if rope is None:
        return sizes, {"rope_type": "default"}, reasons
    scaling = dict(rope.scaling or {"rope_type": "default"})
    return sizes, {**scaling, "rope_theta": rope.theta, "partial_rotary_factor": rope.fraction}, reasons


def _llama(model: nn.Module, context: int | None) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(sizes, rope, reasons) of a transformers model that is written as Llama is."""
    c: Any = model.config
    words = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "bos_token_id",
        "eos_token_id", "pad_token_id",
    )  # fmt: skip
    sizes = {word: getattr(c, word) for word in words} | ({"max_position_embeddings": context} if context else {})
    kinds = getattr(c, "layer_types", None) or ["full_attention"]
    reasons = [f"hidden_act {c.hidden_act!r}; every target has silu"] if c.hidden_act != "silu" else []
    reasons += (
        ["sliding attention; targets are exported with full attention"] if set(kinds) != {"full_attention"} else []
    )
    return sizes, {"partial_rotary_factor": 1.0, **c.rope_parameters}, reasons


def _model_type(model: nn.Module) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


def _grouped(reasons: list[str]) -> list[str]:
    """One reason for many layers: the first layer's, with how many more have it."""
    seen: dict[str, list[str]] = {}
    for reason in reasons:
        seen.setdefault(reason.partition(", ")[2] if reason.startswith("layer ") else reason, []).append(reason)
    return [same[0] if len(same) == 1 else f"{len(same)} layers, {why}" for why, same in seen.items()]
