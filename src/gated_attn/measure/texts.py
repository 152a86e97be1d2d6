"""Text to measure on: what comes with Python itself, how it becomes batches, and which class each token is of.

Shapes: B batch, L tokens, C token classes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gated_attn.errors import RecipeError

KINDS = ("special", "whitespace", "punctuation", "number", "word start", "word piece")
CLASSES = (*KINDS, "first occurrence", "repeated")
"""Every token is of one kind, and occurs in its sequence for the first time or again."""


def python_help() -> str:
    """Technical English that every Python has: the texts of `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_batches(
    tokenizer: Any, text: str, *, tokens: int, length: int, rows: int = 4, special: bool = True
) -> Iterator[dict[str, Tensor]]:
    """The text's first `tokens` tokens in sequences of `length`, `rows` at a time; `special`: each with the tokenizer's own tokens.

    RecipeError where the text has fewer than `length`.
    """
    before, after = special_tokens(tokenizer) if special else ([], [])
    body = length - len(before) - len(after)
    if body < 1:
        raise RecipeError(f"length={length} leaves no room beside {length - body} special tokens; make it larger")
    # Tokenizers warn about more tokens than the model reads; they are cut here.
    ids = tokenizer(text[: 12 * tokens + 4096], add_special_tokens=False, verbose=False)["input_ids"]
    count = min(tokens // length, len(ids) // body)
    if count < 1:
        raise RecipeError(
            f"{len(ids)} tokens of text and tokens={tokens} do not fill one sequence of {length}; pass more text, "
            "or a smaller length"
        )
    built = [[*before, *ids[i * body : (i + 1) * body], *after] for i in range(count)]
    for start in range(0, count, rows):
        rows_BL = torch.tensor(built[start : start + rows])
        yield {"input_ids": rows_BL, "attention_mask": torch.ones_like(rows_BL)}


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text, such as [CLS] and [SEP]."""
    probe = "a b"
    bare, whole = (tokenizer(probe, add_special_tokens=special)["input_ids"] for special in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def written(tokenizer: Any, token: int) -> str:
    """The token as text."""
    return str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def classifier(tokenizer: Any) -> Callable[[Tensor], Tensor]:
    """What gives, for token numbers (B, L), which classes each token is in: bool (B, L, C) in the order of `CLASSES`."""
    kinds: dict[int, int] = {}
    marked = _marks_spaces(tokenizer)

    def class_of(ids_BL: Tensor) -> Tensor:
        ids_BL = ids_BL.cpu()
        for token in ids_BL.unique().tolist():
            if token not in kinds:
                kinds[token] = KINDS.index(kind(tokenizer, token, marked))
        found = torch.zeros(*ids_BL.shape, len(CLASSES), dtype=torch.bool)
        for row, ids in enumerate(ids_BL.tolist()):
            seen: set[int] = set()
            for place, token in enumerate(ids):
                found[row, place, kinds[token]] = True
                found[row, place, len(KINDS) + (token in seen)] = True
                seen.add(token)
        return found

    return class_of


def kind(tokenizer: Any, token: int, marked: bool) -> str:
    """Which of `KINDS` a token is; `marked`: tokens that begin a word carry the space before it."""
    if token in tokenizer.all_special_ids:
        return "special"
    text = written(tokenizer, token)
    bare = text.strip()
    if not bare:
        return "whitespace"
    if all(unicodedata.category(ch)[0] in "PS" for ch in bare.removeprefix("##")):
        return "punctuation"
    if bare.removeprefix("##").isnumeric():
        return "number"
    piece = tokenizer.convert_ids_to_tokens(token)
    begins = piece[0] in "Ġ▁" if marked else not piece.startswith("##")
    return "word start" if begins else "word piece"


def _marks_spaces(tokenizer: Any) -> bool:
    """Whether tokens that begin a word carry the space before it."""
    return any(
        piece[:1] in "Ġ▁" for piece in tokenizer.convert_ids_to_tokens(list(range(min(2000, len(tokenizer))))) if piece
    )
