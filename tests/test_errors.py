"""Errors cross process boundaries whole."""

from __future__ import annotations

import pickle

import pytest

from gated_attn.errors import GatedAttnError, MissingExtraError, ShapeError, TrainingError, UnsupportedError

ERRORS = [
    TrainingError(7, "the loss is nan"),
    MissingExtraError("jinja2", "lab", "the report"),
    UnsupportedError("no impl serves this", {"flex": "has no dropout"}),
    ShapeError("a of shape (2,)"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_they_pickle(error: GatedAttnError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.__dict__ == error.__dict__
