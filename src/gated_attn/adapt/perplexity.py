"""The loss of a causal language model on rows of tokens, with or without a sink token in front.

Shapes: N rows, B rows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_attn.adapt.shares import in_front
from gated_attn.errors import RecipeError
from gated_attn.hf.modes import evaluating

SLICE = 64 << 20
"""Bytes of scores that are turned into float32 at a time."""


class Loss(NamedTuple):
    """A sum of negative log-likelihoods in nats, and of how many tokens."""

    total: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(total / tokens)."""
        return math.exp(self.total / self.tokens)


def nll(
    model: nn.Module,
    ids_NT: Tensor,
    *,
    first: int | None = None,
    batch: int = 4,
    cache: Callable[[], Any] | None = None,
) -> Loss:
    """The next-token loss of the tokens at positions 1 to T - 1 of every row.

    Args:
        first: a token in front of every row. Neither it nor the row's first token is scored, so that the same tokens are with and
            without it.
        cache: makes the cache that a batch is run with, such as one that rounds; None: no cache.

    Raises RecipeError for rows of fewer than 2 tokens.
    """
    if ids_NT.dim() != 2 or ids_NT.shape[1] < 2 or not len(ids_NT):
        raise RecipeError(f"rows of at least 2 tokens (N, T) are scored; these are {tuple(ids_NT.shape)}")
    device = next(model.parameters()).device
    total = 0.0
    with evaluating(model):
        for ids_BT in ids_NT.split(batch):
            ids_BT = ids_BT.to(device)
            kept: dict[str, Any] = {"use_cache": False} if cache is None else {cache_word(model): cache()}
            logits_BTV = model(**in_front(ids_BT, first), **kept).logits
            # Row by row: all rows without their last token would be a copy of the scores.
            total += sum(
                summed(row_TV[-len(row_T) : -1], row_T[1:]) for row_TV, row_T in zip(logits_BTV, ids_BT, strict=True)
            )
    return Loss(total, ids_NT[:, 1:].numel())


def summed(logits_NV: Tensor, ids_N: Tensor) -> float:
    """The sum, in float64, of -log p of the tokens, in float32 from a slice of rows at a time."""
    rows = max(1, SLICE // (4 * logits_NV.shape[1]))
    losses = [
        F.cross_entropy(some_NV.float(), some_N, reduction="none").double().sum()
        for some_NV, some_N in zip(logits_NV.split(rows), ids_N.split(rows), strict=True)
    ]
    return float(torch.stack(losses).sum())


def cache_word(model: nn.Module) -> str:
    """The keyword by which the model takes a cache: `cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
