"""Loss, simulated rounding and streams: against the formulas, and against the model by itself."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from gated_attn.adapt import perplexity
from gated_attn.adapt.perplexity import cache_word, nll
from gated_attn.adapt.quantize import SCHEMES, RoundedCache, group_of, linear_layers, quantized, rounded, rounded_weight
from gated_attn.adapt.sinks import absorb_sink
from gated_attn.adapt.streaming import Turn, streaming_nll
from gated_attn.errors import RecipeError, SpecError, UnsupportedError
from gated_attn.hf.attach import attach, gates
from tests.hf import tiny
from tests.hf.tiny import spread

SINK = 5
IDS = torch.randint(6, 90, (5, 30), generator=torch.Generator().manual_seed(2))
ROTARY = ["llama", "qwen3", "gemma3", "phi", "phi3", "gpt_neox", "olmo2", "cohere", "mistral"]


def model_of(name: str = "llama") -> Any:
    return spread(tiny.build(name, impl="sdpa")).eval()


def loss_of(logits_BTV: Tensor, ids_BT: Tensor) -> float:
    return float(F.cross_entropy(logits_BTV.flatten(0, -2), ids_BT.flatten(), reduction="sum"))


def test_loss_is_that_of_the_same_tokens_with_and_without_a_token_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of().train()
    with torch.no_grad():
        bare = model.eval()(IDS).logits[:, :-1]
        sunk = model(torch.cat([torch.full_like(IDS[:, :1], SINK), IDS], 1)).logits[:, 1:-1]
    model.train()
    for slice_bytes in (perplexity.SLICE, 1):
        monkeypatch.setattr(perplexity, "SLICE", slice_bytes)
        plain, front = nll(model, IDS), nll(model, IDS, first=SINK, batch=2)
        assert plain.tokens == front.tokens == 5 * 29
        assert plain.total == pytest.approx(loss_of(bare, IDS[:, 1:]), rel=1e-5)
        assert front.total == pytest.approx(loss_of(sunk, IDS[:, 1:]), rel=1e-5)
        assert plain.perplexity == pytest.approx(math.exp(plain.total / plain.tokens))
    assert model.training
    with pytest.raises(RecipeError, match=r"at least 2 tokens .* \(5, 1\)"):
        nll(model, IDS[:, :1])


def test_the_loss_by_hand_and_no_copy_of_the_scores_beyond_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two symbols of odds 3 : 1 whatever came before: log(4/3) for each 0 and log 4 for each 1, the first token free."""

    class Odds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([math.log(3.0), 0.0]))

        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=self.weight.expand(*input_ids.shape, 2))

    ids_NT = torch.tensor([[1, 0, 1], [0, 0, 0]])
    for first in (None, 1):
        loss = nll(Odds(), ids_NT, first=first)
        assert loss.tokens == 4
        assert loss.total == pytest.approx(3 * math.log(4 / 3) + math.log(4), rel=1e-6)
    whole = torch.randn(2, 12, 97)
    monkeypatch.setattr(perplexity, "SLICE", 4 * 97 * 3)
    seen: list[Tensor] = []
    cross_entropy = F.cross_entropy

    def watched(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(scores)
        return cross_entropy(scores, *args, **kwargs)

    monkeypatch.setattr(perplexity.F, "cross_entropy", watched)

    class Given(Odds):
        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=whole)

    nll(Given(), torch.zeros(2, 12, dtype=torch.long))
    assert max(len(scores) for scores in seen) == 3
    assert sum(len(scores) for scores in seen) == 22
    assert all(scores.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for scores in seen), "a copy"


def test_rounding_by_hand() -> None:
    x = torch.tensor([0.0, 0.1, -0.26, 1.0, -2.0])
    assert rounded(x, 8, torch.tensor(1.27)).tolist() == pytest.approx([0.0, 0.1, -0.26, 1.0, -1.27])
    assert rounded(x, 4, torch.tensor(0.7)).tolist() == pytest.approx([0.0, 0.1, -0.3, 0.7, -0.7])
    assert rounded(torch.zeros(3), 8, torch.tensor(0.0)).tolist() == [0.0] * 3
    weight = torch.tensor([[1.27, 0.004], [12.7, 0.04]])
    assert rounded_weight(weight, "w8a8-static").tolist() == [pytest.approx([1.27, 0.0]), pytest.approx([12.7, 0.0])]
    assert [group_of(width) for width in (128, 576, 96, 7, 131)] == [64, 64, 48, 7, 1]
    wide = torch.cat([torch.full((1, 64), 0.7), torch.full((1, 64), 0.04)], 1)
    wide[0, -1] = 7.0
    assert rounded_weight(wide, "w4a16")[0, [0, 64, -1]].tolist() == pytest.approx([0.7, 0.0, 7.0])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_schemes_round_what_they_say_and_give_the_weights_back(name: str) -> None:
    model = attach(model_of(name), "output:headwise:sigmoid")
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    classes = {module: type(module) for module in model.modules()}
    plain = nll(model, IDS).total
    found = {}
    for scheme in SCHEMES:
        with quantized(model, scheme, calibration=[{"input_ids": IDS}]):
            found[scheme] = nll(model, IDS).total
    assert found["none"] == plain
    assert len({*found.values()}) == len(SCHEMES), found
    assert all(abs(value / plain - 1) < 0.1 for value in found.values()), found
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    assert {module: type(module) for module in model.modules()} == classes
    names = {id(layer) for layer in linear_layers(model)}
    inside = [linear for gate in gates(model).values() for linear in gate.modules() if isinstance(linear, nn.Linear)]
    assert inside
    assert not any(id(linear) in names for linear in (*inside, model.get_output_embeddings()))


def test_an_outlier_costs_static_ranges_and_not_those_of_each_token() -> None:
    """One token with a huge value: the range of all tokens is its range."""
    layer = nn.Sequential(nn.Linear(8, 8))
    x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = 1000.0

    def error(scheme: str, batches: list[dict[str, Tensor]]) -> float:
        with torch.no_grad(), quantized(layer, scheme, calibration=batches):
            return float((layer(x) - want)[0, 1:].abs().max())

    with torch.no_grad():
        want = layer(x)
    static, dynamic = error("w8a8-static", [{"input": x}]), error("w8a8-dynamic", [])
    assert static > 0.3
    assert dynamic < 0.1


def test_the_weights_come_back_after_an_error_and_wrong_calls_are_refused() -> None:
    model = model_of()
    before = nll(model, IDS)

    def breaks() -> None:
        with quantized(model, "w4a16"):
            raise KeyError("within")

    with pytest.raises(KeyError, match="within"):
        breaks()
    assert nll(model, IDS) == before
    with pytest.raises(SpecError, match=r"unknown scheme 'w8a8-statik'.*did you mean"), quantized(model, "w8a8-statik"):
        pass
    with pytest.raises(SpecError, match="static ranges are learned from text"), quantized(model, "w8a8-static"):
        pass
    assert nll(model, IDS) == before
    with pytest.raises(SpecError, match="no linear layers"), quantized(nn.Sequential(nn.ReLU()), "none"):
        pass


def test_a_rounded_cache_rounds_keys_and_values_of_each_token_and_head() -> None:
    draw = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 3, 4, 8, generator=draw), torch.randn(2, 3, 4, 8, generator=draw)
    cache = RoundedCache(4, keep=1)
    got_key, got_value = cache.update(key, value, 0)
    assert torch.equal(got_key[:, :, :1], key[:, :, :1])
    scale = value[:, :, 1:].abs().amax(-1, keepdim=True) / 7
    torch.testing.assert_close(got_value[:, :, 1:], (value[:, :, 1:] / scale).round() * scale)
    longer, _ = cache.update(key, value, 0)
    assert longer.shape[2] == 8
    assert not torch.equal(longer[:, :, 4:5], key[:, :, :1]), "the second call's first token is not the cache's"
    model = model_of()
    exact, rough, plain = (
        nll(model, IDS, cache=one) for one in (lambda: RoundedCache(8, 99), lambda: RoundedCache(4), DynamicCache)
    )
    assert exact == plain
    assert rough.total != plain.total


@pytest.mark.parametrize("name", ROTARY)
def test_keys_turn_as_the_model_would_have_placed_them(name: str) -> None:
    model = model_of(name)
    turn, caches = Turn(model, 40), [DynamicCache(), DynamicCache()]
    with torch.no_grad():
        for cache, by in zip(caches, (3, 20), strict=True):
            model(IDS[:1, :4], position_ids=torch.arange(4)[None] + by, use_cache=True, **{cache_word(model): cache})
    # Of later layers only where nothing else depends on positions: the first is enough.
    near, far = (cache.layers[0].keys for cache in caches)
    torch.testing.assert_close(turn(0, far, torch.full((4,), 17)), near, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ROTARY)
def test_a_stream_that_fits_the_cache_is_the_text_at_once(name: str) -> None:
    model = model_of(name)
    for block in (1, 7, 64):
        for first in (None, SINK):
            whole, stream = (
                nll(model, IDS[:1], first=first),
                streaming_nll(model, IDS[0], window=64, block=block, first=first),
            )
            assert stream.tokens == whole.tokens
            assert stream.total == pytest.approx(whole.total, rel=1e-5)


@pytest.mark.parametrize("keep", [0, 3])
def test_a_stream_reads_what_is_left_in_its_cache_as_if_it_were_all(keep: int) -> None:
    """In a model of one layer keys and values depend on their token alone, so each block can be read anew from what is left."""
    model, window, block, text = spread(tiny.build("llama", impl="sdpa", num_hidden_layers=1)).eval(), 10, 4, IDS[0]
    total, held = 0.0, torch.tensor([], dtype=torch.long)
    last = None
    for start in range(0, len(text), block):
        new = text[start : start + block]
        held = held if len(held) <= window else torch.cat([held[:keep], held[keep + len(held) - window :]])
        with torch.no_grad():
            logits = model(torch.cat([held, new])[None]).logits[0, len(held) :]
        before = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        total += loss_of(before, new[len(new) - len(before) :])
        last, held = logits[-1:], torch.cat([held, new])
    stream = streaming_nll(model, text, window=window, keep=keep, block=block)
    assert stream.total == pytest.approx(total, rel=1e-5)
    assert stream.tokens == len(text) - 1
    assert stream.total != pytest.approx(nll(model, text[None]).total, rel=1e-5)


def test_gated_models_stream_and_what_cannot_is_refused() -> None:
    model = absorb_sink(model_of(), SINK)
    whole, stream = nll(model, IDS[:1]), streaming_nll(model, IDS[0], window=64, block=8)
    assert stream.total == pytest.approx(whole.total, rel=1e-5)
    with pytest.raises(UnsupportedError, match="no rotary embedding"):
        streaming_nll(model_of("gpt2"), IDS[0], window=8)
    with pytest.raises(RecipeError, match="keep=8, window=8"):
        streaming_nll(model, IDS[0], window=8, keep=8)
