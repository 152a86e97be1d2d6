"""`gated_attention`: the operation. `impl=` names who computes it: `reference`, `sdpa`, `flex`, or `auto`.

Shapes: B batch, T queries, S keys, H heads, K key/value heads, E head width, G gate width (1 or E).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from gated_attn.attention import flex, reference, sdpa
from gated_attn.attention.activations import widen
from gated_attn.attention.call import Call, GateInput, PairLogits, Sink, apply_gate, make_call
from gated_attn.errors import UnsupportedError, suggestion

__all__ = ["IMPLS", "Explanation", "PairLogits", "Sink", "apply_gate", "explain", "gated_attention"]

IMPLS: dict[str, ModuleType] = {"sdpa": sdpa, "flex": flex, "reference": reference}
"""Implementations in the order `auto` tries them: name -> module with `why_not(call)` and `run(call) -> (out, lse)`."""


@dataclass(frozen=True)
class Explanation:
    """Which impl serves a call, and why each of the others would not (or was not needed)."""

    impl: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.impl or 'none'}: {'chosen' if self.impl else 'no implementation serves this call'}"]
        return "\n".join(lines + [f"{name}: {reason}" for name, reason in self.reasons.items()])


def gated_attention(
    q_BTHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    gate: GateInput = None,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    window: int | None = None,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
    fill: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """out = g * softmax(scale q k^T + masks) v + (1 - g) * fill, per head (arXiv:2505.06708, position G1).

    Args:
        q_BTHE: queries (B, T, H, E).
        k_BSKE, v_BSKE: keys and values (B, S, K, E) with H a multiple of K; values may have another width.
        gate: gate values that broadcast to the output, (B, T, H, 1) headwise, (B, T, H, E) elementwise, (B, T, 1, E) shared;
            a `Sink` (the gate is read from the scores' log-sum-exp) or `PairLogits` (one gate per softmax weight); or None.
        causal: query i sees keys up to i + S - T, so the queries are the last T of S tokens, as with a KV cache.
        mask: bool, True where a query attends, or float, added to the scores; (T, S) or broadcastable to (B, H, T, S).
        window: a query sees this many keys, itself included (causal), or keys less than this far away on both sides.
        doc_ids: (B, S) int document numbers of packed sequences; tokens see their own document only.
        scale: factor on q k^T, default 1 / sqrt(E).
        dropout: probability of dropping a softmax weight, applied whenever it is not 0: pass 0 in evaluation.
        impl: who computes it. A named impl serves the call or raises; `auto` takes the first that can.
        fill: (H, E), what a head gives where its gate is shut.
        return_lse: also return the scores' log-sum-exp (B, T, H), float32 at least, -inf where a query sees no key.

    Returns:
        Output (B, T, H, E) in q's dtype, or (output, lse). A query that sees no key attends to nothing: its attention term is 0.

    Raises:
        ShapeError: shapes, dtypes or devices that do not fit, with both shapes.
        UnsupportedError: the impl asked for cannot serve this call, with the reason.

    Example:
        >>> q = k = v = torch.randn(2, 5, 4, 8)
        >>> gated_attention(q, k, v, torch.zeros(2, 5, 4, 1), causal=True).abs().max()
        tensor(0.)
    """
    call = make_call(
        q_BTHE, k_BSKE, v_BSKE, gate, causal=causal, mask=mask, window=window, doc_ids=doc_ids, scale=scale, dropout=dropout,
        fill=fill, return_lse=return_lse,
    )  # fmt: skip
    out_BTHE, lse_BTH = _choose(call, impl).run(call)
    return (out_BTHE, widen(lse_BTH)) if return_lse else out_BTHE


def explain(
    q_BTHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, gate: GateInput = None, *, impl: str = "auto", **options: Any
) -> Explanation:
    """Which impl `gated_attention` with the same arguments would use, and why not each of the others."""
    call = make_call(q_BTHE, k_BSKE, v_BSKE, gate, **options)
    chosen: str | None = None
    reasons: dict[str, str] = {}
    for name in known_names(impl) + [name for name in IMPLS if impl not in ("auto", name)]:
        reason = IMPLS[name].why_not(call)
        if reason is None and chosen is None and impl in ("auto", name):
            chosen = name
            continue
        spare = f"{chosen} comes first" if impl == "auto" else f"{impl} was asked for"
        reasons[name] = reason or f"could serve this call; {spare}"
    return Explanation(chosen, reasons)


def _choose(call: Call, impl: str) -> ModuleType:
    reasons = {}
    for name in known_names(impl):
        reason = IMPLS[name].why_not(call)
        if reason is None:
            return IMPLS[name]
        reasons[name] = reason
    raise UnsupportedError(f"impl={impl!r} cannot serve this call; impl='auto' picks one that can", reasons)


def known_names(impl: str) -> list[str]:
    """The implementations that this word stands for; an UnsupportedError lists the known ones if there is none."""
    if impl == "auto":
        return list(IMPLS)
    if impl not in IMPLS:
        raise UnsupportedError(
            f"unknown impl {impl!r}; known: auto, {', '.join(IMPLS)}{suggestion(impl, ['auto', *IMPLS])}"
        )
    return [impl]
