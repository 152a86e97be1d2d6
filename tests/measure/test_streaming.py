"""Streaming summaries against the maps they stand for: by hand, and as written with the whole map at hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gated_attn.errors import UnsupportedError
from gated_attn.measure import streaming
from gated_attn.measure.statistics import first_token_share, normalised_entropy, sink_share, strongest_key
from gated_attn.measure.streaming import HIDDEN, Scores, Span, Summary, summarize, summarize_weights
from gated_attn.measure.tokens import Batch, Sequences

B, H, K, T, S, E = 2, 6, 3, 29, 31, 8
FIELDS = ("first_HT", "entropy_HT", "visible_T", "received_HS", "queries_S", "late_HS", "late_queries_S")


def maps(kind: str, n: int = 5) -> Tensor:
    """(1, 1, n, n): every query alike, all on the first, each on itself, two blocks; causal where it is said."""
    found = {
        "uniform": torch.full((n, n), 1 / n),
        "causal": torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None],
        "first": torch.eye(n)[:1].repeat(n, 1),
        "diagonal": torch.eye(n),
        "block": torch.block_diag(torch.full((2, 2), 1 / 2), torch.full((n - 2, n - 2), 1 / (n - 2))),
    }
    return found[kind][None, None]


@pytest.mark.parametrize(
    ("kind", "share", "share_all", "strongest", "position", "entropy"),
    [
        ("uniform", 1 / 5, 1 / 5, 1 / 5, 0, 1.0),
        (
            "causal",
            (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4,
            (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 5,
            (137 / 60) / 5,
            0,
            1.0,
        ),
        ("first", 1.0, 1.0, 1.0, 0, None),
        ("diagonal", 0.0, 1 / 5, 1 / 5, 0, None),
        ("block", 1 / 8, 1 / 5, 1 / 5, 0, None),
    ],
)
def test_golden_values_of_hand_made_maps(
    kind: str, share: float, share_all: float, strongest: float, position: int, entropy: float | None
) -> None:
    every = torch.ones(1, 5, 5, dtype=torch.bool)
    seen = every.tril() if kind == "causal" else every
    (summary,) = summarize_weights(maps(kind), [Span(0, 0, 5, 0, 5)], seen_BTS=seen)
    assert float(first_token_share(summary.first_HT)) == pytest.approx(share)
    assert float(first_token_share(summary.first_HT, include_first_query=True)) == pytest.approx(share_all)
    assert float(sink_share(summary.first_HT, tokens=5)) == pytest.approx(share_all)
    assert sink_share(summary.first_HT, tokens=6).isnan().all()
    share_H, position_H = strongest_key(summary.received_HS, summary.queries_S, least=3)
    assert float(share_H) == pytest.approx(strongest)
    assert int(position_H) == position
    measured = float(normalised_entropy(summary.entropy_HT, summary.visible_T))
    by_hand = {"first": 0.0, "diagonal": 0.0, "block": (2 * math.log(2) + 3 * math.log(3)) / 5 / math.log(5)}
    assert measured == pytest.approx(by_hand.get(kind, entropy), abs=1e-6)


def test_the_strongest_key_is_where_it_is_and_needs_queries() -> None:
    received, queries = torch.tensor([[1.0, 8.0, 0.9]]), torch.tensor([10.0, 9.0, 1.0])
    assert [x.tolist() for x in strongest_key(received, queries, least=2)] == [pytest.approx([8 / 9]), [1]]
    assert [x.tolist() for x in strongest_key(received, queries, least=1)] == [pytest.approx([0.9]), [2]]
    assert [x.tolist() for x in strongest_key(received, queries, least=11)] == [[0.0], [-1]]


def reference(scores: Scores) -> tuple[Tensor, Tensor]:
    """(weights (B, H, T, S), seen (B, T, S)), the whole map in float64."""
    group = scores.q_BHTE.shape[1] // scores.k_BKSE.shape[1]
    k_BHSE = scores.k_BKSE.repeat_interleave(group, 1).double()
    s = scores.q_BHTE.double() @ k_BHSE.transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    s = s if scores.bias is None else s + scores.bias.double()
    ahead = torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None] - scores.offset
    hidden = torch.zeros_like(s, dtype=torch.bool)
    hidden |= (ahead > 0) & scores.causal
    if scores.window is not None:
        hidden |= ahead.abs() >= scores.window
    if scores.keep is not None:
        hidden |= ~scores.keep
    hidden |= s < HIDDEN / 2
    s = s.masked_fill(hidden, -torch.inf)
    if scores.sink_H is not None:
        s = torch.cat([s, scores.sink_H.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    weights = s.softmax(-1).nan_to_num(0.0)[..., : hidden.shape[-1]]
    return weights, ~hidden[:, 0]


def random_scores(**options: Any) -> Scores:
    made = torch.Generator().manual_seed(5)
    q, k = torch.randn(B, H, T, E, generator=made) * 3, torch.randn(B, K, S, E, generator=made)
    return Scores(q, k, E**-0.5, **options)


CASES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"causal": True},
    "causal, aligned to the end": {"causal": True, "offset": S - T},
    "window": {"causal": True, "offset": S - T, "window": 7},
    "window to both sides": {"window": 5},
    "mask": {
        "keep": (torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(1)) < 0.4)
        & (torch.arange(T) % 9 != 6)[:, None]
    },
    "mask of keys": {"keep": (torch.arange(S) < 23)[None, None, None]},
    "bias per head": {"bias": torch.randn(1, H, T, S, generator=torch.Generator().manual_seed(2))},
    "bias that hides": {
        "bias": torch.zeros(B, 1, T, S).masked_fill(torch.arange(S) > torch.arange(T)[:, None], -3.4e38)
    },
    "softcap": {"softcap": 2.0, "causal": True},
    "sink": {"sink_H": torch.linspace(-1, 2, H), "causal": True},
}


@pytest.mark.parametrize("budget", [1, 700, 4 << 20])
@pytest.mark.parametrize("case", CASES)
def test_blocks_of_any_size_equal_the_whole_map(case: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BUDGET", budget)
    scores = random_scores(**CASES[case])
    weights, seen = reference(scores)
    whole = [Span(0, 0, T, 0, S), Span(1, 4, 17, 0, S, 2), Span(1, 17, 28, 0, S)]
    parts = [Span(1, 2, 15, 4, 19), Span(1, 15, 29, 19, S, 3)]
    apart = torch.zeros(1, 1, T, S, dtype=torch.bool)
    for span in parts:
        apart[..., span.start : span.stop, span.key_start : span.key_stop] = True
    scores_apart = replace(scores, keep=apart if scores.keep is None else apart & scores.keep)
    weights_apart, seen_apart = reference(scores_apart)
    if case == "mask":
        assert not seen.any(-1).all(), "some query sees nothing"
    found = [*summarize(scores, whole, late=7), *summarize(scores_apart, parts, late=7)]
    wanted = summarize_weights(weights, whole, late=7, seen_BTS=seen)
    wanted += summarize_weights(weights_apart, parts, late=7, seen_BTS=seen_apart)
    pairs = zip([*whole, *parts], found, wanted, strict=True)
    for span, got, want in pairs:
        for name in FIELDS:
            assert float((getattr(got, name) - getattr(want, name)).abs().max()) <= 1e-5, (name, span)


def test_the_log_sum_exp_is_that_of_the_scores() -> None:
    scores = random_scores(causal=True)
    got = summarize(scores, [Span(1, 0, T, 0, S)], lse=True)[0].lse_HT
    s = scores.q_BHTE @ scores.k_BKSE.repeat_interleave(2, 1).transpose(-1, -2) * scores.scale
    want = s.masked_fill(torch.arange(S) > torch.arange(T)[:, None], -torch.inf).logsumexp(-1)[1]
    assert got is not None
    assert torch.allclose(got, want, atol=1e-5)


def test_chosen_heads_are_the_same_heads() -> None:
    scores = random_scores(**CASES["bias per head"], sink_H=torch.linspace(-1, 2, H))
    whole, some = (summarize(one, [Span(0, 0, T, 0, S)])[0] for one in (scores, scores.of_heads((5, 0, 1))))
    assert torch.allclose(some.first_HT, whole.first_HT[[5, 0, 1]], atol=1e-6)
    assert torch.allclose(some.received_HS, whole.received_HS[[5, 0, 1]], atol=1e-5)


def test_memory_is_a_block_and_not_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    block = Scores.block

    def watched(*args: Any) -> Tensor:
        nonlocal largest
        out = block(*args)
        largest = max(largest, out.numel() * out.element_size())
        return out

    monkeypatch.setattr(Scores, "block", watched)
    q, k = torch.randn(1, 2, 4096, 4), torch.randn(1, 1, 4096, 4)
    summarize(Scores(q, k, 0.5, causal=True), [Span(0, 0, 4096, 0, 4096)])
    assert largest <= 1.1 * streaming.BUDGET < 4 * 2 * 4096 * 4096 / 10


@pytest.mark.parametrize(
    ("mask", "positions", "found"),
    [
        (None, None, ((0, 0, 4), (1, 0, 4))),
        ([[1, 1, 1, 1], [0, 0, 1, 1]], None, ((0, 0, 4), (1, 2, 4))),
        ([[1, 1, 1, 0], [0, 0, 0, 0]], None, ((0, 0, 3),)),
        ([[1, 1, 1, 1], [0, 1, 1, 1]], [[0, 1, 0, 1], [0, 0, 1, 2]], ((0, 0, 2), (0, 2, 4), (1, 1, 4))),
        (None, [[0, 1, 2, 3], [0, 0, 0, 1]], ((0, 0, 4), (1, 0, 1), (1, 1, 2), (1, 2, 4))),
    ],
)
def test_sequences_are_what_masks_and_positions_say(mask: Any, positions: Any, found: Any) -> None:
    given = {"attention_mask": mask, "position_ids": positions}
    inputs = {name: torch.tensor(value) for name, value in given.items() if value is not None}
    tokens = Batch.of({"input_ids": torch.zeros(2, 4, dtype=torch.long), **inputs}).tokens
    assert tokens is not None
    assert tokens.found == found


def test_positions_of_one_row_are_those_of_all() -> None:
    tokens = Batch.of({"input_ids": torch.zeros(2, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])}).tokens
    assert tokens is not None
    assert tokens.found == ((0, 0, 2), (0, 2, 4), (1, 0, 2), (1, 2, 4))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32])
def test_masks_of_pairs_tell_padding_and_documents(dtype: torch.dtype) -> None:
    seen = torch.block_diag(torch.ones(5, 5).tril(), torch.ones(7, 7).tril()).bool()[None, None].repeat(2, 1, 1, 1)
    seen[1, :, :, :2] = False
    mask = (
        seen if dtype == torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    )
    tokens = Batch.of({"input_ids": torch.zeros(2, 12), "attention_mask": mask}).tokens
    assert tokens is not None
    assert tokens.found == ((0, 0, 5), (0, 5, 12), (1, 2, 5), (1, 5, 12))


def test_padding_between_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="row 0 has padding between tokens 0 and 4"):
        Sequences.of(1, 6, torch.tensor([[1, 1, 0, 1, 1, 0]]))


def test_queries_behind_a_cache_have_the_positions_of_their_sequence() -> None:
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    assert Sequences.of(2, 7, mask, fresh=1).spans(1, 7) == [Span(0, 0, 1, 0, 7, 6), Span(1, 0, 1, 2, 7, 4)]
    assert Sequences.of(2, 7, mask, fresh=3).spans(3, 12) == [Span(0, 0, 3, 0, 7, 4), Span(1, 0, 3, 2, 7, 2)]
    # Behind a window the cache keeps the last keys alone.
    assert Sequences.of(2, 7, mask, fresh=1).spans(1, 4) == [Span(0, 0, 1, 0, 4, 6, 3), Span(1, 0, 1, 0, 4, 4, 1)]
    left = Sequences.of(2, 7, mask)
    assert left.spans(9, 9) is None
    assert left.spans(7, 6) is None
    memory = Sequences.of(2, 5, torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]))
    assert left.spans(7, 5, memory) == [Span(0, 0, 7, 0, 5), Span(1, 2, 7, 0, 3)]
    assert left.spans(7, 6, memory) is None


def test_many_documents_take_no_more_memory_than_one() -> None:
    scores = random_scores()
    spans = [Span(0, i, i + 1, i, i + 1) for i in range(T)]
    assert streaming._Row(scores, 0, spans, 64, False).received_HNS.shape == (H, 2, S)
    crossing = [Span(0, 0, 5, 0, S), Span(0, 5, T, 0, S)]
    assert streaming._Row(scores, 0, crossing, 64, False).received_HNS.shape == (H, 4, S)


def test_a_summary_of_nothing_is_nothing() -> None:
    assert summarize(random_scores(), []) == []
    assert isinstance(summarize(random_scores(), [Span(0, 3, 4, 0, S)])[0], Summary)
