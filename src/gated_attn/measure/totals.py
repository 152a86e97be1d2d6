"""Running sums over the sequences that a model has read: attention per head, residual stream per layer, gate per head.

Sums are float64 on the CPU; statistics are those of `statistics`, with means over queries (or tokens) of all sequences together.

Shapes: T queries (tokens), S keys, H heads, E head width, D model width, G gate width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from gated_attn.measure.statistics import (
    effective_rank,
    first_token_share,
    gram,
    head_norms,
    kurtosis,
    massive,
    max_abs,
    normalised_entropy,
    sink_share,
    strongest_key,
    token_entropy,
    token_norm_ratio,
)
from gated_attn.measure.streaming import Summary

EARLY = 64
"""A key among the first so many tokens counts as early; its share is a mean over the queries from there on."""

BINS = 2000
"""Equal bins of a gate's histogram, from which its median is read."""


class Mean:
    """A weighted mean per head; entries that are NaN are left out."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.weight: Tensor | float = 0.0

    def add(self, value_H: Tensor, weight: float = 1.0) -> None:
        value_H = value_H.double().cpu()
        known_H = ~value_H.isnan()
        self.total = self.total + torch.where(known_H, value_H, 0.0) * weight
        self.weight = self.weight + known_H * weight

    def value(self, heads: int) -> list[float | None]:
        """The means, None where nothing was counted."""
        if isinstance(self.weight, float):
            return [None] * heads
        return [t / w if w else None for t, w in zip(self.total.tolist(), self.weight.tolist(), strict=True)]  # type: ignore[union-attr]


class AttentionTotals:
    """One attention module's heads."""

    def __init__(self, heads: int, head_dim: int, *, sink_tokens: int, sink_eps: float) -> None:
        self.heads, self.sink_tokens, self.sink_eps = heads, sink_tokens, sink_eps
        self.sequences = self.queries = 0
        self.first, self.first_all, self.sink, self.sink_rate = Mean(), Mean(), Mean(), Mean()
        self.strongest, self.early, self.entropy, self.norm = Mean(), Mean(), Mean(), Mean()
        self.strongest_at: list[Counter[tuple[int, int]]] = [Counter() for _ in range(heads)]
        self.module_norm = Mean()
        self.gram_HEE = torch.zeros(heads, head_dim, head_dim, dtype=torch.float64)

    def add(self, summary: Summary, out_THE: Tensor, ids_S: Tensor | None, module_norm: Tensor) -> None:
        """One sequence: what its weights came to, what the heads gave, the keys' token numbers if there are some.

        `module_norm`: the mean norm of what all heads of the module gave, chosen or not.
        """
        T, before = summary.first_HT.shape[-1], summary.position
        self.sequences += before == 0
        self.queries += T
        later = T - (before == 0)
        if later:
            self.first.add(first_token_share(summary.first_HT, include_first_query=before > 0), later)
        self.first_all.add(first_token_share(summary.first_HT, include_first_query=True), T)
        if before == 0:
            alpha_H = sink_share(summary.first_HT, tokens=self.sink_tokens)
            self.sink.add(alpha_H)
            self.sink_rate.add(torch.where(alpha_H.isnan(), alpha_H, (alpha_H > self.sink_eps).double()))
            self._add_strongest(summary, ids_S)
        counted = int((summary.visible_T >= 2).sum())
        if counted:
            self.entropy.add(normalised_entropy(summary.entropy_HT, summary.visible_T), counted)
        if bool(summary.late_queries_S.any()):
            early = slice(0, max(EARLY - summary.gone, 0))
            share_H, _ = strongest_key(summary.late_HS[:, early], summary.late_queries_S[early])
            self.early.add(share_H, float(summary.late_queries_S.max()))
        self.norm.add(head_norms(out_THE), T)
        self.module_norm.add(module_norm.reshape(1), T)
        self.gram_HEE += gram(out_THE).cpu()

    def _add_strongest(self, summary: Summary, ids_S: Tensor | None) -> None:
        least = min(EARLY, -(-len(summary.visible_T) // 2))
        share_H, position_H = strongest_key(summary.received_HS, summary.queries_S, least=least)
        self.strongest.add(share_H)
        for counter, position in zip(self.strongest_at, position_H.tolist(), strict=True):
            counter[position, -1 if ids_S is None else int(ids_S[position])] += 1

    def effective_ranks(self) -> list[float]:
        """Of each head's outputs over all tokens."""
        return effective_rank(self.gram_HEE).tolist()


class StreamTotals:
    """The residual stream behind one layer."""

    def __init__(self) -> None:
        self.tokens = self.massive = 0
        self.max_abs = 0.0
        self.ratio, self.ratio_at = 0.0, -1
        self.inf_norms: list[float] = []
        self.kurtoses: list[float] = []
        self.medians: list[float] = []

    def add(self, x_TD: Tensor, *, whole: bool) -> None:
        """One sequence; if not `whole`, tokens that a cache's sequence goes on with, which count where numbers are per token."""
        self.tokens += len(x_TD)
        self.massive += massive(x_TD)
        largest = max_abs(x_TD)
        self.max_abs = max(self.max_abs, largest)
        if not whole:
            return
        self.inf_norms.append(largest)
        self.kurtoses.append(kurtosis(x_TD))
        self.medians.append(float(x_TD.abs().float().median()))
        ratio, at = token_norm_ratio(x_TD)
        if ratio > self.ratio:
            self.ratio, self.ratio_at = ratio, at


class GateTotals:
    """One gate's values, per head (one for a gate that all heads share)."""

    def __init__(self, heads: int, span: tuple[float, float], classes: Sequence[str] = ()) -> None:
        self.heads, self.span, self.classes = heads, span, tuple(classes)
        self.tokens = 0
        self.total_H, self.open_H, self.open_log_H = (torch.zeros(heads, dtype=torch.float64) for _ in range(3))
        self.largest_H = torch.full((heads,), -torch.inf, dtype=torch.float64)
        self.counts_HN = torch.zeros(heads, BINS, dtype=torch.long)
        self.below_H3 = torch.zeros(heads, 3, dtype=torch.float64)
        self.values = 0
        self.by_class_HC2 = torch.zeros(heads, len(self.classes), 2, dtype=torch.float64)

    def add(self, gate_THG: Tensor, classes_TC: Tensor | None = None) -> None:
        """The gate's values over the tokens of one sequence, and which classes each token is in."""
        T, _, G = gate_THG.shape
        g_HTG = gate_THG.detach().transpose(0, 1).double().cpu()
        self.tokens += T
        self.values += T * G
        self.total_H += g_HTG.sum((1, 2))
        mean_HT = g_HTG.clamp(min=0).mean(-1)
        self.open_H += mean_HT.sum(-1)
        self.open_log_H += torch.xlogy(mean_HT, mean_HT).sum(-1)
        self.largest_H = torch.maximum(self.largest_H, g_HTG.abs().amax((1, 2)))
        for i, hits in enumerate((g_HTG.abs() < 0.1, g_HTG.abs() < 0.05, g_HTG > 0.95)):
            self.below_H3[:, i] += hits.sum((1, 2))
        low, high = self.span
        bins = ((g_HTG - low) * (BINS / (high - low))).floor().clamp(0, BINS - 1).long().flatten(1)
        self.counts_HN.scatter_add_(1, bins, torch.ones_like(bins))
        if classes_TC is not None:
            hot_TC = classes_TC.double().cpu()
            self.by_class_HC2[..., 0] += g_HTG.mean(-1) @ hot_TC
            self.by_class_HC2[..., 1] += hot_TC.sum(0)

    def medians(self) -> list[float]:
        """Of each head's values, to the middle of a bin."""
        low, high = self.span
        half = (self.counts_HN.sum(1, keepdim=True) + 1) // 2
        at_H = (self.counts_HN.cumsum(1) >= half).long().argmax(1)
        return (low + (at_H.double() + 0.5) * (high - low) / BINS).tolist()

    def entropies(self) -> list[float | None]:
        """How evenly each head's gate is open over the tokens."""
        return [None if e != e else e for e in token_entropy(self.open_H, self.open_log_H, self.tokens).tolist()]
