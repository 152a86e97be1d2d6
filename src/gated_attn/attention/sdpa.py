"""PyTorch's scaled_dot_product_attention, with what it lacks added around it: end-aligned causality, sinks, pairwise gates.

Shapes: B batch, T queries, S keys, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gated_attn.attention import pairwise
from gated_attn.attention.activations import widen
from gated_attn.attention.call import Call, PairLogits, Sink, apply_gate


def why_not(call: Call) -> str | None:
    if call.return_lse:
        return "scaled_dot_product_attention does not return the log-sum-exp"
    if call.scale == 0 and isinstance(call.gate, Sink):
        return "a sink's logit rides on the scores, which scale=0 takes away"
    if call.dropout and isinstance(call.gate, Sink) and call.fill is not None:
        return "dropout would fall on the sink's fill too, which is a value like any other here"
    return None


def run(call: Call) -> tuple[Tensor, None]:
    """(output (B, T, H, E), None)."""
    if isinstance(call.gate, PairLogits):
        return pairwise.run(call), None
    if isinstance(call.gate, Sink):
        return _with_sink(call, call.gate), None
    mask, is_causal = _mask(call)
    out_BTHE = _attend(call, call.q_BTHE, call.k_BSKE, call.v_BSKE, mask, is_causal)
    return apply_gate(out_BTHE, call.gate, call.fill), None


def repeats_keys(call: Call, mask: Tensor | None) -> bool:
    """Whether keys and values are copied to one per query head.

    On CUDA, grouped heads with a mask, in float32 or wider than 256 would leave the fused kernels for the quadratic one.
    """
    if call.group == 1 or call.q_BTHE.device.type != "cuda":
        return False
    return mask is not None or call.q_BTHE.dtype == torch.float32 or call.q_BTHE.shape[-1] > 256


def _attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None = None
) -> Tensor:
    grouped = bool(q.shape[2] != k.shape[2])  # under torch.jit.trace a comparison of sizes is a tensor
    if grouped and repeats_keys(call, mask):
        k, v, grouped = k.repeat_interleave(call.group, 2), v.repeat_interleave(call.group, 2), False
    out_BHTE = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, dropout_p=call.dropout, is_causal=is_causal,
        scale=call.scale if scale is None else scale, enable_gqa=grouped,
    )  # fmt: skip
    return out_BHTE.transpose(1, 2)


def _mask(call: Call) -> tuple[Tensor | None, bool]:
    """(bool or float mask or None, is_causal) for SDPA, whose own causality is aligned to the start and so serves T == S only."""
    masking = call.masking
    if not masking.structural and masking.bias is None:
        if not masking.causal or (isinstance(masking.queries, int) and masking.queries == 1):
            return None, False
        if masking.queries == masking.keys:
            return None, True
    keep = masking.visible(call.q_BTHE.device)
    if masking.bias is None:
        return keep, False
    bias = masking.bias.to(call.q_BTHE.dtype)
    bias = bias if keep is None else bias.masked_fill(~keep, -math.inf)
    return (bias if isinstance(call.gate, Sink) else _lift(bias)), False


def _lift(bias: Tensor) -> Tensor:
    """The bias with rows that lie wholly below -64 lifted to 0, which softmax does not see.

    The fused backward pass on the CPU needs the log-sum-exp to a fraction of 1, and next to -1e7 float32 has none.
    """
    if bias.shape[-1] == 0:
        return bias
    highest = bias.detach().amax(-1, keepdim=True)
    return bias - highest.masked_fill((highest >= -64) | highest.isinf(), 0.0)


def _with_sink(call: Call, sink: Sink) -> Tensor:
    """The sink as one extra key in front, whose value is the fill (or 0): softmax does the rest.

    Its logit and key ride on one more channel of the head, q' = [q, c], k' = [k, 0] and k'_0 = [key, logit / (c scale)], so no
    score or mask gains a head axis; c is a power of two next to 1 / scale, so that nothing overflows that the logit did not.
    The channel is padded to a multiple of 8 for the kernels' sake.
    """
    B, T, H, E = call.q_BTHE.shape
    k = call.k_BSKE.repeat_interleave(call.group, dim=2)
    v = call.v_BSKE.repeat_interleave(call.group, dim=2)
    pad = -E % 8 or 8
    dtype = k.dtype
    carrier = 2.0 ** round(-math.log2(abs(call.scale)))
    q = F.pad(torch.cat([call.q_BTHE, call.q_BTHE.new_full((B, T, H, 1), carrier)], -1), (0, pad - 1))
    key_HE = call.q_BTHE.new_zeros(H, E) if sink.key_HE is None else sink.key_HE.to(dtype)
    carried_H1 = (widen(sink.logit_H) / (call.scale * carrier)).to(dtype)[:, None]
    key_HE = F.pad(torch.cat([key_HE, carried_H1], -1), (0, pad - 1))
    fill_HE = v.new_zeros(H, v.shape[-1]) if call.fill is None else call.fill.to(dtype)
    k = torch.cat([key_HE.expand(B, 1, H, E + pad), F.pad(k, (0, pad))], 1)
    v = torch.cat([fill_HE.expand(B, 1, H, v.shape[-1]), v], 1)
    mask, is_causal = _mask(call)
    if is_causal:  # one more query in front keeps T == S, so SDPA's own causality still serves; it sees the sink alone
        q = F.pad(q, (0, 0, 0, 0, 1, 0))
    elif mask is not None:
        mask = F.pad(
            mask.expand(*mask.shape[:-1], call.masking.keys), (1, 0), value=True if mask.dtype == torch.bool else 0.0
        )
    out_BTHE = _attend(call, q, k, v, mask, is_causal)
    return out_BTHE[:, 1:] if is_causal else out_BTHE
