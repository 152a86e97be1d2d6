"""`export`: a gated model as a folder that stock transformers loads, with no code of ours, and that is checked to be the same.

Shapes: B batch, T tokens, V vocabulary, D model width, H heads, E head width, G gate width (1 or E).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.codec import drafted
from gated_attn.errors import UnsupportedError, suggestion
from gated_attn.hf.canonical import LLAMA, NORMS, PROJECTIONS, Canonical, GateWeights, canonical, paths
from gated_attn.hf.layouts import Sizes, expand_headwise, fold_2sigmoid, join, to_zero_centred
from gated_attn.hf.proof import NEW_TOKENS, stock_transformers, verify_export


@dataclass(frozen=True)
class Target:
    """How one stock architecture writes a `Canonical`.

    Fields:
        names: canonical module -> path there.
        options: the part of its configuration that no other target shares.
        activation: of its gate; None has no gate.
        elementwise: whether its gate may have one value per channel.
        qk_norm: whether it normalises queries and keys.
        fused: q_proj holds [query; gate] per head, so the gate has a bias where q_proj has.
        zero_centred: its norms multiply by 1 + weight.
        partial: whether it can rotate a part of the channels only.
    """

    names: Mapping[str, str]
    options: Callable[[Canonical], dict[str, Any]]
    activation: str | None = None
    elementwise: bool = False
    qk_norm: bool = True
    fused: bool = False
    zero_centred: bool = False
    partial: bool = False


def _kinds(c: Canonical) -> list[str]:
    return ["full_attention"] * c.sizes["num_hidden_layers"]


_LFM3 = {
    **LLAMA, "norm": "model.embedding_norm", "attn_norm": "model.layers.{i}.operator_norm", "ffn_norm": "model.layers.{i}.ffn_norm",
    "gate": "model.layers.{i}.self_attn.g_proj", "ffn_gate": "model.layers.{i}.feed_forward.w1",
    "ffn_up": "model.layers.{i}.feed_forward.w3", "ffn_down": "model.layers.{i}.feed_forward.w2",
}  # fmt: skip

TARGETS: dict[str, Target] = {
    "qwen3": Target(LLAMA, lambda c: {"rope_parameters": c.rope, "layer_types": _kinds(c)}),
    "llama": Target(LLAMA, lambda c: {"rope_parameters": c.rope}, qk_norm=False),
    "lfm3": Target(
        _LFM3,
        lambda c: {
            "rope_parameters": {"full_attention": c.rope}, "layer_types": _kinds(c), "use_attention_gate": True,
            "use_sandwich_norm": False, "norm_eps": c.sizes["rms_norm_eps"],
        },
        activation="sigmoid",
    ),
    "qwen3_5_text": Target(
        LLAMA, lambda c: {"rope_parameters": c.rope, "layer_types": _kinds(c)}, activation="sigmoid", elementwise=True,
        fused=True, zero_centred=True, partial=True,
    ),
    "laguna": Target(
        {**LLAMA, "gate": "model.layers.{i}.self_attn.g_proj"},
        lambda c: {
            "rope_parameters": {"full_attention": c.rope}, "layer_types": _kinds(c),
            "mlp_layer_types": ["dense"] * c.sizes["num_hidden_layers"],
            "gating": "per-element" if _width(c) > 1 else "per-head",
        },
        activation="softplus", elementwise=True, partial=True,
    ),
}  # fmt: skip
"""model_type -> how to write it, in the order that `auto` tries them."""

ENGINES = {"qwen3_5_text": {"full_attention_interval": 1, "attn_output_gate": True}}
"""Keys that other engines read from config.json (llama.cpp, vLLM) and transformers does not need."""


@dataclass(frozen=True)
class ExportReport:
    """What was written and how far it is from its source.

    error and padded_error are the largest absolute differences of logits on random tokens, without padding and at the real
    tokens of a batch padded on both sides; tolerance is what was allowed. `tokens` generated tokens were the same.
    """

    folder: Path
    target: str
    parameters: int
    error: float
    padded_error: float
    tolerance: float
    tokens: int
    notes: tuple[str, ...] = ()


def export(
    model: nn.Module, folder: str | os.PathLike[str], target: str = "auto", *, context: int | None = None
) -> ExportReport:
    """Write `model` as a stock transformers model, reload it with `AutoModelForCausalLM`, and compare.

    Args:
        model: a `Decoder`, or transformers' Qwen3 (Llama) with gates attached at `self_attn.attn_gate`.
        folder: where to; it appears when everything in it has been verified, and must not exist.
        target: a name in `TARGETS`, or "auto", the first that fits: `qwen3` or `llama` without gates, `lfm3` for headwise and
            `qwen3_5_text` for other sigmoid gates, `laguna` for softplus. `qwen3_5_text` takes headwise gates too, each row
            once per channel. 2sigmoid becomes sigmoid with doubled out projections, and a layer without a gate next to gated
            ones a gate of 1/2 with the same: both exact.
        context: max_position_embeddings of the configuration; default the model's own, 2048 for a Decoder.

    Raises:
        UnsupportedError: no target, or not the one asked for, can express the model; a reason for each.
        VerificationError: the reloaded model differs: missing or unexpected keys, logits, greedy tokens.
        CheckpointError: the folder is there.

    Example:
        >>> export(Decoder(config), "out").target
        'lfm3'
    """
    stock_transformers()
    final = Path(folder)
    with drafted(final) as draft:
        source = canonical(model, context)
        name = _choose(source, target)
        parameters = _write(name, source, draft)
        if (generation := getattr(model, "generation_config", None)) is not None:
            generation.save_pretrained(draft)
        error, padded, allowed = verify_export(model, draft)
    return ExportReport(final, name, parameters, error, padded, allowed, 2 * NEW_TOKENS, _notes(TARGETS[name], source))


def _choose(source: Canonical, target: str) -> str:
    """The target's name, or the first that fits; UnsupportedError with each one's reasons."""
    if target != "auto" and target not in TARGETS:
        raise UnsupportedError(
            f"unknown target {target!r}; known: auto, {', '.join(TARGETS)}{suggestion(target, ['auto', *TARGETS])}"
        )
    if source.reasons:
        raise UnsupportedError(
            f"target={target!r}: this model cannot be exported", {"every target": "; ".join(source.reasons)}
        )
    refused = {name: "; ".join(why_not(name, source)) for name in TARGETS}
    fits = [name for name, reason in refused.items() if not reason]
    if target == "auto" and fits:
        return fits[0]
    if target in fits:
        return target
    hint = f"; {' and '.join(fits)} can" if fits else _about_norms(source)
    asked = refused if target == "auto" else {target: refused[target]}
    raise UnsupportedError(f"target={target!r} cannot express this model{hint}", asked)


def _about_norms(c: Canonical) -> str:
    """What can be done where no target fits a model without query and key norms, which all that have a gate have."""
    if c.qk_norm:
        return ""
    if c.own:
        return "; to have query and key norms, train with --set model.qk_norm=true"
    if not any(c.gates):
        return ""
    return (
        "; no stock model has a gate without query and key norms: keep this one with model.save_pretrained(folder), which "
        "gated_attn.hf loads, or train one that has them, such as Qwen3"
    )


def why_not(name: str, c: Canonical) -> list[str]:
    """What keeps this target, of all, from expressing the model; empty if it can."""
    target, gated = TARGETS[name], [gate for gate in c.gates if gate is not None]
    ungated = [i for i, gate in enumerate(c.gates) if gate is None]
    others = sorted({gate.activation for gate in gated} - {target.activation})
    biased = any(gate.bias_HG is not None for gate in gated)
    rotated = c.rope.get("partial_rotary_factor", 1.0)
    lossy = _lossy_norms(c) if target.zero_centred else []
    reasons = [
        why
        for refused, why in (
            (target.activation is None and gated, f"{name} has no gate"),
            (target.activation and others, f"{name}'s gate is {target.activation}, the model has {', '.join(others)}"),
            (target.activation == "softplus" and ungated, f"layers {ungated} have no gate, and softplus(0) is no power of 2"),
            (target.activation and not target.elementwise and _width(c) > 1, f"{name}'s gate has 1 value a head, not {_width(c)}"),
            (target.activation and not target.fused and biased, f"{name}'s gate has no bias"),
            (target.qk_norm and not c.qk_norm, f"{name} normalises queries and keys, and the model does not"),
            (not target.qk_norm and c.qk_norm, f"{name} does not normalise queries and keys"),
            (not target.partial and rotated != 1, f"{name} rotates every channel of a head, the model a share of {rotated:g}"),
            (lossy, f"{name} stores norm weights less 1, not exact in {c.dtype} ({', '.join(lossy[:2])}); export model.float()"),
        )
        if refused
    ]  # fmt: skip
    if not reasons:
        from huggingface_hub.errors import StrictDataclassError

        try:  # sizes that its configuration refuses, or an architecture that this transformers does not have
            _config(name, c)
        except (ValueError, StrictDataclassError) as error:
            reasons.append(" ".join(str(error).split()))
    return reasons


def _lossy_norms(c: Canonical) -> list[str]:
    """Norms whose w - 1 the model's dtype cannot hold."""
    found = []
    for name, scale in c.tensors.items():
        try:
            if _module(name) in NORMS:
                _zero_centred(scale, c.dtype)
        except UnsupportedError:
            found.append(name)
    return found


def _zero_centred(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """w = scale - 1, exact or UnsupportedError in a narrow dtype; float32's own rounding is within the tolerance."""
    narrow = torch.finfo(dtype).eps > torch.finfo(torch.float32).eps
    return to_zero_centred(scale, dtype) if narrow else scale - 1


def _write(name: str, c: Canonical, folder: Path) -> int:
    """config.json and the weights; the number of parameters."""
    from huggingface_hub import save_torch_state_dict

    tensors = state_dict(name, c)
    folder.mkdir(parents=True)
    _config(name, c).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | ENGINES.get(name, {})
    if TARGETS[name].partial and name in ENGINES:  # at the top level too, where llama.cpp looks for it
        config["partial_rotary_factor"] = c.rope["partial_rotary_factor"]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def _config(name: str, c: Canonical) -> Any:
    """The configuration object of this target."""
    transformers = stock_transformers()
    options = {**c.sizes, "attention_bias": c.has_bias, **TARGETS[name].options(c)}
    config = transformers.AutoConfig.for_model(name, **options)
    config.architectures = [transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
    config.dtype = str(c.dtype).removeprefix("torch.")
    return config


@torch.no_grad()
def state_dict(name: str, c: Canonical) -> dict[str, Tensor]:
    """The tensors as this target names and lays them out."""
    target, tensors = TARGETS[name], dict(c.tensors)
    for i, gate in enumerate(c.gates if target.activation else ()):
        if gate is None:  # sigmoid(0) = 1/2
            zeros = torch.zeros(c.sizes["num_attention_heads"], 1, c.sizes["hidden_size"], dtype=c.dtype)
            gate = GateWeights(zeros, None, "sigmoid")
            tensors[f"{i}.o.weight"] = fold_2sigmoid(tensors[f"{i}.o.weight"])
        _place_gate(target, c, tensors, i, gate)
    if c.has_bias:  # one switch for all projections
        for i in range(len(c.gates)):
            for key in (f"{i}.{name}" for name in PROJECTIONS):
                tensors.setdefault(f"{key}.bias", tensors[f"{key}.weight"].new_zeros(len(tensors[f"{key}.weight"])))
    if target.zero_centred:
        tensors |= {key: _zero_centred(t, c.dtype) for key, t in tensors.items() if _module(key) in NORMS}
    places = paths(target.names, len(c.gates))
    return {
        f"{places[module]}.{kind}": t.clone()
        for (module, _, kind), t in ((key.rpartition("."), t) for key, t in tensors.items())
    }


def _place_gate(target: Target, c: Canonical, tensors: dict[str, Tensor], layer: int, gate: GateWeights) -> None:
    """Write the gate's rows as g_proj or behind each head's queries."""
    width = _rows_per_head(target, c)
    gate_ND = _per_channel(gate.weight_HGD, width)
    if not target.fused:
        tensors[f"{layer}.gate.weight"] = gate_ND
        return
    sizes = Sizes(*(c.sizes[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")))
    query_ND, query_N = tensors[f"{layer}.q.weight"], tensors.get(f"{layer}.q.bias")
    parts = {"weight": (query_ND, gate_ND)}
    if query_N is not None or gate.bias_HG is not None:
        zeros_N = query_ND.new_zeros(len(query_ND))
        gate_N = zeros_N if gate.bias_HG is None else _per_channel(gate.bias_HG, width)
        parts["bias"] = (zeros_N if query_N is None else query_N, gate_N)
    for kind, (q, g) in parts.items():
        joined = join({"q": q, "gate": g.to(q.dtype)}, sizes, "per_head", width="elementwise")
        tensors[f"{layer}.q.{kind}"] = joined["q"]


def _per_channel(rows: Tensor, width: int) -> Tensor:
    """(H, G, ...) -> (H * width, ...): the same row for every channel of a head where G is 1."""
    flat = rows.flatten(0, 1)
    return flat if rows.shape[1] == width else expand_headwise(flat, width)


def _notes(target: Target, c: Canonical) -> tuple[str, ...]:
    gated = [gate for gate in c.gates if gate is not None]
    ungated = [i for i, gate in enumerate(c.gates) if gate is None]
    rows = _rows_per_head(target, c)
    repeated = any(gate.weight_HGD.shape[1] < rows for gate in gated)
    return tuple(
        note
        for says, note in (
            (c.folded, "2sigmoid: sigmoid, with doubled out projections"),
            (target.activation and ungated, f"layers {ungated} without a gate: gates of 1/2, with doubled out projections"),
            (target.activation and repeated, f"headwise gates: each row {rows} times, once per channel"),
            (target.fused and c.has_bias, "attention_bias: true; transformers reads it, other engines may not"),
        )
        if says
    )  # fmt: skip


def _rows_per_head(target: Target, c: Canonical) -> int:
    """Gate rows per head that the target stores."""
    return c.sizes["head_dim"] if target.fused else _width(c)


def _width(c: Canonical) -> int:
    """Gate values per head: the widest layer's."""
    return max((gate.weight_HGD.shape[1] for gate in c.gates if gate is not None), default=1)


def _module(key: str) -> str:
    """`q_norm` of `3.q_norm.weight`."""
    return key.split(".")[-2]
