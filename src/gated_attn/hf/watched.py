"""What `GateMonitor` reads of one gate: values while the model runs, and norms, gradients and what has moved between steps.

An attached gate is a module of its own. A gate that the model was born with is rows of a projection, which may hold the queries
too and may be inside a LoRA layer.

Shapes: B batch, T tokens, D width of the gate's source, H heads (1 for shared and dense gates), G gate width (1 or E),
N output channels of a projection.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_attn.attention.activations import activate, widen
from gated_attn.errors import UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf.attach import gates
from gated_attn.hf.families import read
from gated_attn.hf.native import NativeGate
from gated_attn.spec import GateSpec

OUTER = ("proj.weight", "proj.bias", "bias", "sink_key")
"""Parameters of a `Gate` whose rows belong to heads, where its spec has a value for each."""


class Part(NamedTuple):
    """A parameter of a gate, or the rows of it that are the gate's: the last `rows` of each of `heads` heads (0: all of it)."""

    parameter: nn.Parameter
    heads: int = 0
    rows: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """The gate's part of the parameter, its gradient or an earlier copy, (H, rows, ...) or whole, in float64."""
        tensor = whole(tensor.detach())
        part = tensor.unflatten(0, (self.heads, -1))[:, -self.rows :] if self.heads else tensor
        return part.double().cpu()


class Watched(ABC):
    """One gate as the monitor sees it. It keeps what the gate was when the run began, so that change can be told.

    Fields:
        reads_scores: its values are known inside attention only.
    """

    spec: GateSpec
    shape_HG: tuple[int, int]
    reads_scores = False

    @property
    @abstractmethod
    def layer(self) -> nn.Module:
        """The module whose forward shows the gate's values."""

    @property
    @abstractmethod
    def parts(self) -> list[Part]:
        """Everything that the gate learns alone: what it shares with the queries is left out."""

    @abstractmethod
    def values(self, inputs: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
        """(g, g0), each (B, T, H, G): the gate's values in a call of `layer`, and what the start's weights give there."""

    @property
    def trains(self) -> bool:
        """Whether anything of the gate's own is trainable."""
        return any(part.parameter.requires_grad for part in self.parts)

    def norm(self) -> float:
        """Norm of all of the gate's parameters."""
        return math.sqrt(sum(float(part.of(part.parameter).square().sum()) for part in self.parts))

    def gradient(self) -> tuple[float, list[int]]:
        """(norm of the whole gate's gradient, heads whose every row has none)."""
        H = self.shape_HG[0]
        total, rows_H = 0.0, torch.zeros(H, dtype=torch.float64)
        by_head = False
        for part in self.parts:
            if part.parameter.grad is None or not part.parameter.requires_grad:
                continue
            square = part.of(part.parameter.grad).square()
            total += float(square.sum())
            if part.heads:
                rows_H += square.flatten(1).sum(1)
                by_head = True
        dead = [head for head in range(H) if rows_H[head] == 0] if by_head and H > 1 else []
        return math.sqrt(total), dead

    def moved(self) -> float | None:
        """Root mean square of what the parameters of a gate that reads scores moved since the start; None for others."""
        return None

    def sink_logit(self) -> float | None:
        """Mean logit of the sink that the gate is; None for others."""
        return None


class WatchedModule(Watched):
    """A `Gate`, whose output is its values. The start is a copy of the module."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.spec, self.shape_HG = gate, gate.spec, gate.shape_HG
        self.reads_scores = gate.spec.source == "lse" or gate.spec.width == "pairwise"
        self._start = twin(gate)

    @property
    def layer(self) -> nn.Module:
        return self.gate

    @property
    def parts(self) -> list[Part]:
        H = self.shape_HG[0]
        headed = self.spec.source != "query" and self.spec.width != "pairwise"
        return [
            Part(parameter, H, len(parameter) // H)
            if headed and name in OUTER and len(parameter) % H == 0
            else Part(parameter)
            for name, parameter in self.gate.named_parameters()
        ]

    def values(self, inputs: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
        return whole(output), whole(self._start(*inputs))

    def moved(self) -> float | None:
        if not self.reads_scores:
            return None
        pairs = zip(self.parts, self._start.parameters(), strict=True)
        squares = sum(float((part.of(part.parameter) - part.of(start)).square().sum()) for part, start in pairs)
        return math.sqrt(squares / sum(part.parameter.numel() for part in self.parts))

    def sink_logit(self) -> float | None:
        if self.spec.source != "lse" or self.gate.bias is None:
            return None
        return float(whole(self.gate.bias.detach()).double().mean())


class WatchedRows(Watched):
    """A native gate, whose logits are rows of what its projection gives; nothing is computed twice but the start's values.

    Its parts are the gate's rows of the projection's weight and bias, of LoRA's B factors, and the bias beside it. LoRA's A
    factors belong to a gate whose projection is its own; where the queries share them they are no part.
    """

    def __init__(self, native: NativeGate) -> None:
        self.native, self.spec, self.shape_HG = native, native.spec, native.shape_HG
        self.fused = native.row.layout == "per_head"
        queries = int(read(native.module, native.row.head_dim)) if self.fused else 0
        self._channels = self.shape_HG[0] * (queries + self.shape_HG[1])
        self._start = self._start_logits()
        self._start_bias_H = None if self._head_bias is None else whole(self._head_bias.detach()).clone()

    @property
    def layer(self) -> nn.Module:
        return self.native.layer

    @property
    def _head_bias(self) -> nn.Parameter | None:
        row = self.native.row
        return read(self.native.module, row.head_bias) if row.head_bias else None

    @property
    def parts(self) -> list[Part]:
        H, G = self.shape_HG
        outputs = {id(parameter) for parameter in self._with_output_axis()}
        found = [
            Part(parameter, H, G) if id(parameter) in outputs else Part(parameter)
            for parameter in self.layer.parameters()
            if id(parameter) in outputs or (not self.fused and parameter.requires_grad)
        ]
        return found if self._head_bias is None else [*found, Part(self._head_bias, H, 1)]

    def _with_output_axis(self) -> list[nn.Parameter]:
        """Parameters whose axis 0 is the projection's output: weight, bias, and the B factors of LoRA; not packed ones."""
        layer: Any = self.layer
        base = layer
        while hasattr(base, "base_layer"):  # peft's layers hold what they adapt
            base = base.base_layer
        factors = [factor.weight for factor in getattr(layer, "lora_B", {}).values()]
        return [
            parameter
            for parameter in (getattr(base, "weight", None), getattr(base, "bias", None), *factors)
            if isinstance(parameter, nn.Parameter) and _readable(parameter) and parameter.shape[0] == self._channels
        ]

    def values(self, inputs: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
        output = whole(output)
        if output.shape[-1] != self._channels:
            raise UnsupportedError(
                f"{self.native.row.layer} of {type(self.native.module).__name__} gave {output.shape[-1]} of its {self._channels} "
                "channels; GateMonitor cannot watch a gate that tensor parallelism splits"
            )
        g = self._activated(self._gate_rows(output), self._head_bias)
        return g, self._activated(self._start(inputs[0]), self._start_bias_H)

    def _gate_rows(self, output: Tensor) -> Tensor:
        """(..., N) -> (..., H, G): of each head the last rows, as in both layouts of `native`.

        Contiguous as the models have it, so that the activation is theirs to the bit.
        """
        H, G = self.shape_HG
        return output.unflatten(-1, (H, -1))[..., -G:].contiguous()

    def _activated(self, logits_BTHG: Tensor, bias_H: Tensor | None) -> Tensor:
        logits_BTHG = logits_BTHG if bias_H is None else logits_BTHG + whole(bias_H)[:, None]
        return activate(widen(logits_BTHG) if self.native.row.float32 else logits_BTHG, self.spec.activation)

    def _start_logits(self) -> Callable[[Tensor], Tensor]:
        """What gives x's logits, without the bias beside, with the weights as they are now.

        It keeps the gate's rows alone where they are a linear layer's, and a twin of the layer where somebody else's forward
        adds to them (LoRA) or decodes them (a quantised weight).
        """
        layer = self.layer
        weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
        plain = type(weight) is nn.Parameter or hasattr(weight, "full_tensor")
        if hasattr(layer, "base_layer") or not (plain and isinstance(weight, Tensor) and _readable(weight)):
            start = twin(layer, shared=[parameter for parameter in layer.parameters() if not parameter.requires_grad])
            return lambda x_BTD: self._gate_rows(start(x_BTD))
        H, G = self.shape_HG
        kept = [
            None if one is None else whole(one.detach()).unflatten(0, (H, -1))[:, -G:].flatten(0, 1).clone()
            for one in (weight, bias)
        ]
        rows_ND, bias_N = kept
        assert rows_ND is not None
        return lambda x_BTD: F.linear(x_BTD, rows_ND, bias_N).unflatten(-1, (H, G))


def watch(model: nn.Module) -> dict[str, Watched]:
    """Every gate of the model, attached or native, by its name in `gated_attn.hf.gates`; of PEFT's copies the one that trains.

    Raises UnsupportedError where another process has the gates' numbers, or they lie in one flat tensor with others.
    """
    found = {name: gate for name, gate in gates(model).items() if not name.endswith(".original_module")}
    holders = [gate.layer if isinstance(gate, NativeGate) else gate for gate in found.values()]
    flattened = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if flattened or any(p.numel() == 0 and not hasattr(p, "full_tensor") for one in holders for p in one.parameters()):
        raise UnsupportedError(
            "GateMonitor reads whole gates, and these are flattened or kept elsewhere (FSDP1, ZeRO-3); use fsdp_version 2"
        )
    return {
        name: WatchedRows(gate) if isinstance(gate, NativeGate) else WatchedModule(gate) for name, gate in found.items()
    }


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; every rank calls it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def twin(module: nn.Module, shared: Iterable[nn.Parameter] = ()) -> Any:
    """A copy that neither trains, drops out nor follows, without the hooks that others put on the module.

    Its parameters are whole and its own. Those in `shared` stay the module's, unless they are sharded: that costs no memory, and
    keeps what quantised weights have beside their numbers. UnsupportedError for a module that FSDP2 shards by itself.
    """
    if any(hasattr(part, "unshard") for part in module.modules()):  # FSDP2's own modules refuse to be copied
        raise UnsupportedError(
            f"GateMonitor keeps a copy of each {type(module).__name__}, and this one is an FSDP2 unit of its own; call "
            "fully_shard on the layer around it"
        )
    kept = {id(parameter) for parameter in shared if not hasattr(parameter, "full_tensor")}
    memo: dict[int, Any] = {
        id(p): p if id(p) in kept else nn.Parameter(whole(p.detach()).clone(), requires_grad=False)
        for p in module.parameters()
    }
    copied = copy.deepcopy(module, memo).eval()
    for part in copied.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return copied


def _readable(parameter: Tensor) -> bool:
    """Whether the numbers are the parameter's own: a quantised weight shows codes."""
    return parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1
