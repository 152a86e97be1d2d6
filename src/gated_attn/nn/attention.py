"""`GatedAttention`: multi-head attention with the gate at any of its positions.

Shapes: B batch, T queries, S keys, D model width, H heads, K key/value heads, E head width, G gate width (1 or E).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gated_attn.attention import gated_attention, known_names
from gated_attn.attention.call import GateInput
from gated_attn.errors import ShapeError, SpecError, UnsupportedError
from gated_attn.gate import Gate
from gated_attn.nn.cache import KVCache
from gated_attn.nn.rope import Rope
from gated_attn.spec import PAPER, GateSpec, as_spec


class Projected(NamedTuple):
    """What attention is computed from: queries, keys and values of the new tokens, and the compressed query if there is one."""

    q_BTHE: Tensor
    k_BSKE: Tensor
    v_BSKE: Tensor
    latent: Tensor | None


class GatedAttention(nn.Module):
    """out = W_o (g * attention(W_q x, W_k m, W_v m)), with g read from x (arXiv:2505.06708); m is x, or the memory.

    Args:
        dim: model width D of x; `kv_dim` is the memory's width where it differs (cross attention).
        heads, kv_heads, head_dim: H query heads share K key/value heads; head_dim defaults to dim // heads.
        gate: a GateSpec, its text, or None; default the paper's. Output, query and dense gates read the query side; key and
            value gates read the side that keys and values come from, and act before the cache. With qk_norm, key and query
            gates follow the norm (before it, it would cancel them) and precede RoPE.
        qk_norm: RMSNorm over each head's queries and keys, before RoPE.
        rope: rotary positions for self attention.
        bias: biases on all four projections; a gate's bias is its spec's.
        causal, window: as in `gated_attention`, for self attention.
        q_latent_dim: compress the query through this width first (as in latent attention); `source=latent` gates read it.
        impl: who computes attention; see `gated_attention`.

    forward(x_BTD, memory_BSD=None, *, mask, doc_ids, positions, cache) -> out_BTD, or (out_BTD, cache) when a `KVCache` is
    passed. mask and doc_ids are those of `gated_attention` and cover all S keys, cached ones included; positions (B, T) are
    those of the new tokens and default to counting on from the cache, or within each document where doc_ids are given (a
    document lies together: it is one run of equal numbers). A gate that reads rotated queries or keys (`source=query`,
    `query_key`, `sink_key`) sees absolute positions, so left padding needs positions that start at the first real token.
    With a memory, a filled cache is reused as it is.

    Raises ShapeError for inputs that do not fit, SpecError for a gate that has nothing to read here.

    Example:
        >>> GatedAttention(64, 8, kv_heads=2, gate="output:headwise", causal=True)(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        gate: GateSpec | str | None = PAPER,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope: Rope | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        causal: bool = False,
        window: int | None = None,
        kv_dim: int | None = None,
        q_latent_dim: int | None = None,
        impl: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        head_dim = head_dim or _head_dim(dim, heads)
        if heads % kv_heads:
            raise ShapeError(
                f"{heads} heads cannot share {kv_heads} key/value heads; the first must be a multiple of the second"
            )
        if rope is not None and rope.head_dim != head_dim:
            raise ShapeError(
                f"rope is for heads of width {rope.head_dim}, and these have {head_dim}; pass Rope({head_dim}, ...)"
            )
        if window is not None and (type(window) is not int or window < 1):
            raise ShapeError(f"window={window!r}: pass how many keys a query sees, at least 1, or None for all")
        if not 0.0 <= dropout < 1.0:
            raise ShapeError(f"dropout={dropout}: pass a probability in [0, 1)")
        known_names(impl)
        spec = as_spec(gate)
        if spec is not None and spec.source == "latent" and q_latent_dim is None:
            raise SpecError(
                f"gate {spec} reads the compressed query, and there is none; pass q_latent_dim or use source=hidden"
            )
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.dropout, self.causal, self.window, self.rope, self.impl = dropout, causal, window, rope, impl
        kind = {"device": device, "dtype": dtype}
        self.q_down = nn.Linear(dim, q_latent_dim, bias=bias, **kind) if q_latent_dim else None
        self.q_latent_norm = nn.RMSNorm(q_latent_dim, eps=norm_eps, **kind) if q_latent_dim else None
        self.q_proj = nn.Linear(q_latent_dim or dim, heads * head_dim, bias=bias, **kind)
        self.k_proj = nn.Linear(kv_dim or dim, kv_heads * head_dim, bias=bias, **kind)
        self.v_proj = nn.Linear(kv_dim or dim, kv_heads * head_dim, bias=bias, **kind)
        self.out_proj = nn.Linear(heads * head_dim, dim, bias=bias, **kind)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps, **kind) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps, **kind) if qk_norm else None
        self.attn_gate: Gate | None = None
        if spec is not None:
            source_dim = (kv_dim or dim) if spec.position in ("key", "value") else dim
            self.attn_gate = Gate(
                spec,
                source_dim,
                heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                latent_dim=q_latent_dim,
                device=device,
                dtype=dtype,
            )

    def forward(
        self,
        x_BTD: Tensor,
        memory_BSD: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        self._check(x_BTD, memory_BSD, positions, doc_ids)
        offset = cache.length if cache is not None and memory_BSD is None else 0
        reused = cache if cache is not None and memory_BSD is not None and cache.length else None
        if doc_ids is not None and (doc_ids.dim() != 2 or doc_ids.shape[1] != offset + x_BTD.shape[1]):
            raise ShapeError(
                f"doc_ids of shape {tuple(doc_ids.shape)} for {offset} cached and {x_BTD.shape[1]} new tokens; pass one document "
                f"number per token, (batch, {offset + x_BTD.shape[1]})"
            )
        if positions is None and doc_ids is not None:
            positions = positions_in_documents(doc_ids)[:, doc_ids.shape[1] - x_BTD.shape[1] :]
        q_BTHE, k_BSKE, v_BSKE, latent = self.project(
            x_BTD, memory_BSD, positions=positions, offset=offset, reused=reused
        )
        if cache is not None and reused is None:
            cache = cache.append(k_BSKE, v_BSKE)
            k_BSKE, v_BSKE = cache.tensors
        gate = self.attn_gate
        out_BTHE = gated_attention(
            q_BTHE,
            k_BSKE,
            v_BSKE,
            self.output_gate(x_BTD, q_BTHE, k_BSKE, latent),
            causal=self.causal,
            window=self.window,
            mask=mask,
            doc_ids=doc_ids,
            dropout=self.dropout if self.training else 0.0,
            impl=self.impl,
            fill=self._output_fill(),
        )
        if gate is not None and gate.spec.op == "add" and gate.spec.position in ("output", "weights"):
            out_BTHE = gate.modulate(out_BTHE, self._gate_source(x_BTD, q_BTHE, latent))
        out_BTD = self.out_proj(out_BTHE.flatten(2))
        if gate is not None and gate.spec.position == "dense":
            out_BTD = gate.modulate(out_BTD[:, :, None], self._gate_source(x_BTD, q_BTHE, latent)).squeeze(2)
        return out_BTD if cache is None else (out_BTD, cache)

    def project(
        self,
        x_BTD: Tensor,
        memory_BSD: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        offset: int = 0,
        reused: KVCache | None = None,
    ) -> Projected:
        """Queries, keys and values as attention and the cache see them: projected, normed, gated, rotated."""
        source_BSD = x_BTD if memory_BSD is None else memory_BSD
        latent = None
        if self.q_down is not None and self.q_latent_norm is not None:
            latent = _normed(self.q_latent_norm, self.q_down(x_BTD))
        q_BTHE = self.q_proj(x_BTD if latent is None else latent).unflatten(-1, (self.heads, self.head_dim))
        q_BTHE = self._gated("query", _normed(self.q_norm, q_BTHE), x_BTD, latent)
        if reused is None:
            k_BSKE = self.k_proj(source_BSD).unflatten(-1, (self.kv_heads, self.head_dim))
            v_BSKE = self.v_proj(source_BSD).unflatten(-1, (self.kv_heads, self.head_dim))
            kv_latent = latent if memory_BSD is None else None
            k_BSKE = self._gated("key", _normed(self.k_norm, k_BSKE), source_BSD, kv_latent)
            v_BSKE = self._gated("value", v_BSKE, source_BSD, kv_latent)
        else:
            k_BSKE, v_BSKE = reused.tensors
        if self.rope is not None and memory_BSD is None:
            if positions is None:
                positions = torch.arange(offset, offset + x_BTD.shape[1], device=x_BTD.device)[None]
            q_BTHE, k_BSKE = self.rope.rotate(q_BTHE, positions), self.rope.rotate(k_BSKE, positions)
        return Projected(q_BTHE, k_BSKE, v_BSKE, latent)

    def output_gate(self, x_BTD: Tensor, q_BTHE: Tensor, k_BSKE: Tensor, latent: Tensor | None = None) -> GateInput:
        """The gate that `gated_attention` multiplies by: (B, T, H, G), a Sink or PairLogits; None for other positions."""
        gate = self.attn_gate
        if gate is None or gate.spec.position not in ("output", "weights") or gate.spec.op == "add":
            return None
        if gate.spec.width == "pairwise":
            return gate(q_BTHE, k_BSKE)
        return gate(self._gate_source(x_BTD, q_BTHE, latent))

    def _gate_source(self, x: Tensor, q_BTHE: Tensor, latent: Tensor | None) -> Tensor:
        assert self.attn_gate is not None
        source = self.attn_gate.spec.source
        if source != "latent":
            return q_BTHE if source == "query" else x
        if latent is None:
            raise UnsupportedError(
                f"gate {self.attn_gate.spec} reads the compressed query, which a memory's tokens do not have; use source=hidden"
            )
        return latent

    def _gated(self, position: str, heads_BTHE: Tensor, source: Tensor, latent: Tensor | None) -> Tensor:
        gate = self.attn_gate
        if gate is None or gate.spec.position != position:
            return heads_BTHE
        return gate.modulate(heads_BTHE, self._gate_source(source, heads_BTHE, latent))

    def _output_fill(self) -> Tensor | None:
        gate = self.attn_gate
        return gate.fill_HE if gate is not None and gate.spec.position in ("output", "weights") else None

    def _check(self, x: Tensor, memory: Tensor | None, positions: Tensor | None, doc_ids: Tensor | None) -> None:
        for name, tensor, width in (("x", x, self.dim), ("memory", memory, self.k_proj.in_features)):
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[-1] != width):
                raise ShapeError(
                    f"{name} of shape {tuple(tensor.shape)}; this attention takes (batch, tokens, {width})"
                )
        if memory is not None and (self.causal or self.window is not None):
            raise ShapeError(
                f"causal={self.causal} and window={self.window} have no meaning over a memory; build "
                "GatedAttention(..., causal=False, window=None) for cross attention"
            )
        if memory is not None and (positions is not None or doc_ids is not None):
            raise ShapeError("positions and doc_ids are for self attention; over a memory pass a mask, (B, 1, T, S)")
        if positions is not None and (
            positions.dim() != 2 or positions.shape[0] not in (1, x.shape[0]) or positions.shape[1] != x.shape[1]
        ):
            raise ShapeError(
                f"positions of shape {tuple(positions.shape)} for x of shape {tuple(x.shape)}; pass one per new token, "
                f"{tuple(x.shape[:2])} or (1, {x.shape[1]})"
            )
        if memory is None and self.k_proj.in_features != self.dim:
            raise ShapeError(
                f"keys are read from width {self.k_proj.in_features} and x has {self.dim}; pass the memory"
            )

    def extra_repr(self) -> str:
        kv = "" if self.kv_heads == self.heads else f", kv_heads={self.kv_heads}"
        return f"{self.dim}, {self.heads}{kv}, head_dim={self.head_dim}, causal={self.causal}, impl={self.impl}"


def positions_in_documents(doc_ids_BS: Tensor) -> Tensor:
    """How far each token stands in its own document, (B, S); a document is a run of equal numbers."""
    index_S = torch.arange(doc_ids_BS.shape[1], device=doc_ids_BS.device)
    starts_BS = torch.zeros_like(doc_ids_BS, dtype=torch.bool)
    starts_BS[:, 1:] = doc_ids_BS[:, 1:] != doc_ids_BS[:, :-1]
    return index_S - torch.where(starts_BS, index_S, 0).cummax(1).values


def _normed(norm: nn.RMSNorm | None, x: Tensor) -> Tensor:
    """norm(x) in the norm's own dtype, which under autocast is wider than x's, rounded back to x's."""
    return x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)


def _head_dim(dim: int, heads: int) -> int:
    if heads < 1 or dim % heads:
        raise ShapeError(
            f"width {dim} does not divide into {heads} heads; pass head_dim, or a width that is a multiple of heads"
        )
    return dim // heads
