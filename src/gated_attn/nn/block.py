"""`GatedTransformerBlock`: the pre-norm transformer block with gated attention.

Shapes: B batch, T tokens, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_attn.nn.attention import GatedAttention
from gated_attn.nn.cache import KVCache
from gated_attn.nn.rope import Rope
from gated_attn.spec import PAPER, GateSpec


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x), arXiv:2002.05202: the feed-forward layer of Llama-like models."""

    def __init__(self, dim: int, hidden_dim: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        kind = {"bias": False, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(dim, hidden_dim, **kind)
        self.up_proj = nn.Linear(dim, hidden_dim, **kind)
        self.down_proj = nn.Linear(hidden_dim, dim, **kind)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class GatedTransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)); RMSNorm, self attention.

    Args are those of `GatedAttention` for self attention, causal unless told otherwise, and `ffn_dim`, the feed-forward width
    (default 4 * dim). `dropout` falls on the softmax weights and on both branches.

    forward(x_BTD, *, mask, doc_ids, positions, cache) -> x_BTD, or (x_BTD, cache) when a `KVCache` is passed.

    Example:
        >>> GatedTransformerBlock(64, 8, gate="paper")(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        ffn_dim: int | None = None,
        gate: GateSpec | str | None = PAPER,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        rope: Rope | None = None,
        causal: bool = True,
        window: int | None = None,
        bias: bool = False,
        q_latent_dim: int | None = None,
        dropout: float = 0.0,
        norm_eps: float = 1e-6,
        impl: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(dim, eps=norm_eps, device=device, dtype=dtype)
        self.attn = GatedAttention(
            dim, heads, kv_heads=kv_heads, head_dim=head_dim, gate=gate, qk_norm=qk_norm, norm_eps=norm_eps, rope=rope, bias=bias,
            dropout=dropout, causal=causal, window=window, q_latent_dim=q_latent_dim, impl=impl, device=device, dtype=dtype,
        )  # fmt: skip
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps, device=device, dtype=dtype)
        self.ffn = SwiGLU(dim, ffn_dim or 4 * dim, device=device, dtype=dtype)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        attended = self.attn(self.attn_norm(x_BTD), mask=mask, doc_ids=doc_ids, positions=positions, cache=cache)
        if cache is not None:
            attended, cache = attended
        x_BTD = x_BTD + self.residual_dropout(attended)
        x_BTD = x_BTD + self.residual_dropout(self.ffn(self.ffn_norm(x_BTD)))
        return x_BTD if cache is None else (x_BTD, cache)
