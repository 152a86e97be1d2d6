"""Data: every item is a function of seed and index, and backcopy's rule holds."""

from __future__ import annotations

import pytest
import torch

from gated_attn.errors import RecipeError
from gated_attn.train.data import Backcopy, TextCrops, as_item, datasets, spread_windows, token_texts
from gated_attn.train.recipe import Recipe


def test_crops_are_the_texts_own_bytes_and_depend_on_the_seed() -> None:
    text = torch.arange(251, dtype=torch.uint8)
    crops = TextCrops(text, context=13, items=29, seed=5)
    assert len(crops) == 29
    for i in (0, 7, 28):
        tokens = crops[i]["input_ids"]
        assert torch.equal(tokens, torch.arange(int(tokens[0]), int(tokens[0]) + 13))
        assert torch.equal(TextCrops(text, 13, 29, 5)[i]["input_ids"], tokens)
    other = TextCrops(text, 13, 29, 6)
    assert any(not torch.equal(other[i]["input_ids"], crops[i]["input_ids"]) for i in range(29))
    with pytest.raises(RecipeError, match="251 bytes and the context is 251"):
        TextCrops(text, 251, 2, 1)


def test_the_first_label_does_not_count() -> None:
    item = as_item(torch.tensor([4, 5, 6]))
    assert item["labels"].tolist() == [-100, 5, 6]
    assert item["input_ids"].tolist() == [4, 5, 6]


def test_backcopy_copies_after_triggers_and_only_there() -> None:
    data = Backcopy(vocab_size=19, triggers=3, context=31, items=300, seed=1)
    rows = torch.stack([data[i]["input_ids"] for i in range(300)])
    assert torch.equal(data[7]["input_ids"], rows[7]), "an earlier block must come out the same again"
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1:] > 0).all()
    trigger = (rows >= 1) & (rows <= 3)
    after = trigger[:, 1:-1]
    assert after.sum() > 300
    assert (rows[:, 2:][after] == rows[:, :-2][after]).all()
    assert (rows[:, 2:][~after] == rows[:, :-2][~after]).float().mean() < 0.5
    assert not (trigger[:, 1:] & trigger[:, :-1]).any()


def test_validation_windows_do_not_overlap_and_span_the_text() -> None:
    windows = spread_windows(torch.arange(1009), context=10, count=7)
    assert windows.shape == (7, 10)
    assert windows[0, 0] == 0
    assert windows[-1, 0] == 990
    assert (windows[1:, 0] - windows[:-1, 0] >= 10).all()
    assert len(spread_windows(torch.arange(31), 10, 99)) == 3


def test_training_data_differ_by_seed_and_validation_does_not(tiny: Recipe) -> None:
    (train_1, held_1), (train_2, held_2) = datasets(tiny, 1), datasets(tiny, 2)
    assert not torch.equal(train_1[0]["input_ids"], train_2[0]["input_ids"])
    assert all(torch.equal(a, b) for a, b in zip(held_1, held_2, strict=True))
    assert len(train_1) == 120  # type: ignore[arg-type]
    assert [len(batch) for batch in held_1] == [6, 6]


def test_tokens_are_written_for_people(tiny: Recipe) -> None:
    assert token_texts(tiny, torch.tensor([0, 1, 2, 3])) == ["<s>", "T1", "T2", "w3"]
    assert token_texts(Recipe.load("demo"), torch.tensor([72, 105, 10])) == ["H", "i", "\n"]


def test_shakespeare_is_split_without_overlap(shakespeare_text: str) -> None:
    recipe = Recipe.load("demo", ["training.steps=2", "training.eval_batches=3"])
    train, held_out = datasets(recipe, 1)
    assert torch.cat(held_out).shape == (36, 128)
    text = shakespeare_text.encode()
    assert bytes(held_out[0][0].tolist()) == text[int(len(text) * 0.9) :][:128]
    assert bytes(train[0]["input_ids"].tolist()) in text[: int(len(text) * 0.9)]
