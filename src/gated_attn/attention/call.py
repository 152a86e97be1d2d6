"""One request for gated attention, checked, and the gate forms it can carry.

Shapes: B batch, T queries, S keys, H heads, K key/value heads, E head width, G gate width (1 or E), R pairwise rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gated_attn.attention.activations import activate
from gated_attn.attention.masks import Masking, normalise
from gated_attn.errors import ShapeError


class PairLogits(NamedTuple):
    """A gate on every softmax weight: g[t, s] = act(query_t . key_s / sqrt(R) + bias), never stored as T x S."""

    query_BTHR: Tensor
    key_BSKR: Tensor
    bias_1: Tensor | None
    activation: str


class Sink(NamedTuple):
    """The sink as a gate: g = sigmoid(lse(scores) - logit - scale q . key), one logit and optionally one key per head."""

    logit_H: Tensor
    key_HE: Tensor | None = None


GateInput = Tensor | PairLogits | Sink | None


@dataclass(frozen=True)
class Call:
    """A checked request. `gate` broadcasts to (B, T, H, E) unless it is a PairLogits or a Sink; `fill` to (H, E)."""

    q_BTHE: Tensor
    k_BSKE: Tensor
    v_BSKE: Tensor
    gate: GateInput
    masking: Masking
    scale: float
    dropout: float
    fill: Tensor | None
    return_lse: bool

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q_BTHE.shape[2] // self.k_BSKE.shape[2]

    @property
    def needs_grad(self) -> bool:
        tensors: list[object] = [self.q_BTHE, self.k_BSKE, self.v_BSKE, self.fill, self.masking.bias]
        tensors += [*self.gate] if isinstance(self.gate, tuple) else [self.gate]
        return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def make_call(
    q_BTHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    gate: GateInput = None,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    window: int | None = None,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    fill: Tensor | None = None,
    return_lse: bool = False,
) -> Call:
    """Check every argument once and normalise the masks; raise ShapeError with both shapes and what to do."""
    q_BTHE, k_BSKE, v_BSKE = _autocast(q_BTHE, k_BSKE, v_BSKE)
    _check_qkv(q_BTHE, k_BSKE, v_BSKE)
    B, T, H, E = q_BTHE.shape
    S = k_BSKE.shape[1]
    if not 0.0 <= dropout < 1.0:
        raise ShapeError(
            f"dropout={dropout}: pass a probability in [0, 1), and 0 in evaluation (nothing switches it off here)"
        )
    masking = normalise(
        mask,
        causal=causal,
        window=window,
        doc_ids=doc_ids,
        shape_BHTS=(B, H, T, S),
        device=q_BTHE.device,
        dtype=q_BTHE.dtype,
    )
    out_shape = (B, T, H, v_BSKE.shape[3])
    _check_gate(gate, q_BTHE, k_BSKE, out_shape)
    if fill is not None:
        _check_fill(fill, gate, out_shape)
    return Call(q_BTHE, k_BSKE, v_BSKE, gate, masking, E**-0.5 if scale is None else scale, dropout, fill, return_lse)


def apply_gate(x_BTHE: Tensor, gate_BTHG: Tensor | None, fill_HE: Tensor | None = None, op: str = "mul") -> Tensor:
    """g*x, g*x + (1-g)*fill, or x + g for op="add": the one primitive behind every gate position.

    Shapes: x (B, T, H, E); the gate broadcasts to it, (B, T, H, 1) headwise, (B, T, H, E) elementwise, (B, T, 1, E) shared.
    The result has x's dtype; a float32 gate on a bfloat16 x is multiplied in float32 and rounded once.
    """
    if gate_BTHG is None:
        return x_BTHE
    if op == "add":
        return (x_BTHE + gate_BTHG).to(x_BTHE.dtype)
    out = x_BTHE * gate_BTHG
    if fill_HE is not None:
        out = out + (1 - gate_BTHG) * fill_HE
    return out.to(x_BTHE.dtype)


def sink_gate(sink: Sink, q_BTHE: Tensor, lse_BTH: Tensor, scale: float) -> Tensor:
    """sigmoid(lse - logit - scale q . key), (B, T, H, 1): the gate that a sink is, once the log-sum-exp is known."""
    sink_BTH = sink.logit_H.to(lse_BTH.dtype)
    if sink.key_HE is not None:
        sink_BTH = sink_BTH + scale * torch.einsum("bthe,he->bth", q_BTHE, sink.key_HE.to(q_BTHE.dtype))
    return activate(lse_BTH - sink_BTH, "sigmoid")[..., None]


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Under autocast, what SDPA does to its inputs: the autocast dtype for all of them."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    named = {"q_BTHE": q, "k_BSKE": k, "v_BSKE": v}
    for name, tensor in named.items():
        if tensor.dim() != 4:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; pass 4 dimensions: batch, tokens, heads, head width"
            )
        if not tensor.dtype.is_floating_point:
            raise ShapeError(f"{name} is {tensor.dtype}; attention needs a floating point dtype")
    if not q.dtype == k.dtype == v.dtype:
        raise ShapeError(f"mixed dtypes: {_list(named, 'dtype')}; cast them to one dtype")
    if not q.device == k.device == v.device:
        raise ShapeError(f"mixed devices: {_list(named, 'device')}; move them to one device")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ShapeError(f"batch sizes differ: {_list(named, 'shape')}; expand them to one batch size")
    if k.shape[1:3] != v.shape[1:3]:
        raise ShapeError(f"keys and values differ in tokens or heads: {_list(named, 'shape')}; they come in pairs")
    if q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"queries and keys differ in head width ({q.shape[3]} and {k.shape[3]}): {_list(named, 'shape')}; "
            "project both to one width"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ShapeError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads: {_list(named, 'shape')}; "
            "the first must be a multiple of the second"
        )


def _list(named: dict[str, Tensor], what: str) -> str:
    """`q_BTHE (2, 5, 6, 11), k_BSKE ...`: one attribute of each tensor, for a message."""
    values = ((name, getattr(tensor, what)) for name, tensor in named.items())
    return ", ".join(f"{name} {tuple(value) if what == 'shape' else value}" for name, value in values)


def _check_gate(gate: GateInput, q: Tensor, k: Tensor, out_shape: tuple[int, int, int, int]) -> None:
    B, T, H, E = q.shape
    if isinstance(gate, PairLogits):
        S, K = k.shape[1:3]
        got = (tuple(gate.query_BTHR.shape), tuple(gate.key_BSKR.shape))
        if got[0][:-1] != (B, T, H) or got[1][:-1] != (B, S, K) or got[0][-1] != got[1][-1]:
            raise ShapeError(
                f"pairwise gate of shapes {got}; pass query logits {(B, T, H, 'R')} and key logits {(B, S, K, 'R')}"
            )
    elif isinstance(gate, Sink):
        key = None if gate.key_HE is None else tuple(gate.key_HE.shape)
        if tuple(gate.logit_H.shape) != (H,) or key not in (None, (H, E)):
            raise ShapeError(
                f"sink of shapes {tuple(gate.logit_H.shape)}, {key}; pass one logit per head, {(H,)}, and a key {(H, E)} or None"
            )
    elif gate is not None:
        if not gate.dtype.is_floating_point:
            raise ShapeError(f"gate is {gate.dtype}; pass gate values (not a mask) in the queries' dtype or float32")
        if gate.device != q.device:
            raise ShapeError(
                f"gate is on {gate.device} and the queries on {q.device}; move it with .to({str(q.device)!r})"
            )
        shape = tuple(gate.shape)
        if len(shape) != 4 or any(got != 1 and got != want for got, want in zip(shape, out_shape, strict=True)):
            raise ShapeError(
                f"gate of shape {shape} does not broadcast to the output (B, T, H, E) = {out_shape}; pass (B, T, H, 1) headwise, "
                "(B, T, H, E) elementwise or (B, T, 1, E) shared by all heads"
            )


def _check_fill(fill: Tensor, gate: GateInput, out_shape: tuple[int, int, int, int]) -> None:
    if gate is None or isinstance(gate, PairLogits):
        raise ShapeError("fill needs a gate per head, out = g*o + (1-g)*fill; pass gate_BTHG or a Sink, or drop fill")
    if tuple(fill.shape) != out_shape[2:]:
        raise ShapeError(f"fill of shape {tuple(fill.shape)}; pass one vector per head, shape (H, E) = {out_shape[2:]}")
