"""What `generate` does beside reading tokens: it fills rows that are at their end, and may take tokens back.

Shapes: B batch, T tokens of a call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_attn.errors import UnsupportedError
from gated_attn.measure.tokens import cache_of

TAKEN_BACK = (
    "tokens that were counted are taken back from the cache, as assisted generation does with its candidates; generate without "
    "an assistant, or watch the model as it reads the result"
)

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""What makes `generate` try candidates."""


class _Call(NamedTuple):
    """A call with a cache: how many tokens it holds afterwards, each row's last token, and which rows are at their end."""

    cache: Any
    length: int
    last_B: Tensor
    ended_B: Tensor


class Generating:
    """Tells rows that a model goes on with from those that are only filled, which no mask does."""

    def __init__(self) -> None:
        self._pad = -1
        self._ends: list[int] = []
        self._before: _Call | None = None

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Meanwhile the model's `generate` says what it ends and fills rows with, and refuses to try candidates."""
        if not hasattr(model, "generate"):
            yield
            return
        generate = model.generate

        def watched(*args: Any, **kwargs: Any) -> Any:
            given = [kwargs.get("generation_config", args[1] if len(args) > 1 else None), model.generation_config]

            def said(word: str) -> Any:
                words = [kwargs.get(word), *(getattr(config, word, None) for config in given)]
                return next((one for one in words if one is not None), None)

            if any(said(word) for word in ASSISTED):
                raise UnsupportedError(TAKEN_BACK)
            ends, pad = said("eos_token_id"), said("pad_token_id")
            self._ends = [] if ends is None else torch.as_tensor(ends).flatten().tolist()
            self._pad = int(pad) if pad is not None else next(iter(self._ends), -1)
            try:
                return generate(*args, **kwargs)
            finally:
                self._pad = -1

        own = model.__dict__.get("generate")
        model.__dict__["generate"] = watched
        try:
            yield
        finally:
            model.__dict__.pop("generate")
            if own is not None:
                model.__dict__["generate"] = own

    def ended(self, inputs: Mapping[str, Any], ids: str) -> list[int]:
        """The rows of a call with these keywords that are filled, asked before the cache takes the tokens called `ids`.

        UnsupportedError if the cache holds less than it did.
        """
        ids_BT, cache, before = inputs.get(ids), cache_of(inputs), self._before
        if cache is None or ids_BT is None:
            self._before = None
            return []
        written = int(cache.get_seq_length())
        goes_on = before is not None and before.cache() is cache and written > 0
        if before is not None and goes_on and written < before.length:
            raise UnsupportedError(TAKEN_BACK)
        last_B = ids_BT[:, -1].cpu()
        ended_B = torch.zeros(len(last_B), dtype=torch.bool)
        if (
            before is not None
            and goes_on
            and self._pad >= 0
            and ids_BT.shape[1] == 1
            and len(before.last_B) == len(last_B)
        ):
            behind_B = before.ended_B | torch.isin(before.last_B, torch.tensor(self._ends, dtype=torch.long))
            ended_B = behind_B & (last_B == self._pad)
        self._before = _Call(weakref.ref(cache), written + ids_BT.shape[1], last_B, ended_B)
        return ended_B.nonzero()[:, 0].tolist()
