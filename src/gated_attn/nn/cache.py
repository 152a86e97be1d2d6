"""`KVCache`: the keys and values of tokens already seen, as a value that is passed in and returned.

Shapes: B batch, S keys, K key/value heads, E head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gated_attn.errors import ShapeError


class KVCache(NamedTuple):
    """Keys (B, S, K, E) and values of one attention module, after their gates, norms and rotation; empty when new.

    Immutable, so one prefix can be continued in several ways; a gate on the output needs nothing here.

    Example:
        >>> out, cache = attention(x_BTD, cache=KVCache())
        >>> out, cache = attention(next_B1D, cache=cache)
    """

    k_BSKE: Tensor | None = None
    v_BSKE: Tensor | None = None

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return 0 if self.k_BSKE is None else self.k_BSKE.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Its keys and values; a ShapeError if it is empty."""
        if self.k_BSKE is None or self.v_BSKE is None:
            raise ShapeError("an empty KVCache has no keys and values; append some first")
        return self.k_BSKE, self.v_BSKE

    def append(self, k_BSKE: Tensor, v_BSKE: Tensor) -> KVCache:
        """A cache with these tokens behind its own."""
        if not self.length:
            return KVCache(k_BSKE, v_BSKE)
        ours, new = self.tensors[0].shape, k_BSKE.shape
        if ours[0] != new[0] or ours[2:] != new[2:]:
            raise ShapeError(
                f"the cache holds keys of shape {tuple(ours)} and the new ones have {tuple(new)}; they may differ in tokens only"
            )
        return KVCache(*(torch.cat(pair, 1) for pair in zip(self.tensors, (k_BSKE, v_BSKE), strict=True)))
