"""Running sums over the sequences that a model has read: attention per head, residual stream per layer, gate per head.

Sums are float64 on the CPU; statistics are those of `statistics`, with means over queries (or tokens) of all sequences together.

Shapes: T queries (tokens), S keys, H heads, E head width, D model width, G gate width.
"""

from __future__ import annotations

import copy
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


NOTHING = torch.zeros(0)


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


class Unfinished:
    """One sequence in one attention module, as far as it was read; calls with a cache go on with it."""

    def __init__(self, begin: int, sink_tokens: int) -> None:
        self.begin = self.next = begin
        self.sink_tokens = sink_tokens
        self.first_HT = self.ids_S = self.received_HS = self.queries_S = self.late_HS = self.late_queries_S = NOTHING
        self.late = 0

    def add(self, summary: Summary, ids_S: Tensor | None) -> None:
        """The queries of one call; keys are counted by their place in the sequence."""
        if self.next == self.begin and ids_S is not None:
            self.ids_S = ids_S
        before, gone, early = summary.position, summary.gone, min(summary.gone, EARLY)
        self.next = before + summary.first_HT.shape[-1]
        self.received_HS = _sum(self.received_HS, summary.received_HS, gone)
        self.queries_S = _sum(self.queries_S, summary.queries_S, gone)
        self.late_HS = _sum(self.late_HS, summary.late_HS[:, : EARLY - early], early)
        self.late_queries_S = _sum(self.late_queries_S, summary.late_queries_S[: EARLY - early], early)
        self.late += max(self.next - max(before, EARLY), 0)
        first_HT = summary.first_HT[:, : max(self.sink_tokens - before, 0)].cpu()
        self.first_HT = torch.cat([self.first_HT, first_HT], -1) if len(self.first_HT) else first_HT.clone()

    def strongest(self) -> tuple[Tensor, list[tuple[int, int]]]:
        """The strongest key of each head: its share, and its position and token number (-1: not known)."""
        least = min(EARLY, -(-(self.next - self.begin) // 2))
        share_H, position_H = strongest_key(self.received_HS, self.queries_S, least=least)
        ids = self.ids_S.tolist()
        return share_H, [(at, ids[at] if 0 <= at < len(ids) else -1) for at in position_H.tolist()]


def _sum(total: Tensor, more: Tensor, gone: int) -> Tensor:
    """The sum along the last axis of two tensors, the second of which begins `gone` places later, as far as either reaches."""
    made = more.new_zeros((*more.shape[:-1], max(total.shape[-1], gone + more.shape[-1])), device="cpu")
    made[..., : total.shape[-1]] = total
    made[..., gone : gone + more.shape[-1]] += more.cpu()
    return made


class SequenceTotals:
    """What is one number per head and sequence, of an attention module: the sink, the strongest key, the strongest early one."""

    def __init__(self, heads: int, sink_eps: float) -> None:
        self.sink_eps = sink_eps
        self.sink, self.sink_rate, self.strongest, self.early = Mean(), Mean(), Mean(), Mean()
        self.strongest_at: list[Counter[tuple[int, int]]] = [Counter() for _ in range(heads)]

    def add(self, one: Unfinished) -> None:
        """A sequence that is at its end."""
        if one.late:
            share_H, _ = strongest_key(one.late_HS, one.late_queries_S)
            self.early.add(share_H, one.late)
        if one.begin:
            return  # its first queries are not known
        alpha_H = sink_share(one.first_HT, tokens=one.sink_tokens)
        self.sink.add(alpha_H)
        self.sink_rate.add(torch.where(alpha_H.isnan(), alpha_H, (alpha_H > self.sink_eps).double()))
        share_H, places = one.strongest()
        self.strongest.add(share_H)
        for counter, place in zip(self.strongest_at, places, strict=True):
            counter[place] += 1


class AttentionTotals:
    """One attention module's heads."""

    def __init__(self, heads: int, head_dim: int, *, sink_tokens: int, sink_eps: float) -> None:
        self.heads, self.sink_tokens = heads, sink_tokens
        self.sequences = self.queries = 0
        self.first, self.first_all, self.entropy, self.norm = Mean(), Mean(), Mean(), Mean()
        self.module_norm = Mean()
        self.gram_HEE = torch.zeros(heads, head_dim, head_dim, dtype=torch.float64)
        self._finished = SequenceTotals(heads, sink_eps)
        self._unfinished: dict[int, Unfinished] = {}

    def add(
        self, summary: Summary, out_THE: Tensor, ids_S: Tensor | None, module_norm: Tensor, row: int | None = None
    ) -> None:
        """Queries of one sequence: what their weights came to, what the heads gave, the keys' token numbers if there are some.

        `module_norm`: the mean norm of what all heads of the module gave, chosen or not. `row`: of the batch, in which a later
        call may go on with the sequence; None: it is whole.
        """
        T, before = summary.first_HT.shape[-1], summary.position
        self.sequences += before == 0
        self.queries += T
        later = T - (before == 0)
        if later:
            self.first.add(first_token_share(summary.first_HT, include_first_query=before > 0), later)
        self.first_all.add(first_token_share(summary.first_HT, include_first_query=True), T)
        counted = int((summary.visible_T >= 2).sum())
        if counted:
            self.entropy.add(normalised_entropy(summary.entropy_HT, summary.visible_T), counted)
        self.norm.add(head_norms(out_THE), T)
        self.module_norm.add(module_norm.reshape(1), T)
        self.gram_HEE += gram(out_THE).cpu()
        self._sequence(row, before).add(summary, ids_S)
        if row is None:
            self._finish(-1)

    def _sequence(self, row: int | None, position: int) -> Unfinished:
        """The sequence whose next query is at this position: the one that this row of the batch is at, or a new one."""
        at = -1 if row is None else row
        open_one = self._unfinished.get(at)
        if open_one is None or position == 0 or position != open_one.next:
            self._finish(at)
            self._unfinished[at] = Unfinished(position, self.sink_tokens)
        return self._unfinished[at]

    def _finish(self, row: int) -> None:
        if row in self._unfinished:
            self._finished.add(self._unfinished.pop(row))

    @property
    def of_sequences(self) -> SequenceTotals:
        """What is one number per sequence, those that a cache may yet go on with as they are now."""
        made = copy.deepcopy(self._finished)
        for one in self._unfinished.values():
            made.add(one)
        return made

    @property
    def sink(self) -> Mean:
        """alpha of each head."""
        return self.of_sequences.sink

    @property
    def sink_rate(self) -> Mean:
        """Whether each head's alpha is above eps."""
        return self.of_sequences.sink_rate

    @property
    def strongest(self) -> Mean:
        """The share of each head's strongest key."""
        return self.of_sequences.strongest

    @property
    def strongest_at(self) -> list[Counter[tuple[int, int]]]:
        """Where each head's strongest key was, (position, token number)."""
        return self.of_sequences.strongest_at

    @property
    def early(self) -> Mean:
        """The share of each head's strongest early key."""
        return self.of_sequences.early

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
