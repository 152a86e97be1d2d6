"""Masks: one type and one polarity, ends aligned, and the hiding numbers of every dtype."""

from __future__ import annotations

import math

import pytest
import torch

from gated_attn.attention.masks import normalise

CPU = torch.device("cpu")


def keep(T: int, S: int, **options: object) -> list[list[int]]:
    defaults = {"mask": None, "causal": False, "window": None, "doc_ids": None}
    masking = normalise(**{**defaults, **options}, shape_BHTS=(1, 1, T, S), device=CPU)  # type: ignore[arg-type]
    visible = masking.visible(CPU)
    assert visible is not None
    return visible.expand(1, 1, T, S)[0, 0].int().tolist()


def test_causality_is_aligned_to_the_end() -> None:
    assert keep(2, 4, causal=True) == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert keep(4, 2, causal=True) == [[0, 0], [0, 0], [1, 0], [1, 1]]


def test_a_window_counts_the_query_itself() -> None:
    assert keep(3, 3, causal=True, window=2) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert keep(3, 3, window=2) == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert keep(1, 4, causal=True, window=2) == [[0, 0, 1, 1]]
    assert keep(3, 3, causal=True, window=1) == torch.eye(3).int().tolist()


def test_documents_see_themselves_and_late_queries_are_the_last() -> None:
    docs = torch.tensor([[4, 4, 9, 9]])
    assert keep(4, 4, doc_ids=docs) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert keep(2, 4, doc_ids=docs, causal=True) == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert keep(5, 4, doc_ids=docs)[0] == [0, 0, 0, 0], "a query before every key belongs to no document"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hiding", [-math.inf, "finfo.min"])
def test_a_float_mask_hides_at_the_dtypes_end_and_adds_elsewhere(dtype: torch.dtype, hiding: float | str) -> None:
    value = torch.finfo(dtype).min if hiding == "finfo.min" else float(hiding)
    mask = torch.tensor([[0.5, value, -1000.0]], dtype=dtype)
    masking = normalise(mask, causal=False, window=None, doc_ids=None, shape_BHTS=(1, 1, 1, 3), device=CPU)
    assert masking.keep is not None
    assert masking.keep.tolist() == [[True, False, True]]
    assert masking.bias is not None
    assert masking.bias.tolist() == [[0.5, 0.0, -1000.0]]


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_minus_1e9_hides_too_and_whatever_the_scores_cannot_hold(mask_dtype: torch.dtype, dtype: torch.dtype) -> None:
    mask = torch.tensor([[0.0, -1e9, -1e5, -1e4]], dtype=mask_dtype)
    masking = normalise(mask, causal=False, window=None, doc_ids=None, shape_BHTS=(1, 1, 1, 4), device=CPU, dtype=dtype)
    assert masking.keep is not None
    assert masking.keep.tolist() == [[True, False, dtype != torch.float16, True]]


def test_nothing_to_hide_is_no_mask() -> None:
    masking = normalise(None, causal=False, window=None, doc_ids=None, shape_BHTS=(2, 3, 4, 5), device=CPU)
    assert masking.visible(CPU) is None
    assert not masking.structural
