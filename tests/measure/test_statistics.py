"""Statistics against their formulas by hand."""

from __future__ import annotations

import pytest
import torch

from gated_attn.measure.statistics import first_token_share, histogram, max_abs, share_below


def test_first_token_share_leaves_out_the_query_that_has_no_choice() -> None:
    first_HT = torch.tensor([[1.0, 0.5, 0.1], [1.0, 0.0, 0.0]])
    assert first_token_share(first_HT).tolist() == pytest.approx([0.3, 0.0])
    assert first_token_share(first_HT, include_first_query=True).tolist() == pytest.approx([1.6 / 3, 1 / 3])
    assert first_token_share(first_HT[:, :1]).isnan().all()


def test_share_below_is_strict() -> None:
    assert share_below(torch.tensor([0.05, 0.1, 0.2, -1.0]), 0.1) == 0.5


def test_histogram_counts_everything_once() -> None:
    values = torch.tensor([-3.0, 0.0, 0.09, 0.1, 0.55, 0.999, 1.0, 7.0])
    assert histogram(values, 10, 0.0, 1.0) == (3, 1, 0, 0, 0, 1, 0, 0, 0, 3)
    assert sum(histogram(torch.randn(3, 5, 7), 20, -1.0, 2.0)) == 105


def test_max_abs_is_of_either_sign_and_0_for_nothing() -> None:
    assert max_abs(torch.tensor([1.0, -7.5])) == 7.5
    assert max_abs(torch.empty(0)) == 0.0
