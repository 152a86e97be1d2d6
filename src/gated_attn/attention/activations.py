"""Gate activations: logits to gate values, computed in float32 at least and rounded once.

bfloat16's own sigmoid is exactly 1 from 6.24 on and float16's exactly 0 below -17.5, so no activation runs in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "2sigmoid": lambda x: 2 * torch.sigmoid(x),
    "nssigmoid": lambda x: 0.5 + 0.5 * torch.sigmoid(x),
    "hardsigmoid": F.hardsigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "linear": lambda x: x,
}


def activate(logits: Tensor, name: str) -> Tensor:
    """Gate values act(logits), any shape, in the logits' dtype: float32 (float64 for float64) inside, one rounding."""
    return _ACTIVATIONS[name](widen(logits)).to(logits.dtype)


def log_activate(logits: Tensor, name: str) -> Tensor:
    """log act(logits) in float32 or float64; -inf, with gradient 0, where the gate is exactly 0.

    Only for activations that are never negative (`spec.NON_NEGATIVE`).
    """
    x = widen(logits)
    if name in ("sigmoid", "2sigmoid"):
        return F.logsigmoid(x) + (math.log(2) if name == "2sigmoid" else 0.0)
    gate = _ACTIVATIONS[name](x)
    positive = gate > 0
    return torch.where(positive, torch.where(positive, gate, 1.0).log(), -math.inf)


def widen(x: Tensor) -> Tensor:
    """x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()
