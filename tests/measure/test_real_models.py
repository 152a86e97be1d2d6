"""Real weights: what is known of their sinks comes out, and streaming equals the eager maps at 512 tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gated_attn import samples
from gated_attn.measure.capture import Chosen, capture
from gated_attn.measure.diagnose import diagnose
from gated_attn.measure.streaming import Span, summarize_weights
from gated_attn.measure.texts import python_help, text_batches
from gated_attn.measure.totals import AttentionTotals
from gated_attn.records import Diagnosis


def load(name: str) -> tuple[Any, Any]:
    if samples.cached()[name] is None:
        pytest.skip(f"sample {name} is not cached: run python -m gated_attn.samples fetch {name}")
    from gated_attn.hf.pretrained import load_sample, tokenizer

    return load_sample(name), tokenizer(name)


def by_layer(made: Diagnosis) -> list[float]:
    return [float(row["first_token_share"]) for row in made.rows()]


@pytest.mark.slow
def test_smollm2_streaming_equals_its_eager_maps_at_512_tokens() -> None:
    model, words = load("smollm2")
    model.set_attn_implementation("eager")
    (batch,) = text_batches(words, python_help(), tokens=512, length=512)
    with torch.no_grad():
        want = model(**batch, output_attentions=True)
        with capture(model, chosen=Chosen(sink_tokens=256)) as seen:
            got = model(**batch)
    assert torch.equal(got.logits, want.logits)
    for totals, weights in zip(seen.attention.values(), want.attentions, strict=True):
        truth = AttentionTotals(9, 64, sink_tokens=256, sink_eps=0.3)
        (summary,) = summarize_weights(weights, [Span(0, 0, 512, 0, 512)], seen_BTS=torch.ones(1, 512, 512).tril())
        truth.add(summary, torch.zeros(512, 9, 64), batch["input_ids"][0], torch.zeros(()))
        for name in ("first", "first_all", "sink", "strongest", "early", "entropy"):
            assert getattr(totals, name).value(9) == pytest.approx(getattr(truth, name).value(9), abs=1e-5), name
        assert totals.strongest_at == truth.strongest_at
        assert totals.sink_rate.value(9) == truth.sink_rate.value(9)


@pytest.mark.slow
def test_smollm2_has_the_sinks_that_are_known_of_it() -> None:
    """Elsewhere: first-token share 0.32 to 0.41 and sink rate 0.52 on technical text of 256 to 512 tokens, largest value 24,900."""
    model, words = load("smollm2")
    batches = list(text_batches(words, python_help(), tokens=2048, length=512))
    made = diagnose(model, batches, tokenizer=words, sink_tokens=512, plain=False)
    assert made.first_token_share == pytest.approx(0.32, abs=0.03)
    assert made.sink_rate == pytest.approx(0.52, abs=0.05)
    assert made.max_abs == pytest.approx(24_900, rel=0.1)
    shares = by_layer(made)
    assert max(shares[:2]) < 0.05
    assert min(shares[12:]) > 0.25
    assert sum(stream.massive for stream in made.streams[12:27]) > 0
    assert all(stream.token_norm_position == 0 for stream in made.streams[12:27])


def test_minilm_looks_at_cls_in_its_middle_layers() -> None:
    """Elsewhere .02 .25 .33 .48 .55 .13, on a text that is not named; the shares fall with length and differ between texts."""
    model, words = load("minilm")
    batch = dict(words("The quick brown fox jumps over the lazy dog. " * 20, return_tensors="pt"))
    made = diagnose(model, [batch], tokenizer=words, plain=False)
    assert by_layer(made) == pytest.approx([0.02, 0.25, 0.33, 0.48, 0.55, 0.13], abs=0.07)
    assert {head.strongest_token for module in made.attention[1:5] for head in module.heads} >= {"[CLS]"}


def test_rxnfp_has_hardly_a_sink() -> None:
    model, words = load("rxnfp")
    reactions = [
        "CC(=O)Oc1ccccc1C(=O)O.CO>>COC(=O)c1ccccc1O",
        "CCO.CC(=O)O>>CCOC(C)=O",
        "CN1C=NC2=C1C(=O)N(C(=O)N2C)C.Cl>>O",
    ]
    made = diagnose(model, [dict(words(reactions, return_tensors="pt", padding=True))], tokenizer=words, plain=False)
    assert made.first_token_share is not None
    assert made.first_token_share < 0.05
    assert max(by_layer(made)) < 0.1
