"""The specification: gated attention as written, T x S weights and all. Any device, any float dtype, no fast code imports it.

Shapes: B batch, T queries, S keys, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gated_attn.attention.activations import activate
from gated_attn.attention.call import Call, PairLogits, Sink, apply_gate, sink_gate


def why_not(call: Call) -> str | None:
    """It serves every call."""
    return None


def softmax_weights(call: Call) -> tuple[Tensor, Tensor]:
    """(softmax weights (B, H, T, S) before any gate, log-sum-exp of the scores (B, H, T)); a row that sees no key is 0, -inf."""
    k_BSHE = call.k_BSKE.repeat_interleave(call.group, dim=2)
    scores_BHTS = torch.einsum("bthe,bshe->bhts", call.q_BTHE, k_BSHE) * call.scale
    if call.masking.bias is not None:
        scores_BHTS = scores_BHTS + call.masking.bias.to(scores_BHTS.dtype)
    keep = call.masking.visible(scores_BHTS.device)
    if keep is None:
        keep = torch.ones((), dtype=torch.bool, device=scores_BHTS.device)
    keep_BHTS = keep.expand(scores_BHTS.shape)
    empty_BHT1 = ~keep_BHTS.any(-1, keepdim=True)
    scores_BHTS = scores_BHTS.masked_fill(~keep_BHTS, -math.inf).masked_fill(empty_BHT1, 0.0)
    weights_BHTS = scores_BHTS.softmax(-1).masked_fill(empty_BHT1, 0.0)
    return weights_BHTS, scores_BHTS.logsumexp(-1).masked_fill(empty_BHT1[..., 0], -math.inf)


def run(call: Call) -> tuple[Tensor, Tensor]:
    """(output (B, T, H, E), log-sum-exp (B, T, H))."""
    weights_BHTS, lse_BHT = softmax_weights(call)
    gate, lse_BTH = call.gate, lse_BHT.transpose(1, 2)
    if call.dropout:
        weights_BHTS = torch.dropout(weights_BHTS, call.dropout, True)
    if isinstance(gate, PairLogits):
        weights_BHTS, gate = weights_BHTS * pair_gate(gate, call.group).to(weights_BHTS.dtype), None
    elif isinstance(gate, Sink):
        gate = sink_gate(gate, call.q_BTHE, lse_BTH, call.scale)
    v_BSHE = call.v_BSKE.repeat_interleave(call.group, dim=2)
    return apply_gate(torch.einsum("bhts,bshe->bthe", weights_BHTS, v_BSHE), gate, call.fill), lse_BTH


def pair_gate(gate: PairLogits, group: int) -> Tensor:
    """The pairwise gate's values, (B, H, T, S)."""
    key_BSHR = gate.key_BSKR.repeat_interleave(group, dim=2)
    logits = torch.einsum("bthr,bshr->bhts", gate.query_BTHR, key_BSHR) * gate.query_BTHR.shape[-1] ** -0.5
    return activate(logits if gate.bias_1 is None else logits + gate.bias_1, gate.activation)
