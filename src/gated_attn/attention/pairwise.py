"""The pairwise gate without a T x S tensor: two log-sum-exps, one block of queries at a time.

sum_s softmax(a)_ts g_ts v_s = softmax(a + log g) v * exp(lse(a + log g) - lse(a)) for scores a and gate g >= 0. Each block is
recomputed in the backward pass, so what is kept between the passes is the inputs, and one byte per pair where a causal, window or
document mask is needed (shared by all heads).

Shapes: B batch, T queries, S keys, H heads, E head width, R pairwise rank.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gated_attn.attention.activations import log_activate, widen
from gated_attn.attention.call import Call, PairLogits

BLOCK = 128
"""Queries per block: the working set is B x H x BLOCK x S scores."""


def run(call: Call) -> Tensor:
    """Output (B, T, H, E). Traced graphs (compile, export) take all queries as one block, since their length may vary."""
    gate = call.gate
    assert isinstance(gate, PairLogits)
    call = replace(
        call,
        k_BSKE=call.k_BSKE.repeat_interleave(call.group, 2),
        v_BSKE=call.v_BSKE.repeat_interleave(call.group, 2),
        gate=gate._replace(key_BSKR=gate.key_BSKR.repeat_interleave(call.group, 2)),
    )
    keep, T = call.masking.visible(call.q_BTHE.device), call.q_BTHE.shape[1]
    if torch.compiler.is_compiling() or T <= BLOCK:
        return _block(call, keep, slice(None))
    rows = [slice(start, start + BLOCK) for start in range(0, T, BLOCK)]
    if not call.needs_grad:
        return torch.cat([_block(call, keep, block) for block in rows], 1)
    return torch.cat([checkpoint(_block, call, keep, block, use_reentrant=False) for block in rows], 1)


def _block(call: Call, keep: Tensor | None, rows: slice) -> Tensor:
    gate, scale = call.gate, call.scale
    assert isinstance(gate, PairLogits)
    scores_BHTS = widen(torch.einsum("bthe,bshe->bhts", call.q_BTHE[:, rows], call.k_BSKE)) * scale
    logits_BHTS = widen(torch.einsum("bthr,bshr->bhts", gate.query_BTHR[:, rows], gate.key_BSKR))
    logits_BHTS = logits_BHTS * gate.query_BTHR.shape[-1] ** -0.5
    if gate.bias_1 is not None:
        logits_BHTS = logits_BHTS + gate.bias_1
    if call.masking.bias is not None:
        scores_BHTS = scores_BHTS + _rows(call.masking.bias, rows)
    keep = torch.ones((), dtype=torch.bool, device=scores_BHTS.device) if keep is None else _rows(keep, rows)
    keep_BHTS = keep.expand(scores_BHTS.shape)
    gated_BHTS = scores_BHTS + log_activate(logits_BHTS, gate.activation)
    _, lse_BHT1, _ = _softmax(scores_BHTS, keep_BHTS)
    weights_BHTS, gated_lse_BHT1, empty_BHT1 = _softmax(gated_BHTS, keep_BHTS & (gated_BHTS > -math.inf))
    share_BHT1 = (gated_lse_BHT1 - lse_BHT1).exp().masked_fill(empty_BHT1, 0.0)
    if call.dropout:
        weights_BHTS = torch.dropout(weights_BHTS, call.dropout, True)
    return torch.einsum("bhts,bshe->bthe", (weights_BHTS * share_BHT1).to(call.v_BSKE.dtype), call.v_BSKE)


def _softmax(scores_BHTS: Tensor, keep_BHTS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, log-sum-exp, rows without a key); both are of finite stand-ins, with zero gradient, in rows without a key."""
    empty_BHT1 = ~keep_BHTS.any(-1, keepdim=True)
    scores_BHTS = scores_BHTS.masked_fill(~keep_BHTS, -math.inf).masked_fill(empty_BHT1, 0.0)
    lse_BHT1 = scores_BHTS.logsumexp(-1, keepdim=True)
    return (scores_BHTS - lse_BHT1).exp().masked_fill(empty_BHT1, 0.0), lse_BHT1, empty_BHT1


def _rows(mask: Tensor, rows: slice) -> Tensor:
    """The rows of a mask that broadcasts over queries or not."""
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]
