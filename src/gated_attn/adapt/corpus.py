"""Text for a transfer, in kinds: most of each calibrates, its last part is held out.

Shapes: N rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gated_attn import samples
from gated_attn.adapt.evidence import HeldOut
from gated_attn.errors import GatedAttnError, RecipeError
from gated_attn.measure.texts import python_help

HELD_OUT = 4
"""The last of so many equal parts of each text is held out."""

ROWS = 24
"""Held-out rows of each kind that are scored."""

RANGES = 4
"""Calibration rows of each kind that set the ranges of static quantisation."""

STREAM = 16_384
"""Tokens of the stream, from the held-out part of the longest text."""

TALKS = 8
"""Dialogues that make one chat."""


@dataclass(frozen=True)
class Corpus:
    """Kind of text -> rows (N, T) to calibrate on, and what is held out."""

    calibration: Mapping[str, Tensor]
    held_out: HeldOut

    def take(self, tokens: int, seed: int) -> Tensor:
        """Rows (N, T) of about so many tokens, equally many of each kind, in an order drawn from the seed."""
        order = torch.Generator().manual_seed(seed)
        T = next(iter(self.calibration.values())).shape[1]
        each = max(1, tokens // T // len(self.calibration))
        drawn = [ids_NT[torch.randperm(len(ids_NT), generator=order)[:each]] for ids_NT in self.calibration.values()]
        mixed = torch.cat(drawn)
        return mixed[torch.randperm(len(mixed), generator=order)]


def corpus(tokenizer: Any, texts: Mapping[str, list[str]], length: int) -> Corpus:
    """Rows of `length` tokens of each kind's documents, which are joined; RecipeError for a kind of too few.

    No row begins with a special token of the tokenizer: right behind the sink these are often sinks themselves.
    """
    calibration, rows, streams = {}, {}, []
    for kind, documents in texts.items():
        ids = [
            token
            for text in documents
            for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ]
        cut = len(ids) - len(ids) // HELD_OUT
        parts = [_rows(part, length, set(tokenizer.all_special_ids)) for part in (ids[:cut], ids[cut:])]
        if len(parts[1]) < 1 or len(parts[0]) < RANGES:
            least = max(RANGES * 2, HELD_OUT) * (length + 1)
            raise RecipeError(
                f"{kind}: {len(ids)} tokens; a transfer needs at least {least} of each kind for rows of {length}; pass more "
                "text, or a smaller --length"
            )
        calibration[kind], rows[kind] = parts[0], parts[1][:ROWS]
        streams.append(ids[cut:])
    longest = max(streams, key=len)[:STREAM]
    ranges = torch.cat([ids_NT[:RANGES] for ids_NT in calibration.values()])
    return Corpus(calibration, HeldOut(rows, ranges, torch.tensor(longest) if len(longest) == STREAM else None))


def _rows(ids: list[int], length: int, special: set[int]) -> Tensor:
    found, at = [], 0
    while at + length <= len(ids):
        if ids[at] in special:
            at += 1
            continue
        found.append(ids[at : at + length])
        at += length
    return torch.tensor(found, dtype=torch.long).view(-1, length)


def standard_texts(tokenizer: Any) -> Iterator[tuple[str, str, list[str]]]:
    """(kind, what it is, documents) of three kinds of English; those whose sample cannot be had are left out.

    Technical: the help texts of Python. Literature: the novels of Jane Austen. Chat: short dialogues in the chat template.
    """
    yield "technical", "the help texts of Python", [python_help()]
    for kind, name, told in (
        ("literature", "austen", "the novels of Jane Austen"),
        ("chat", "smalltalk", "short dialogues, in the model's chat template where it has one"),
    ):
        try:
            text = samples.text(name)
        except GatedAttnError:
            continue
        yield kind, f"{told} (sample {name})", [text] if kind != "chat" else list(chats(tokenizer, text))


def chats(tokenizer: Any, text: str) -> Iterator[str]:
    """Chats of `TALKS` dialogues, as the tokenizer's chat template writes them; the bare text where there is none."""
    if getattr(tokenizer, "chat_template", None) is None:
        yield text
        return
    # Templates want turns that alternate, so the unanswered last line of an odd dialogue is left out.
    talks = [lines[: len(lines) // 2 * 2] for talk in text.split("\n\n") if (lines := talk.strip().split("\n"))]
    for start in range(0, len(talks), TALKS):
        lines = [line for talk in talks[start : start + TALKS] for line in talk]
        turns = [{"role": ("user", "assistant")[i % 2], "content": line} for i, line in enumerate(lines)]
        yield str(tokenizer.apply_chat_template(turns, tokenize=False))
