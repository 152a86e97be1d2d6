"""How many numbers a model and its gates learn, and how many operations their linear layers do.

Shapes: H heads, E head width, D model width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from gated_attn.gate import Gate
from gated_attn.hf.groups import Attention, Rows, attentions, gate_parameters, owner


@dataclass(frozen=True)
class Count:
    """Parameters, and forward FLOPs per token of the linear layers (2 per weight, as torch's flop counter says)."""

    parameters: int
    gate_parameters: int
    flops: int
    gate_flops: int

    @property
    def parameter_overhead(self) -> float:
        """Gate parameters in % of the rest."""
        return 100 * self.gate_parameters / max(self.parameters - self.gate_parameters, 1)

    @property
    def flop_overhead(self) -> float:
        """Gate FLOPs in % of the other linear layers'."""
        return 100 * self.gate_flops / max(self.flops - self.gate_flops, 1)

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters, {self.gate_parameters:,} of them in gates (+{self.parameter_overhead:.3g}%); "
            f"{self.flops:,} FLOPs per token in linear layers, {self.gate_flops:,} of them in gates (+{self.flop_overhead:.3g}%)"
        )


def count(model: nn.Module) -> Count:
    """How many numbers the model and its gates learn, and what their linear layers compute per token.

    A headwise gate is D*H weights, an elementwise one D*H*E; a gate of the queries is applied once per head, and a pairwise
    gate's key map once per KV head. A native gate fused with the queries counts as its rows.

    FLOPs are those of a forward in which every token passes every linear layer once, and ALBERT's shared layers as often as its
    config says. Not counted: attention scores, which depend on the length; the product of a pairwise gate's logits; experts and
    routers, which transformers keep as tensors outside linear layers; further passes of other models that go through the same
    layer again (HRM). A pooler, which reads one token, counts for all.
    """
    owners = {attention.name: attention for attention in attentions(model)}
    parameters, inside = dict(model.named_parameters()), set(gate_parameters(model))
    total = sum(parameter.numel() for parameter in parameters.values())
    gate = sum(parameters[name].numel() for name in inside)
    applied, passes = _applications(model, owners), _passes(model)
    native = {id(model.get_submodule(attention.gate_layer)) for attention in owners.values() if attention.gate_layer}
    flops, gate_flops = 0, 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and (isinstance(module, nn.Linear) or hasattr(module, "nx")):
            n = 2 * weight.numel() * applied.get(id(module), 1) * passes.get(id(module), 1)
            flops += n
            gate_flops += n if id(module) in applied or id(module) in native else 0
    for attention in owners.values():
        for name, rows in attention.outputs.items():
            weight = parameters[name]
            if "gate" in rows.slices and name not in inside:
                share = _share(weight, rows, "gate")
                gate += share
                gate_flops += 2 * share if weight.dim() > 1 else 0
            if attention.q_layer is None and weight.dim() > 1:  # nn.MultiheadAttention's, which no linear layer holds
                flops += 2 * weight.numel()
    return Count(total, gate, flops, gate_flops)


def _applications(model: nn.Module, owners: Mapping[str, Attention]) -> dict[int, int]:
    """id of every part of a `Gate` -> how often it is applied to a token when the gate is."""
    return {
        id(layer): _calls(gate, owner(owners, name), part)
        for name, gate in model.named_modules()
        if isinstance(gate, Gate)
        for part, layer in gate.named_modules()
    }


def _calls(gate: Gate, attention: Attention | None, part: str) -> int:
    """How often per token one of a gate's linear layers is applied."""
    heads = gate.shape_HG[0]
    if gate.spec.width == "pairwise":
        return attention.sizes.kv_heads if part.startswith("key_proj") and attention is not None else heads
    return heads if gate.spec.source == "query" else 1


def _passes(model: nn.Module) -> Counter[int]:
    """id of every module in one of ALBERT's layer groups -> how often a forward goes through the group."""
    found: Counter[int] = Counter()
    for module in model.modules():
        groups = getattr(module, "albert_layer_groups", None)
        if isinstance(groups, nn.ModuleList):
            layers = int(module.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
            for layer in range(layers):
                found.update(map(id, groups[int(layer / (layers / len(groups)))].modules()))
    return found


def _share(parameter: Tensor, rows: Rows, role: str) -> int:
    """How many of the parameter's numbers are in a role's rows."""
    return sum(one.stop - one.start for one in rows.slices[role]) * parameter.numel() // parameter.shape[rows.axis]
