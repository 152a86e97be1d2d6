"""Streams with a bounded cache: against models written out here, and against the model on what is left of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

from gated_attn import samples
from gated_attn.adapt.perplexity import cache_word
from gated_attn.adapt.sinks import absorb_sink
from gated_attn.adapt.streaming import StreamCache, Turn, streaming_nll
from gated_attn.errors import RecipeError, UnsupportedError
from gated_attn.hf.attach import attach
from gated_attn.measure.texts import python_help
from tests.hf import tiny
from tests.hf.tiny import spread, wake

SINK = 3
TEXT = torch.randint(6, 90, (131,), generator=torch.Generator().manual_seed(8))
ROTARY = ["llama", "qwen3", "gemma2", "gemma3", "phi", "phi3", "gpt_neox", "olmo2", "cohere", "mistral"]


def model_of(name: str = "llama", **changes: Any) -> Any:
    return spread(tiny.build(name, impl="eager" if name == "gemma2" else "sdpa", **changes)).eval()


def without_positions(**changes: Any) -> Any:
    """A SmolLM3, in which layers without rotary positions alternate with others."""
    torch.manual_seed(7)
    config = hf.SmolLM3Config(**(tiny.WIDE | tiny.PADS | {"no_rope_layers": [1, 0]} | changes))
    return spread(hf.SmolLM3ForCausalLM._from_config(config, attn_implementation="sdpa")).eval()


def in_blocks(text: Tensor, block: int, logits_of: Callable[[Tensor], Tensor]) -> float:
    """The loss of the tokens from 1 on, of a reader that gives a block's logits."""
    rows = torch.cat([logits_of(text[start : start + block]) for start in range(0, len(text), block)])
    return float(F.cross_entropy(rows[:-1], text[1:], reduction="sum"))


class Unrotated:
    """A Llama written out: its cache holds keys before rotation, all rotated anew, to where they stand, for every block."""

    def __init__(self, model: Any, window: int, keep: int) -> None:
        self.model, self.window, self.keep, self.held = model, window, keep, 0
        self.keys = [torch.zeros(0, 2, 10, dtype=torch.float64) for _ in model.model.layers]
        self.values = list(self.keys)

    def left(self, x_SKE: Tensor) -> Tensor:
        return x_SKE if len(x_SKE) <= self.window else torch.cat([x_SKE[: self.keep], x_SKE[self.keep - self.window :]])

    def rotated(self, x_SHE: Tensor, start: int) -> Tensor:
        E = x_SHE.shape[-1]
        places = torch.arange(start, start + len(x_SHE), dtype=torch.float64)
        angle = places[:, None, None] * 10000.0 ** -(torch.arange(0, E, 2, dtype=torch.float64) / E)
        first, second = x_SHE.chunk(2, -1)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)

    def __call__(self, ids_R: Tensor) -> Tensor:
        def norm(x: Tensor, by: Any) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + by.variance_epsilon).rsqrt() * by.weight

        inner, R = self.model.model, len(ids_R)
        x_RD = inner.embed_tokens.weight[ids_R]
        for number, layer in enumerate(inner.layers):
            own, put = layer.self_attn, norm(x_RD, layer.input_layernorm)
            q_RHE, k_RKE, v_RKE = (
                (put @ proj.weight.T).view(R, -1, 10) for proj in (own.q_proj, own.k_proj, own.v_proj)
            )
            self.keys[number] = torch.cat([self.left(self.keys[number]), k_RKE])
            self.values[number] = torch.cat([self.left(self.values[number]), v_RKE])
            k_SHE = self.rotated(self.keys[number], 0).repeat_interleave(2, 1)
            v_SHE = self.values[number].repeat_interleave(2, 1)
            S = len(k_SHE)
            scores_HRS = torch.einsum("rhe,she->hrs", self.rotated(q_RHE, S - R), k_SHE) * 10**-0.5
            scores_HRS = scores_HRS.masked_fill(torch.ones(R, S).triu(S - R + 1).bool(), -torch.inf)
            out_RHE = torch.einsum("hrs,she->rhe", scores_HRS.softmax(-1), v_SHE)
            x_RD = x_RD + out_RHE.flatten(1) @ own.o_proj.weight.T
            put, mlp = norm(x_RD, layer.post_attention_layernorm), layer.mlp
            x_RD = x_RD + (F.silu(put @ mlp.gate_proj.weight.T) * (put @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
        return norm(x_RD, inner.norm) @ self.model.lm_head.weight.T


@pytest.mark.parametrize(("window", "keep", "block"), [(20, 0, 7), (20, 3, 7), (11, 4, 1), (20, 1, 64), (200, 0, 7)])
def test_a_stream_is_that_of_keys_rotated_anew_to_where_they_stand(window: int, keep: int, block: int) -> None:
    model = model_of(num_hidden_layers=3).double()
    with torch.no_grad():
        want = in_blocks(TEXT, block, Unrotated(model, window, keep))
    got = streaming_nll(model, TEXT, window=window, keep=keep, block=block)
    assert got.tokens == len(TEXT) - 1
    assert got.total == pytest.approx(want, rel=2e-6)  # the model's own angles are float32
    if window < len(TEXT):
        with torch.no_grad():
            other = in_blocks(TEXT, block, Unrotated(model, window, keep + 1))
        assert got.total != pytest.approx(other, rel=1e-4), "one more kept token matters"


GATED = ["output:headwise:sigmoid", "output:headwise:sigmoid,source=lse,bias=0,fill,sink_key"]


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize(
    ("name", "changes", "spec"),
    [
        *((name, {}, None) for name in ROTARY if name != "gemma3"),
        ("gemma3", {"layer_types": ["full_attention"]}, None),
        ("gemma3", {"layer_types": ["sliding_attention"]}, None),
        *(("llama", {}, spec) for spec in GATED),
    ],
)
def test_one_layer_reads_what_is_left_as_if_it_were_all(name: str, changes: Any, spec: str | None, keep: int) -> None:
    """There keys and values depend on their token alone, so any model can read what is left anew."""
    model, window, block = model_of(name, num_hidden_layers=1, **changes), 20, 7
    if spec is not None:
        model = wake(attach(model, spec))
    held = TEXT[:0]

    def read(new: Tensor) -> Tensor:
        nonlocal held
        held = held if len(held) <= window else torch.cat([held[:keep], held[keep - window :]])
        held = torch.cat([held, new])
        with torch.no_grad():
            return model(held[None]).logits[0, -len(new) :]

    want = in_blocks(TEXT, block, read)
    assert streaming_nll(model, TEXT, window=window, keep=keep, block=block).total == pytest.approx(want, rel=2e-5)


def test_an_absorbed_sink_streams_as_one_that_is_kept() -> None:
    """Through layers: the token in front as the one that is kept, and the gate that took its place."""
    model = model_of(num_hidden_layers=3)
    kept = streaming_nll(model, TEXT, window=21, keep=1, block=1, first=SINK)
    dropped = streaming_nll(model, TEXT, window=21, keep=0, block=1, first=SINK)
    gated = streaming_nll(absorb_sink(model, SINK), TEXT, window=20, block=1)
    assert gated.tokens == kept.tokens == len(TEXT) - 1
    assert gated.total == pytest.approx(kept.total, rel=1e-5)
    assert dropped.total != pytest.approx(kept.total, rel=1e-3)


def test_positions_stay_below_window_and_block() -> None:
    model, seen = model_of(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    streaming_nll(model, TEXT, window=20, keep=4, block=7)
    assert max(seen) == 20 + 7 - 1


def test_keys_are_rounded_once_however_often_they_move() -> None:
    """Law 5, with keys that were turned 47 times: 2 x the error of bfloat16 by itself + one rounding."""
    window, block = 48, 1
    held = {}
    for dtype in (torch.bfloat16, torch.float64):
        model = model_of(num_hidden_layers=1).to(dtype)
        stream = StreamCache(Turn(model, window + block), window, 0)
        fresh = StreamCache(stream.turn, window, 0)
        with torch.no_grad():
            for token in TEXT:
                stream.evict()
                place = torch.tensor([[stream.cache.get_seq_length()]])
                model(token.view(1, 1), position_ids=place, use_cache=True, **{cache_word(model): stream.cache})
            stream.evict()
            model(TEXT[None, -window:], use_cache=True, **{cache_word(model): fresh.cache})
        held[dtype] = [one.cache.layers[0].keys.double() for one in (stream, fresh)]
    (stream_16, fresh_16), (stream_64, fresh_64) = held[torch.bfloat16], held[torch.float64]
    torch.testing.assert_close(stream_64, fresh_64, rtol=0, atol=1e-5 * float(fresh_64.abs().max()))
    rounding = 2.0**-9 * fresh_64.norm()
    assert (stream_16 - fresh_64).norm() <= 2 * (fresh_16 - fresh_64).norm() + rounding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layers_without_positions_are_left_where_they_are(dtype: torch.dtype) -> None:
    model = without_positions().to(dtype)
    assert Turn(model, 40).still == {1}
    assert Turn(model_of().to(dtype), 40).still == set()
    one = without_positions(num_hidden_layers=1, no_rope_layers=[0]).to(dtype)
    keys = torch.randn(1, 2, 3, 10, dtype=dtype)
    assert torch.equal(Turn(one, 40)(0, keys, torch.tensor([1, 2, 3])), keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "gpt_oss"])
def test_what_cannot_be_moved_is_refused_in_any_format(name: str, dtype: torch.dtype) -> None:
    model = spread(tiny.build(name)).to(dtype)
    with pytest.raises(UnsupportedError, match=r"no rotary embedding by which|a plain cache of .* cannot be moved by"):
        streaming_nll(model, TEXT, window=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_that_change_with_the_length_are_refused_where_they_do(dtype: torch.dtype) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = model_of(rope_parameters=rope).to(dtype)  # for 64 positions
    assert streaming_nll(model, TEXT, window=48, block=16).tokens == len(TEXT) - 1
    with pytest.raises(UnsupportedError, match=r"layer 0 of LlamaForCausalLM: keys turned back by 114 positions"):
        streaming_nll(model, TEXT, window=104, block=16)


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        (TEXT, {"window": 8, "keep": 8}, "keep=8, window=8"),
        (TEXT, {"window": 8, "keep": -1}, "keep=-1, window=8"),
        (TEXT, {"window": 8, "block": 0}, "block=0"),
        (TEXT[:1], {"window": 8}, r"tokens \(1,\)"),
        (TEXT.view(1, -1), {"window": 8}, r"tokens \(1, 131\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(ids: Tensor, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        streaming_nll(model_of(), ids, **sizes)


@pytest.mark.slow
def test_smollm2_streams_with_its_sink_kept_or_absorbed_and_not_without() -> None:
    if samples.cached()["smollm2"] is None:
        pytest.skip("sample smollm2 is not cached: run python -m gated_attn.samples fetch smollm2")
    from gated_attn.hf.pretrained import load_sample, tokenizer

    model, words = load_sample("smollm2"), tokenizer("smollm2")
    ids = torch.tensor(words(python_help(), add_special_tokens=False, verbose=False)["input_ids"])[-1500:]
    bos, sizes = words.bos_token_id, {"window": 128, "block": 32}
    plain, kept, more = (streaming_nll(model, ids, **sizes, keep=keep, first=bos).perplexity for keep in (0, 1, 4))
    gated = streaming_nll(absorb_sink(model, bos), ids, **sizes).perplexity
    print(f"\nno token kept {plain:.2f}, the sink {kept:.2f}, 4 tokens {more:.2f}, sink absorbed {gated:.2f}")
    assert plain > 1.5 * kept
    # Blocks begin one token later without the sink, and one more token of text is in the cache.
    assert gated == pytest.approx(kept, rel=0.02)
    assert more == pytest.approx(kept, rel=0.05)
