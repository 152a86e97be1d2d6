"""Which tokens of a batch are real, and which sequence each belongs to: what a mask and positions say.

Shapes: B batch, T queries, S keys, L tokens that the mask speaks of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gated_attn.errors import UnsupportedError
from gated_attn.measure.streaming import Span


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch: for each its row, first token and the end (exclusive), of `length` tokens a row.

    The last `fresh` of them are the tokens of this call; the others are in a cache. A padded row is one sequence without its
    padding; a row of packed documents is several.
    """

    rows: int
    length: int
    found: tuple[tuple[int, int, int], ...]
    fresh: int

    @classmethod
    def of(
        cls,
        rows: int,
        length: int,
        mask_BL: Tensor | None = None,
        begins_BL: Tensor | None = None,
        fresh: int | None = None,
    ) -> Sequences:
        """From a mask (true where a token is real), and from where another sequence begins in a row, each (B, L) or None.

        UnsupportedError for padding between real tokens, where nothing says what is one sequence.
        """
        real_BL = torch.ones(rows, length, dtype=torch.bool) if mask_BL is None else mask_BL.bool().cpu()
        begins_BL = torch.zeros_like(real_BL) if begins_BL is None else begins_BL.cpu() & real_BL
        found = []
        for row in range(rows):
            real = real_BL[row].nonzero()[:, 0].tolist()
            if not real:
                continue
            first, last = real[0], real[-1]
            if len(real) <= last - first:
                raise UnsupportedError(
                    f"row {row} has padding between tokens {first} and {last}: nothing says what is one sequence; pad at an end"
                )
            starts = [first, *(start for start in begins_BL[row].nonzero()[:, 0].tolist() if start > first)]
            found += [(row, a, b) for a, b in zip(starts, [*starts[1:], last + 1], strict=True)]
        return cls(rows, length, tuple(found), length if fresh is None else fresh)

    def going_on(self, fresh: int) -> Sequences:
        """With so many tokens more in each row that did not end before."""
        found = tuple((row, a, b + fresh if b == self.length else b) for row, a, b in self.found)
        return Sequences(self.rows, self.length + fresh, found, fresh)

    def without(self, ended: Iterable[int]) -> Sequences:
        """Without these rows, which are at their end."""
        gone = set(ended)
        return replace(self, found=tuple(one for one in self.found if one[0] not in gone))

    def spans(self, queries: int, keys: int, memory: Sequences | None = None) -> list[Span] | None:
        """Where each sequence's queries and keys lie in an attention call of these sizes; None where they are of another kind.

        With a cache of fixed size there are more keys than tokens, or, behind a window, the last ones alone. With a `memory` the
        keys are its tokens instead.
        """
        cached = self.fresh < self.length
        if queries != self.fresh or (memory is None and keys < self.length and not cached):
            return None
        if memory is not None and keys != memory.length:
            return None
        offset, lost = self.length - queries, max(self.length - keys, 0)
        whole = {row: (start, stop) for row, start, stop in memory.found} if memory is not None else {}
        spans = []
        for row, start, stop in self.found:
            if stop <= offset or (memory is not None and row not in whole):
                continue
            first = max(start, offset)
            place = Span(
                row,
                first - offset,
                stop - offset,
                max(start - lost, 0),
                stop - lost,
                first - start,
                max(lost - start, 0),
            )
            if memory is not None:
                place = Span(row, place.start, place.stop, *whole[row], place.position)
            spans.append(place)
        return spans


@dataclass(frozen=True)
class Batch:
    """What a model was called with, as far as it tells tokens apart: encoder (or only) and decoder side."""

    tokens: Sequences | None = None
    decoder: Sequences | None = None
    ids_BL: Tensor | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, Any], before: Batch | None = None) -> Batch:
        """From the keywords of a transformers model's forward, and what the call before this one was told."""
        last = cls() if before is None else before
        sides = _sequences(inputs, "", last.tokens), _sequences(inputs, "decoder_", last.decoder)
        return cls(*sides, inputs.get("input_ids"))

    def without(self, ended: Iterable[int]) -> Batch:
        """Without these rows on the side that writes."""
        if self.decoder is not None:
            return replace(self, decoder=self.decoder.without(ended))
        return self if self.tokens is None else replace(self, tokens=self.tokens.without(ended))


def cache_of(inputs: Mapping[str, Any]) -> Any:
    """The cache that a model is called with, or None."""
    cache = inputs.get("cache")  # `past_key_values`, by its name before transformers 5.24
    return inputs.get("past_key_values") if cache is None else cache


def _sequences(inputs: Mapping[str, Any], side: str, before: Sequences | None) -> Sequences | None:
    """Of the encoder's (or only) side, or of the one whose keywords begin with `decoder_`."""
    tokens, mask = inputs.get(f"{side}input_ids"), inputs.get(f"{side}attention_mask")
    tokens = inputs.get(f"{side}inputs_embeds") if tokens is None else tokens
    if isinstance(mask, dict):  # by kind of layer; behind a window the one tells less
        masks = [mask.get("full_attention"), *mask.values()]
        mask = next((one for one in masks if one is not None), None)
    flat_BL = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    if tokens is None:  # a decoder that goes on is told of its memory by the mask alone
        return None if flat_BL is None else Sequences.of(flat_BL.shape[0], flat_BL.shape[1], flat_BL)
    rows, fresh = tokens.shape[:2]
    cache = cache_of(inputs) if side == "decoder_" or inputs.get("decoder_input_ids") is None else None
    written = 0 if cache is None else int(cache.get_seq_length())  # asked before the cache takes the new tokens
    if isinstance(mask, Tensor) and mask.dim() == 4:
        if mask.shape[3] >= written + fresh:
            return _of_pairs(mask, rows, fresh)
        if before is None or (before.rows, before.length) != (
            rows,
            written,
        ):  # behind a window, it tells of the last keys alone
            raise UnsupportedError(
                f"a mask of {mask.shape[3]} keys, and the cache has read {written} tokens: nothing says where sequences begin; "
                "capture from their first token on"
            )
        return before.going_on(fresh)
    length = fresh + written if flat_BL is None else flat_BL.shape[1]
    positions_BL = inputs.get(f"{side}position_ids")
    begins_BL = None
    if positions_BL is not None and positions_BL.dim() == 2 and positions_BL.shape[1] == length:
        places_BL = positions_BL.cpu().expand(rows, -1)
        before_BL = torch.ones(rows, length, dtype=torch.bool) if flat_BL is None else flat_BL.bool().cpu()
        begins_BL = torch.zeros(rows, length, dtype=torch.bool)
        begins_BL[:, 1:] = (places_BL[:, 1:] != places_BL[:, :-1] + 1) & before_BL[:, :-1]
    return Sequences.of(rows, length, flat_BL, begins_BL, fresh)


def _of_pairs(mask_BHTS: Tensor, rows: int, fresh: int) -> Sequences:
    """From a mask of queries and keys: a token that sees itself is real, and one that does not see the one before it begins anew.

    With a cache, where there are more keys than queries, from what the last query sees.
    """
    seen_BTS = mask_BHTS[:, 0] if mask_BHTS.dtype == torch.bool else mask_BHTS[:, 0] > hides(mask_BHTS.dtype)
    seen_BTS = seen_BTS.expand(rows, -1, -1).cpu()
    if seen_BTS.shape[1] == seen_BTS.shape[2]:
        begins_BL = torch.zeros(rows, fresh, dtype=torch.bool)
        begins_BL[:, 1:] = ~seen_BTS.diagonal(-1, 1, 2)
        return Sequences.of(rows, fresh, seen_BTS.diagonal(0, 1, 2), begins_BL)
    last_BS = seen_BTS[:, -1]
    length = int(last_BS.any(0).nonzero().max()) + 1
    return Sequences.of(rows, length, last_BS[:, :length], fresh=fresh)


def hides(dtype: torch.dtype) -> float:
    """What is added to the score of a hidden key is at most this; half of the smallest number in float16, which has no -1e9."""
    return max(-1e9, torch.finfo(dtype).min / 2)
