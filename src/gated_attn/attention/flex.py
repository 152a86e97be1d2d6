"""PyTorch's FlexAttention: masks as functions of the indices, and a log-sum-exp that can be differentiated (CUDA).

Shapes: B batch, T queries, S keys, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from gated_attn.attention.activations import log_activate
from gated_attn.attention.call import Call, PairLogits, Sink, apply_gate, sink_gate


def why_not(call: Call) -> str | None:
    q = call.q_BTHE
    if call.dropout:
        return "FlexAttention has no dropout"
    if q.device.type not in ("cpu", "cuda"):
        return f"FlexAttention does not run on {q.device.type}"
    if q.device.type == "cuda":
        if q.dtype == torch.float64:
            return "FlexAttention's CUDA kernels have no float64"
        if min(q.shape[-1], call.v_BSKE.shape[-1]) < 16:
            return "FlexAttention's CUDA kernels need heads of at least 16 channels"
        if isinstance(call.gate, PairLogits):
            return "a pairwise gate sums over its rank, which FlexAttention's CUDA kernels do not fuse into the scores"
    if q.device.type == "cpu" and call.needs_grad:
        return "FlexAttention has no backward pass on the CPU"
    if q.device.type == "cpu" and torch.compiler.is_compiling():
        return "FlexAttention on the CPU is used eagerly only"
    if not isinstance(q.shape[1], int) or not isinstance(call.k_BSKE.shape[1], int):
        return "FlexAttention's block mask needs fixed lengths"
    if 0 in q.shape or 0 in call.k_BSKE.shape:
        return "FlexAttention takes no empty tensors"
    return None


def run(call: Call) -> tuple[Tensor, Tensor]:
    """(output (B, T, H, E), log-sum-exp of the scores (B, T, H))."""
    out_BTHE, lse_BTH = _flex(call, _bias_mod(call))
    gate: Any = call.gate
    if isinstance(gate, PairLogits):
        out_BTHE, gated_BTH = _flex(call, _pair_mod(call, gate))
        nothing_BTH = gated_BTH == -math.inf
        share_BTH = (gated_BTH - lse_BTH).masked_fill(nothing_BTH, -math.inf).exp()
        return (out_BTHE * share_BTH[..., None]).to(call.q_BTHE.dtype), lse_BTH
    if isinstance(gate, Sink):
        gate = sink_gate(gate, call.q_BTHE, lse_BTH, call.scale)
    return apply_gate(out_BTHE, gate, call.fill), lse_BTH


def _flex(call: Call, score_mod: Callable[..., Tensor] | None) -> tuple[Tensor, Tensor]:
    q, k, v = (_plain(t).transpose(1, 2) for t in (call.q_BTHE, call.k_BSKE, call.v_BSKE))
    kernel: Callable[..., Any] = _compiled() if q.device.type == "cuda" else _eager
    out, aux = kernel(
        q, k, v, score_mod=score_mod, block_mask=_block_mask(call), scale=call.scale, enable_gqa=call.group > 1,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out.transpose(1, 2), aux.lse.transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _eager(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():  # unfused on purpose: on the CPU this impl checks the maths, it does not race
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        return flex_attention(*args, **kwargs)


def _block_mask(call: Call) -> BlockMask | None:
    """The visible pairs as a function of (batch, head, query, key) index."""
    masking = call.masking
    if not masking.causal and not masking.structural:
        return None
    B, T, H, _ = call.q_BTHE.shape
    S, offset = masking.keys, masking.keys - masking.queries
    keep = None if masking.keep is None else masking.keep.expand(B, H, T, S)
    docs_BS = None if masking.doc_ids_BS is None else masking.doc_ids_BS.expand(B, S)
    query_docs_BT = None if docs_BS is None else masking.query_docs_BT.expand(B, T)

    def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        distance = t + offset - s
        seen = distance >= 0 if masking.causal else distance == distance
        if masking.window is not None:
            seen = seen & (distance.abs() < masking.window)
        if docs_BS is not None and query_docs_BT is not None:
            seen = seen & (query_docs_BT[b, t] == docs_BS[b, s])
        return seen if keep is None else seen & keep[b, h, t, s]

    per_row = B if keep is not None or docs_BS is not None else None
    per_head = H if masking.keep is not None and masking.keep.dim() == 4 and masking.keep.shape[1] > 1 else None
    return create_block_mask(visible, per_row, per_head, T, S, device=call.q_BTHE.device)


def _bias_mod(call: Call) -> Callable[..., Tensor] | None:
    if call.masking.bias is None:
        return None
    B, T, H, _ = call.q_BTHE.shape
    bias = _plain(call.masking.bias).expand(B, H, T, call.masking.keys)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return score + bias[b, h, t, s]

    return add_bias


def _pair_mod(call: Call, gate: PairLogits) -> Callable[..., Tensor]:
    add_bias, group, scale = _bias_mod(call), call.group, gate.query_BTHR.shape[-1] ** -0.5
    query_BTHR, key_BSKR = _plain(gate.query_BTHR), _plain(gate.key_BSKR)
    bias_1 = None if gate.bias_1 is None else _plain(gate.bias_1)

    def add_log_gate(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        logit = (query_BTHR[b, t, h] * key_BSKR[b, s, h // group]).sum(-1) * scale
        if bias_1 is not None:
            logit = logit + bias_1[0]
        score = score if add_bias is None else add_bias(score, b, h, t, s)
        return score + log_activate(logit, gate.activation).to(score.dtype)

    return add_log_gate


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as FlexAttention takes it: on the CPU it refuses whatever requires grad, even where no grad is taken."""
    return tensor if torch.is_grad_enabled() else tensor.detach()
