"""`KVCache` is an immutable value."""

from __future__ import annotations

import pytest
import torch

from gated_attn.errors import ShapeError
from gated_attn.nn import KVCache


def test_appending_makes_a_new_cache_and_leaves_the_old() -> None:
    k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 11)
    empty = KVCache()
    assert empty.length == 0
    one = empty.append(k, v)
    two = one.append(k + 1, v + 1)
    assert (empty.length, one.length, two.length) == (0, 3, 6)
    assert torch.equal(two.tensors[0], torch.cat([k, k + 1], 1))
    assert torch.equal(two.tensors[1], torch.cat([v, v + 1], 1))
    assert torch.equal(one.tensors[0], k)
    with pytest.raises(AttributeError):
        one.k_BSKE = k  # type: ignore[misc]


def test_other_sizes_are_refused() -> None:
    cache = KVCache().append(torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7))
    for shape in [(1, 1, 5, 7), (2, 1, 4, 7), (2, 1, 5, 6)]:
        with pytest.raises(ShapeError, match=r"keys of shape \(2, 3, 5, 7\) .* they may differ in tokens only"):
            cache.append(torch.randn(shape), torch.randn(shape))


def test_an_empty_cache_has_no_tensors() -> None:
    with pytest.raises(ShapeError, match="append some first"):
        _ = KVCache().tensors
