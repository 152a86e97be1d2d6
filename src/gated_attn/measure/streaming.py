"""What the weights of one attention call come to, block by block of queries: no T x S tensor is ever whole.

Shapes: B batch, T queries, S keys, H heads, K key/value heads, R queries of a block, C keys that a block can see, E head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

HIDDEN = -1e30
"""A score below half of this belongs to a key that the query cannot see."""

BUDGET = 4 << 20
"""Bytes of scores that are computed at a time, about what a core's cache holds; one row of all keys may need more."""


@dataclass(frozen=True)
class Scores:
    """The scores of an attention call, before softmax, as the attention function was handed them.

    s = softcap(q k * scale) + bias, where `keep`, `causal` and `window` let the query see the key.

    Fields:
        q_BHTE, k_BKSE: queries and keys as they meet.
        keep: bool, broadcastable to (B, H, T, S), True where seen; bias: float, likewise, added.
        causal: query i sees keys up to i + `offset`.
        window: and only the last so many of these (None: all).
        softcap: c in c * tanh(s / c), or None.
        sink_H: one more logit per head in the softmax's sum, or None; weights then sum to less than 1.
    """

    q_BHTE: Tensor
    k_BKSE: Tensor
    scale: float
    keep: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    offset: int = 0
    window: int | None = None
    softcap: float | None = None
    sink_H: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, T, S."""
        B, H, T, _ = self.q_BHTE.shape
        return B, H, T, self.k_BKSE.shape[2]

    def block(self, row: int, heads: range, start: int, stop: int) -> Tensor:
        """Scores (heads, R, C) of queries start to stop of one row of the batch, in float32; HIDDEN where not seen.

        The heads share one key/value head. C ends where causality ends.
        """
        _, H, _, S = self.shape
        seen = min(S, stop + self.offset) if self.causal else S
        k_SE = self.k_BKSE[row, heads.start * self.k_BKSE.shape[1] // H, :seen].float()
        q_HRE = self.q_BHTE[row, heads.start : heads.stop, start:stop].float()
        scores = (q_HRE.flatten(0, 1) * self.scale) @ k_SE.T
        scores = scores.view(len(heads), stop - start, seen)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = (scores + _part(self.bias, row, heads, start, stop, seen)).clamp(min=HIDDEN)
        if self.keep is not None:
            scores = scores.masked_fill(~_part(self.keep, row, heads, start, stop, seen), HIDDEN)
        if self.causal or self.window is not None:
            first = 0 if self.window is not None else max(0, start + self.offset)
            far = self._too_far(start, stop, first, seen, scores.device)
            scores[..., first:].masked_fill_(far, HIDDEN)
        return scores

    def _too_far(self, start: int, stop: int, first: int, seen: int, device: torch.device) -> Tensor:
        """Bool (R, seen - first), True where causality or the window hides the key."""
        place_R1 = torch.arange(start + self.offset, stop + self.offset, device=device)[:, None]
        ahead = torch.arange(first, seen, device=device) - place_R1
        far = ahead > 0 if self.causal else torch.zeros_like(ahead, dtype=torch.bool)
        if self.window is not None:
            far |= ahead <= -self.window
            far |= ahead >= self.window
        return far

    def of_heads(self, heads: Sequence[int]) -> Scores:
        """The scores of these heads alone, each with its key/value head."""
        _, H, _, _ = self.shape
        K = self.k_BKSE.shape[1]
        chosen = list(heads)
        keep, bias = (
            m if m is None or m.dim() < 4 or m.shape[1] == 1 else m[:, chosen] for m in (self.keep, self.bias)
        )
        sink_H = None if self.sink_H is None else self.sink_H[chosen]
        k_BHSE = self.k_BKSE[:, [head * K // H for head in chosen]]
        return replace(self, q_BHTE=self.q_BHTE[:, chosen], k_BKSE=k_BHSE, keep=keep, bias=bias, sink_H=sink_H)

    def weights(self, row: int, start: int, stop: int) -> Tensor:
        """The weights (H, R, C) of queries start to stop of one row; for a few of them."""
        found = [log_HRC.exp() for *_, log_HRC in self.blocks(row, start, stop, budget=1 << 62)]
        return torch.cat(found)

    def blocks(
        self, row: int, start: int = 0, end: int | None = None, budget: int | None = None
    ) -> Iterator[tuple[range, int, int, Tensor, Tensor]]:
        """(heads, start, stop, scores, log weights), both (heads, R, C), over one row of the batch; each query and head once."""
        _, H, T, S = self.shape
        group = H // self.k_BKSE.shape[1]
        end, budget = T if end is None else end, BUDGET if budget is None else budget
        while start < end:
            width = min(S, start + self.offset + 64) if self.causal else S
            stop = min(end, start + max(1, min(256, budget // (4 * group * max(width, 1)))))
            for head in range(0, H, group):
                heads = range(head, head + group)
                scores = self.block(row, heads, start, stop)
                if self.sink_H is None:
                    yield heads, start, stop, scores, scores.log_softmax(-1)
                else:
                    sink = self.sink_H[heads.start : heads.stop].float()[:, None, None].expand(-1, stop - start, 1)
                    yield heads, start, stop, scores, torch.cat([scores, sink], -1).log_softmax(-1)[..., :-1]
            start = stop


def _part(mask: Tensor, row: int, heads: range, start: int, stop: int, seen: int) -> Tensor:
    """The piece of something broadcastable to (B, H, T, S) that a block needs, broadcastable to (heads, R, C)."""
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    mask = mask[row if mask.shape[0] > 1 else 0]
    mask = mask[heads.start : heads.stop] if mask.shape[0] > 1 else mask
    mask = mask[:, start:stop] if mask.shape[1] > 1 else mask
    return mask[..., :seen] if mask.shape[2] > 1 else mask


@dataclass(frozen=True)
class Summary:
    """What is kept of the weights A of one sequence in one attention module; sums over its queries, numbers per query.

    Fields:
        position: how many tokens of the sequence came before its first query here (a cache holds them).
        gone: how many of the sequence's first keys a cache of fixed size has dropped.
        first_HT: A[t, first key of the sequence]; 0 where that is gone.
        entropy_HT: -sum_s A ln A in nats; visible_T: how many keys the query sees.
        received_HS: sum over queries of A[t, s]; queries_S: how many of them see the key.
        late_HS, late_queries_S: the same over the queries from position `late` on.
        lse_HT: the scores' log-sum-exp, where it was asked for.
    """

    position: int
    first_HT: Tensor
    entropy_HT: Tensor
    visible_T: Tensor
    received_HS: Tensor
    queries_S: Tensor
    late_HS: Tensor
    late_queries_S: Tensor
    lse_HT: Tensor | None = None
    gone: int = 0


@dataclass(frozen=True)
class Span:
    """One sequence in a batch: its row, and where its queries and its keys lie; `stop`s are exclusive.

    `position` is that of the first query among the sequence's tokens; `gone` of its first keys are no longer there.
    """

    row: int
    start: int
    stop: int
    key_start: int
    key_stop: int
    position: int = 0
    gone: int = 0


def summarize(scores: Scores, spans: Sequence[Span], *, late: int = 64, lse: bool = False) -> list[Summary]:
    """A `Summary` of each span of a call, in their order; no query is in two, and one in none (padding) counts nowhere.

    Where spans of a row have keys of their own, queries must see those alone. Memory: BUDGET, and a few numbers per query and per
    key, however many spans there are.
    """
    found: dict[Span, Summary] = {}
    for row in sorted({span.row for span in spans}):
        inside = [span for span in spans if span.row == row]
        found |= zip(inside, _Row(scores, row, inside, late, lse).summaries(), strict=True)
    return [found[span] for span in spans]


class _Row:
    """The sums over one row of a batch."""

    def __init__(self, scores: Scores, row: int, spans: list[Span], late: int, lse: bool) -> None:
        self.spans, self.lines = spans, _lines(spans)
        _, H, T, S = scores.shape
        empty = scores.q_BHTE.new_zeros((), dtype=torch.float32)
        self.first_HT, self.entropy_HT = empty.new_zeros(H, T), empty.new_zeros(H, T)
        self.lse_HT = empty.new_zeros(H, T) if lse else None
        self.visible_T = empty.new_zeros(T)
        key_T = torch.zeros(T, dtype=torch.long, device=empty.device)
        # Which queries count for which sum: a line for all of a span's queries, and one for the late ones.
        counts_NT = empty.new_zeros(2 * (max(self.lines) + 1), T)
        for line, span in zip(self.lines, spans, strict=True):
            key_T[span.start : span.stop] = S if span.gone else span.key_start
            counts_NT[2 * line, span.start : span.stop] = 1
            counts_NT[2 * line + 1, span.start + max(late - span.position, 0) : span.stop] = 1
        self.received_HNS, self.queries_NS = empty.new_zeros(H, len(counts_NT), S), empty.new_zeros(len(counts_NT), S)
        first, last = min(span.start for span in spans), max(span.stop for span in spans)
        for heads, start, stop, scores_HRC, log_HRC in scores.blocks(row, first, last):
            own, rows, C = slice(heads.start, heads.stop), slice(start, stop), log_HRC.shape[-1]
            weights_HRC = log_HRC.exp()
            if heads.start == 0:  # masks are the same for all heads
                seen_RC = (scores_HRC[0] > HIDDEN / 2).float()
                self.visible_T[rows] = visible_R = seen_RC.sum(-1)
                self.queries_NS[:, :C] += counts_NT[:, rows] @ seen_RC
            if bool((visible_R == 0).any()):  # softmax of nothing is uniform, and stands for 0
                weights_HRC *= (visible_R > 0)[:, None]
            self.entropy_HT[own, rows] = -torch.linalg.vecdot(weights_HRC, log_HRC)
            key_R = key_T[rows]
            key_HR1 = key_R.clamp(max=C - 1)[None, :, None].expand(len(heads), -1, 1)
            self.first_HT[own, rows] = weights_HRC.gather(-1, key_HR1)[..., 0] * (key_R < C)
            self.received_HNS[own, :, :C] += counts_NT[:, rows] @ weights_HRC
            if self.lse_HT is not None:
                top_HR1, at_HR1 = scores_HRC.max(-1, keepdim=True)
                self.lse_HT[own, rows] = (top_HR1 - log_HRC.gather(-1, at_HR1))[..., 0]

    def summaries(self) -> Iterator[Summary]:
        for line, span in zip(self.lines, self.spans, strict=True):
            queries, keys = slice(span.start, span.stop), slice(span.key_start, span.key_stop)
            yield Summary(
                span.position, self.first_HT[:, queries], self.entropy_HT[:, queries], self.visible_T[queries],
                self.received_HNS[:, 2 * line, keys], self.queries_NS[2 * line, keys], self.received_HNS[:, 2 * line + 1, keys],
                self.queries_NS[2 * line + 1, keys], None if self.lse_HT is None else self.lse_HT[:, queries], span.gone,
            )  # fmt: skip


def _lines(spans: Sequence[Span]) -> list[int]:
    """A number for each span; spans of one number have no key in common, so that their sums may share a line."""
    taken: list[list[Span]] = []
    lines = []
    for span in spans:
        line = next((i for i, there in enumerate(taken) if all(_apart(span, other) for other in there)), len(taken))
        taken += [[]] * (line == len(taken))
        taken[line] = [*taken[line], span]
        lines.append(line)
    return lines


def _apart(a: Span, b: Span) -> bool:
    return a.key_stop <= b.key_start or b.key_stop <= a.key_start


def summarize_weights(
    weights_BHTS: Tensor, spans: Sequence[Span], *, late: int = 64, seen_BTS: Tensor | None = None
) -> list[Summary]:
    """`summarize`, of weights that are at hand whole: the formulas as they are written.

    `seen_BTS` says which keys a query can see; without it, those with a weight above 0.
    """
    seen_BTS = weights_BHTS[:, 0] > 0 if seen_BTS is None else seen_BTS
    found = []
    for span in spans:
        a_HTS = weights_BHTS[span.row, :, span.start : span.stop, span.key_start : span.key_stop]
        seen_TS = seen_BTS[span.row, span.start : span.stop, span.key_start : span.key_stop].to(a_HTS)
        after = max(late - span.position, 0)
        found.append(
            Summary(
                span.position, a_HTS[..., 0], torch.special.entr(a_HTS).sum(-1), seen_TS.sum(-1), a_HTS.sum(1), seen_TS.sum(0),
                a_HTS[:, after:].sum(1), seen_TS[after:].sum(0),
            )
        )  # fmt: skip
    return found
