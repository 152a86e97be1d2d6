"""Statistics: pure functions from tensors to numbers, each with its formula, unit and source.

Shapes: B batch, T queries, S keys, H heads, G gate width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_token_share(weights_BHTS: Tensor, *, include_first_query: bool = False) -> Tensor:
    """Mean over batch and queries of A[t, 0], per head, (H,); a share in [0, 1].

    "F-Attn" of arXiv:2505.06708, which does not say whether query 0 counts. Under causal masks that query can look nowhere
    else, so it is left out unless `include_first_query`. Weights are those before any gate.
    """
    return weights_BHTS[:, :, 0 if include_first_query else 1 :, 0].mean((0, 2))


def share_below(gate: Tensor, threshold: float) -> float:
    """Share of gate values strictly below the threshold (arXiv:2505.06708 reports 0.1), in [0, 1]."""
    return float((gate < threshold).double().mean())


def histogram(values: Tensor, bins: int, low: float, high: float) -> tuple[int, ...]:
    """Counts in `bins` equal bins over [low, high]; the first also counts what lies below, the last what lies above."""
    index = ((values.double() - low) * (bins / (high - low))).floor().clamp(0, bins - 1).long()
    return tuple(torch.bincount(index.flatten(), minlength=bins).tolist())


def max_abs(x: Tensor) -> float:
    """max |x|, in the units of x ("M-Act" of arXiv:2505.06708 when x is the residual stream)."""
    return float(x.abs().max()) if x.numel() else 0.0
