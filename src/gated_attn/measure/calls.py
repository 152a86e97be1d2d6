"""What an attention function of transformers was asked to compute, as `Scores`; each implementation reads masks in its own way.

Shapes: B batch, T queries, S keys, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.errors import UnsupportedError
from gated_attn.hf.functions import HARMLESS, NAME, PREFIX
from gated_attn.measure.streaming import Scores
from gated_attn.measure.tokens import hides

READ = (
    "output_attentions",
    "dropout",
    "scaling",
    "softcap",
    "s_aux",
    "position_bias",
    "sliding_window",
    "is_causal",
    "attn_gate",
)
KNOWN = ("eager", "sdpa", "flex_attention", NAME)
"""Implementations whose scores are understood, beside those of flash attention; others may mask or scale as they like."""

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Lengths of packed documents, which the mask repeats; flash attention alone reads them instead of a mask."""


def scores_of(name: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: Mapping[str, Any]) -> Scores:
    """The scores of a call of the attention function `name`; UnsupportedError for what is not understood."""
    flash = "flash" in name
    if not flash and name.removeprefix(PREFIX) not in KNOWN:
        raise UnsupportedError(
            f"capture does not know what attn_implementation={name.removeprefix(PREFIX)!r} computes; set another, such as "
            "'sdpa' or 'eager'"
        )
    for word, value in kwargs.items():
        harmless = word in HARMLESS or word in READ or (word in PACKED and not (flash and mask is None))
        if value is not None and value is not False and not harmless:
            raise UnsupportedError(
                f"capture does not know what {word}={type(value).__name__} does to the scores of {type(module).__name__}; set "
                "another attn_implementation"
            )
    T, S, E = query.shape[2], key.shape[2], query.shape[3]
    scale = kwargs.get("scaling")
    said = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if said is None else said)
    keep, bias = _mask(mask, query, S)
    masked = keep is not None or bias is not None
    position_bias = kwargs.get("position_bias")
    if position_bias is not None:
        bias = position_bias[..., :S] if bias is None else bias + position_bias[..., :S]
    window = None
    if flash:  # reads a mask of keys alone, and causality and windows from keywords
        window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
        offset = S - T
        causal = causal and T > 1
    else:  # a mask says all; without one, sdpa is causal from the first key on, and eager is not at all
        causal = causal and not masked and T > 1 and name.removeprefix(PREFIX) in ("sdpa", NAME)
        offset = 0
    sink = kwargs.get("s_aux")
    return Scores(
        query, key, E**-0.5 if scale is None else float(scale), keep=keep, bias=bias, causal=causal, offset=offset, window=window,
        softcap=kwargs.get("softcap"), sink_H=None if sink is None else sink.flatten(),
    )  # fmt: skip


def _mask(mask: Any, query: Tensor, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """(bool True where seen, added bias), each broadcastable to (B, H, T, S) or None."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor):  # FlexAttention's
        B, T = query.shape[0], query.shape[2]
        index = [torch.arange(size, device=query.device) for size in (B, 1, T, keys)]
        grid = [one.view([-1 if i == axis else 1 for i in range(4)]) for axis, one in enumerate(index)]
        return mask.mask_mod(*grid).expand(B, 1, T, keys), None
    if mask.dim() == 2:  # flash attention's: of keys
        return mask.bool()[:, None, None, :], None
    if mask.dtype == torch.bool:
        return mask[..., :keys], None
    return mask[..., :keys] > hides(mask.dtype), mask[..., :keys].float()
