"""What share of its attention each head parks on the sink, fitted as a function of the token's hidden state.

    logit(1 - a_H) ~ W_HD x_D + b_H          a_H: the share of head H on the sink token, x_D: the attention module's own input

Least squares with every token weighted by the mean over heads of a (1 - a), the curvature of the sigmoid there, so that what is
small in the logit and nothing in the gate counts for nothing. The sums that this takes are kept, never the tokens: memory does not
grow with the text.

Shapes: B batch, T tokens, N tokens of a call, D width of the input, H heads, E head width.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from gated_attn.hf.families import Found
from gated_attn.hf.modes import evaluating
from gated_attn.hf.swap import swap, unswap
from gated_attn.measure.calls import scores_of
from gated_attn.measure.capture import WATCH, Recorded
from gated_attn.measure.streaming import Span, summarize

NEAREST = 1e-3
"""Shares closer than this to 0 and 1 are taken as this far from them, so that they have a logit."""

STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Ridge strengths that are tried, as shares of the mean square of an input channel."""

HELD_OUT = 5
"""Every so many rows one is left out of the fit, to choose the strength by."""

LATE = 64
"""A head's share is the mean over queries from this position on, as in strongest_early_share."""

BUDGET = 2 << 30
"""Bytes of sums that are kept at a time; more layers than this holds are collected in further passes over the text."""


class Sums:
    """What the fit of one attention module needs of all tokens; index 0 of R is what is fitted on, 1 what is held out.

    Fields:
        gram_RDD, cross_RDH, square_RH, total_RH: weighted sums of x x', x y, y y and y, where x is the input with a 1 behind it and
            y the logit of 1 - a.
        weight_R: the sum of weights; tokens_R: how many tokens.
        late_H, late: the sum of shares over queries from `LATE` on, and how many there were.
    """

    NAMES = ("gram_RDD", "cross_RDH", "square_RH", "total_RH", "weight_R", "tokens_R", "late_H", "late")

    def __init__(self, width: int, heads: int) -> None:
        zeros, D = (lambda *shape: torch.zeros(shape, dtype=torch.float64)), width + 1
        self.gram_RDD, self.cross_RDH = zeros(2, D, D), zeros(2, D, heads)
        self.square_RH, self.total_RH, self.weight_R, self.tokens_R = (
            zeros(2, heads),
            zeros(2, heads),
            zeros(2),
            zeros(2),
        )
        self.late_H, self.late = zeros(heads), zeros(1)

    @staticmethod
    def size(width: int) -> int:
        """Bytes of the largest of them."""
        return 2 * 8 * (width + 1) ** 2

    def add(self, x_ND: Tensor, share_NH: Tensor, part: int) -> None:
        """Count the tokens of one row: `part` 0 to fit on, 1 to hold out."""
        x_ND = torch.cat([x_ND.float(), x_ND.new_ones(len(x_ND), 1, dtype=torch.float32)], 1)
        open_NH = (1 - share_NH.float()).clamp(NEAREST, 1 - NEAREST)
        y_NH = torch.logit(open_NH)
        weight_N1 = (open_NH * (1 - open_NH)).mean(1, keepdim=True)
        scaled_ND = x_ND * weight_N1
        self.gram_RDD[part] += (scaled_ND.T @ x_ND).cpu()
        self.cross_RDH[part] += (scaled_ND.T @ y_NH).cpu()
        self.square_RH[part] += (weight_N1 * y_NH.square()).sum(0).cpu()
        self.total_RH[part] += (weight_N1 * y_NH).sum(0).cpu()
        self.weight_R[part] += float(weight_N1.sum())
        self.tokens_R[part] += len(x_ND)

    def add_late(self, share_NH: Tensor) -> None:
        """Count shares of queries from `LATE` on."""
        self.late_H += share_NH.sum(0).cpu()
        self.late += len(share_NH)

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name; what is written into these is what `fit` reads."""
        return {name: getattr(self, name) for name in self.NAMES}

    @property
    def share_H(self) -> Tensor:
        """Each head's mean share on the sink."""
        return self.late_H / self.late.clamp(min=1)

    def fit(self) -> Fit:
        """The weights of every head, each with the strength under which it errs least on the rows held out."""
        errors_SH = torch.stack([self._error(_solved(self.gram_RDD[0], self.cross_RDH[0], s), 1) for s in STRENGTHS])
        best_H = errors_SH.argmin(0)
        both = [_solved(self.gram_RDD.sum(0), self.cross_RDH.sum(0), s) for s in STRENGTHS]
        weights_DH = torch.stack(both)[best_H, :, torch.arange(len(best_H))].T
        spread_H = self.square_RH[1] - self.total_RH[1].square() / self.weight_R[1].clamp(min=1e-30)
        constant_H = spread_H <= 1e-9 * self.square_RH[1]  # a head that never, or always, looks elsewhere
        r2_H = torch.where(constant_H, 0.0, 1 - errors_SH.min(0).values / spread_H)
        return Fit(weights_DH[:-1].T.float(), weights_DH[-1].float(), r2_H, self.share_H)

    def _error(self, weights_DH: Tensor, part: int) -> Tensor:
        """Weighted sum of squared errors of each head."""
        crossed_H = (weights_DH * self.cross_RDH[part]).sum(0)
        return self.square_RH[part] - 2 * crossed_H + (weights_DH * (self.gram_RDD[part] @ weights_DH)).sum(0)


@dataclass(frozen=True)
class Fit:
    """sigmoid(weight_HD x + bias_H) stands for 1 - a.

    r2_H: the part of the logit's weighted variance that is explained, on rows that were not fitted on; share_H: the head's mean
    share on the sink.
    """

    weight_HD: Tensor
    bias_H: Tensor
    r2_H: Tensor
    share_H: Tensor


def _solved(gram_DD: Tensor, cross_DH: Tensor, strength: float) -> Tensor:
    """Ridge, the last channel (the constant) not shrunk."""
    size = gram_DD.diagonal()[:-1].mean()
    shrink_D = torch.full_like(gram_DD[0], float(strength * size))
    shrink_D[-1] = 1e-12 * float(gram_DD[-1, -1])
    return torch.linalg.solve(gram_DD + shrink_D.diag(), cross_DH)


class _Watch:
    """Adds up what one attention module sees. The sink is the first token of every row, and not counted."""

    def __init__(self, row: Found, sums: dict[str, Sums]) -> None:
        self.row, self.sums, self.first_row = row, sums, 0
        self._hidden: Tensor | None = None

    def begin(self, hidden: Tensor) -> None:
        """The module is called."""
        self._hidden = hidden

    def end(self) -> None:
        """The call is over."""
        self._hidden = None

    def see(self, name: str, query: Tensor, key: Tensor, mask: Any, kwargs: Any, out_BTHE: Tensor) -> None:
        """One call of the attention function."""
        assert self._hidden is not None
        B, H, T, _ = query.shape
        scores = scores_of(name, self.row.module, query, key, mask, kwargs)
        if self.row.name not in self.sums:
            self.sums[self.row.name] = Sums(self._hidden.shape[-1], H)
        own = self.sums[self.row.name]
        for row, summary in enumerate(summarize(scores, [Span(row, 0, T, 0, T) for row in range(B)], late=LATE)):
            share_TH = summary.first_HT.T
            held_out = (self.first_row + row) % HELD_OUT == HELD_OUT - 1
            own.add(self._hidden[row, 1:], share_TH[1:], int(held_out))
            own.add_late(share_TH[LATE:] if T > LATE else share_TH[1:])


@contextlib.contextmanager
def _watching(rows: Sequence[Found], sums: dict[str, Sums]) -> Iterator[list[_Watch]]:
    with contextlib.ExitStack() as undo:
        watches = []
        for row in rows:
            swap(row.module, Recorded)
            undo.callback(unswap, row.module)
            watches.append(_Watch(row, sums))
            row.module.__dict__[WATCH] = watches[-1]
            undo.callback(row.module.__dict__.pop, WATCH)
        yield watches


def passes(model: nn.Module, rows: Sequence[Found]) -> list[list[Found]]:
    """The attention modules in groups whose sums fit into `BUDGET`, at least one in each: a pass over the text for each group."""
    width = getattr(getattr(model, "config", None), "hidden_size", None) or max(p.shape[-1] for p in model.parameters())
    many = max(1, BUDGET // Sums.size(width))
    return [list(rows[i : i + many]) for i in range(0, len(rows), many)]


def collect(
    model: nn.Module,
    rows: Sequence[Found],
    batches: Iterable[Tensor],
    sink: int,
    sums: dict[str, Sums],
    *,
    seen: int = 0,
) -> Iterator[int]:
    """Run the batches of ids (B, T) through the model with the sink token in front and add to `sums`, by module name.

    Yields the number of rows that are counted, after each batch; `seen` of them were before. In bfloat16 where that is fast.
    """
    count = seen
    with evaluating(model), _watching(rows, sums) as watches:
        for ids_BT in batches:
            for watch in watches:
                watch.first_row = count
            with fast(ids_BT.device.type):
                model(**in_front(ids_BT, sink), use_cache=False, **no_logits(model))
            count += len(ids_BT)
            yield count


def add_ranks(sums: Mapping[str, Sums]) -> None:
    """The sums over all processes, where there are several."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for own in sums.values():
            for tensor in own.tensors().values():
                torch.distributed.all_reduce(tensor)


def in_front(ids_BT: Tensor, token: int | None) -> dict[str, Tensor]:
    """The model's input, with the token in front of every row (None: as it is)."""
    return {"input_ids": ids_BT if token is None else torch.cat([torch.full_like(ids_BT[:, :1], token), ids_BT], 1)}


def no_logits(model: nn.Module) -> dict[str, Any]:
    """The option that leaves out the vocabulary's scores of all but the last token, where the model has it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}


def fast(device: str) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 where the machine multiplies it faster than float32; else nothing."""
    return torch.autocast(device, torch.bfloat16) if has_fast_bfloat16(device) else contextlib.nullcontext()


def has_fast_bfloat16(device: str) -> bool:
    """Whether the machine multiplies bfloat16 itself: AVX-512 BF16 or AMX on CPUs, CUDA devices that support it."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported()
    return device == "cpu" and bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
