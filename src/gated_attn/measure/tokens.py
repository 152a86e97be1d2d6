"""Which tokens of a batch are real, and which sequence each belongs to: what a mask and positions say.

Shapes: B batch, T queries, S keys, L tokens that the mask speaks of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gated_attn.measure.streaming import Span


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch: for each its row, first token and the end (exclusive), of `length` tokens a row.

    A padded row is one sequence without its padding; a row of packed documents is several, which position ids that start anew
    tell apart.
    """

    rows: int
    length: int
    found: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, rows: int, length: int, mask_BL: Tensor | None = None, positions_BL: Tensor | None = None) -> Sequences:
        """From a mask (1 where real) and position ids, each (B, L), or None."""
        real_BL = torch.ones(rows, length, dtype=torch.bool) if mask_BL is None else mask_BL.bool().cpu()
        begins_BL = torch.zeros_like(real_BL)
        if positions_BL is not None and positions_BL.shape == real_BL.shape:
            before_BL = positions_BL.cpu()
            begins_BL[:, 1:] = (before_BL[:, 1:] != before_BL[:, :-1] + 1) & real_BL[:, 1:] & real_BL[:, :-1]
        found = []
        for row in range(rows):
            real = real_BL[row].nonzero()[:, 0].tolist()
            if not real:
                continue
            starts = [real[0], *begins_BL[row].nonzero()[:, 0].tolist()]
            found += [(row, a, b) for a, b in zip(starts, [*starts[1:], real[-1] + 1], strict=True)]
        return cls(rows, length, tuple(found))

    def spans(self, queries: int, keys: int, memory: Sequences | None = None) -> list[Span] | None:
        """Where each sequence's queries and keys lie in an attention call of these sizes; None where they are of another kind.

        The queries are the last `queries` tokens; with a cache of fixed size there are more keys than tokens. With a `memory`
        the keys are its tokens instead.
        """
        source = self if memory is None else memory
        if queries > self.length or keys < source.length or (memory is not None and keys != memory.length):
            return None
        offset = self.length - queries
        whole = {row: (start, stop) for row, start, stop in source.found}
        spans = []
        for row, start, stop in self.found:
            if stop <= offset or (memory is not None and row not in whole):
                continue
            key_start, key_stop = (start, stop) if memory is None else whole[row]
            first = max(start, offset)
            spans.append(Span(row, first - offset, stop - offset, key_start, key_stop, first - start))
        return spans


@dataclass(frozen=True)
class Batch:
    """What a model was called with, as far as it tells tokens apart: encoder (or only) and decoder side."""

    tokens: Sequences | None
    decoder: Sequences | None
    ids_BL: Tensor | None
    decoder_ids_BL: Tensor | None

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Batch:
        """From the keywords of a transformers model's forward."""
        return cls(
            _sequences(inputs, ""),
            _sequences(inputs, "decoder_"),
            inputs.get("input_ids"),
            inputs.get("decoder_input_ids"),
        )  # fmt: skip


def _sequences(inputs: Mapping[str, Any], side: str) -> Sequences | None:
    """Of the encoder's (or only) side, or of the one whose keywords begin with `decoder_`."""
    tokens, given = inputs.get(f"{side}input_ids"), inputs.get(f"{side}attention_mask")
    tokens = inputs.get(f"{side}inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return None
    given = given.get("full_attention") if isinstance(given, dict) else given
    mask_BL = given if isinstance(given, Tensor) and given.dim() == 2 else None
    if isinstance(given, Tensor) and given.dim() == 4:  # what `generate` makes for a cache of fixed size: (B, 1, T, S)
        last_BS = (
            given[:, 0, -1]
            if given.dtype == torch.bool
            else given[:, 0, -1] > max(-1e9, torch.finfo(given.dtype).min / 2)
        )
        mask_BL = last_BS[:, : int(last_BS.any(0).nonzero().max()) + 1]
    rows, length = tokens.shape[:2]
    cache = inputs.get("cache")  # `past_key_values`, by its name before transformers 5.24
    cache = inputs.get("past_key_values") if cache is None else cache
    writes = side == "decoder_" or inputs.get("decoder_input_ids") is None
    if mask_BL is None and cache is not None and writes:
        length += int(cache.get_seq_length())  # asked before the cache takes the new tokens
    return Sequences.of(
        rows, length if mask_BL is None else mask_BL.shape[1], mask_BL, inputs.get(f"{side}position_ids")
    )
