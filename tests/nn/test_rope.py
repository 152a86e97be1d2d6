"""RoPE: the published rotation and scalings, checked against transformers' own frequencies."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from gated_attn.errors import SpecError
from gated_attn.nn import Rope

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 0.9},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False},
]  # fmt: skip


def config(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> LlamaConfig:
    parameters = {"rope_theta": theta, **({"rope_type": "default"} if scaling is None else scaling)}
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("head_dim", [6, 64])
def test_frequencies_are_transformers(scaling: dict[str, Any], head_dim: int) -> None:
    want, want_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        config(head_dim, 50_000.0, scaling), torch.device("cpu")
    )
    got, factor = Rope(head_dim, theta=50_000.0, scaling=scaling).frequencies()
    assert factor == pytest.approx(want_factor)
    assert ((got - want) / want).abs().max() <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("scaling", [None, *SCALINGS[:3]], ids=lambda s: "none" if s is None else s["rope_type"])
def test_rotated_heads_are_transformers(scaling: dict[str, Any] | None) -> None:
    x, positions = torch.randn(2, 7, 4, 10), torch.tensor([[0, 1, 2, 3, 4, 5, 6], [3, 9, 9, 700, 0, 1, 2]])
    cos, sin = LlamaRotaryEmbedding(config(10, 10_000.0, scaling))(x, positions)
    want, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    assert (Rope(10, scaling=scaling).rotate(x, positions) - want.transpose(1, 2)).abs().max() < 2e-5


def test_partial_rotation_leaves_the_other_channels() -> None:
    x, positions = torch.randn(1, 5, 2, 16), torch.arange(5)[None]
    got = Rope(16, fraction=0.25).rotate(x, positions)
    assert torch.equal(got[..., 4:], x[..., 4:])
    assert torch.equal(got[..., :4], Rope(4).rotate(x[..., :4], positions))
    assert torch.equal(got[:, 0], x[:, 0]), "position 0 is not rotated"


def test_scores_depend_on_the_distance_alone() -> None:
    rope = Rope(8)
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def score(a: int, b: int) -> float:
        return float((rope.rotate(q, torch.tensor([[a]])) * rope.rotate(k, torch.tensor([[b]]))).sum())

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, positions = torch.randn(1, 5, 2, 8, dtype=dtype), torch.tensor([[0, 1, 2, 3, 30_000]])
    got = Rope(8).rotate(x, positions)
    assert got.dtype == dtype
    assert torch.equal(got, Rope(8).rotate(x.float(), positions).to(dtype))


def test_transformers_own_dictionary_is_taken_and_never_ignored() -> None:
    whole = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    assert Rope(8, theta=500.0, fraction=0.5, scaling=whole) == Rope(
        8, 500.0, 0.5, {"rope_type": "linear", "factor": 3.0}
    )
    assert Rope(8, theta=500.0, scaling={"rope_type": "default", "rope_theta": 500.0}) == Rope(8, theta=500.0)
    with pytest.raises(
        SpecError, match=r"scaling says rope_theta=500.0 and this Rope has 10000.0; pass it as theta too"
    ):
        Rope(8, fraction=0.5, scaling=whole)
    with pytest.raises(SpecError, match=r"partial_rotary_factor=0.5 and this Rope has 1.0; pass it as fraction too"):
        Rope(8, theta=500.0, scaling=whole)


def test_it_is_a_value() -> None:
    rope = Rope(8, scaling=SCALINGS[1])
    assert copy.deepcopy(rope) == rope
    assert pickle.loads(pickle.dumps(rope)) == rope
    assert hash(rope) == hash(Rope(8, scaling=dict(reversed(SCALINGS[1].items()))))
    assert rope != Rope(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 7}, "fraction=1 of head_dim=7 is 7, which must be even"),
        ({"head_dim": 8, "fraction": 0.0}, "fraction=0 of head_dim=8 is 0"),
        ({"head_dim": 8, "fraction": 1.5}, "must be even, at least 2 and at most head_dim"),
        (
            {"head_dim": 8, "scaling": {"rope_type": "ntk", "factor": 2.0}},
            "unknown rope_type 'ntk' in scaling; legal: linear, llama3, yarn",
        ),
        ({"head_dim": 8, "scaling": {"rope_type": "linear"}}, r"it needs \['factor'\]"),
        ({"head_dim": 8, "scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0}}, "may have"),
    ],
)
def test_what_cannot_be_rotated_says_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Rope(**options)


def test_yarns_factor_is_its_formula() -> None:
    assert Rope(8, scaling=SCALINGS[2]).frequencies()[1] == pytest.approx(0.1 * math.log(4.0) + 1)
