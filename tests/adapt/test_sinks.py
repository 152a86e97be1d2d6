"""A sink token's key and value as gates: the model reads without the token as it read with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gated_attn import detach, samples, verify
from gated_attn.adapt.sinks import SPEC, absorb_sink
from gated_attn.errors import SpecError, UnsupportedError
from gated_attn.hf import gates, load_gates, save_gates
from gated_attn.hf.attach import attach
from gated_attn.measure.diagnose import diagnose
from gated_attn.measure.texts import python_help, text_batches
from tests.hf import tiny
from tests.hf.tiny import spread

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(3))
SINK = 5
ROTARY = ["llama", "qwen3", "phi", "phi3", "gpt_neox", "olmo2", "cohere"]


def with_sink(model: Any, ids: Tensor, **more: Any) -> Tensor:
    """The logits of the tokens with the sink in front, without its row."""
    with torch.no_grad():
        return model(input_ids=torch.cat([torch.full_like(ids[:, :1], SINK), ids], 1), **more).logits[:, 1:]


def near(got: Tensor, want: Tensor) -> None:
    assert float((got - want).abs().max()) <= 64 * torch.finfo(torch.float32).eps * float(want.abs().max())


@pytest.mark.parametrize("name", ROTARY)
def test_the_model_reads_without_the_token_as_with_it(name: str, tmp_path: Path) -> None:
    model = spread(tiny.build(name, impl="sdpa"))
    want, bare = with_sink(model, IDS), model(IDS).logits
    assert absorb_sink(model, SINK) is model
    with torch.no_grad():
        near(model(IDS).logits, want)
        assert (bare - want).abs().max() > 0.1, "the sink matters"
        save_gates(model, tmp_path)
        again = load_gates(spread(tiny.build(name, impl="sdpa")), tmp_path)
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert verify(model, {"input_ids": IDS}).ok
    assert {str(gate.spec) for gate in gates(model).values()} == {SPEC}
    assert torch.equal(detach(model)(IDS).logits, bare)


def test_padding_caches_and_training_mode() -> None:
    model = spread(tiny.build("llama", impl="sdpa")).train()
    want = with_sink(model, IDS[1:, :5])
    absorb_sink(model, SINK)
    assert model.training
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    left = torch.cat([IDS[:1], torch.cat([torch.zeros(1, 4, dtype=torch.long), IDS[1:, :5]], 1)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        near(model(input_ids=left, attention_mask=mask, position_ids=positions).logits[1:, 4:], want)
        plain = model.generate(IDS, max_new_tokens=5, do_sample=False, use_cache=False, pad_token_id=0)
        for cache in ("dynamic", "static"):
            options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
            assert torch.equal(model.generate(IDS, **options), plain)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {}, "no rotary positions"),
        ("bert", {}, "no rotary positions"),
        ("t5", {}, "causal self attention"),
        ("mistral", {}, "looks back 4 tokens only"),
        ("gptj", {}, "logits differ by"),
    ],
)
def test_what_cannot_be_exact_is_refused_and_left_as_it_was(name: str, changes: Any, message: str) -> None:
    model = spread(tiny.build(name, impl="sdpa", **changes))
    classes = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=message):
        absorb_sink(model, SINK)
    assert [type(module) for module in model.modules()] == classes


def test_gates_and_other_implementations_are_refused() -> None:
    with pytest.raises(SpecError, match="has gates already"):
        absorb_sink(attach(tiny.build("llama"), "paper"), SINK)
    with pytest.raises(UnsupportedError, match="attn_implementation='eager'"):
        absorb_sink(tiny.build("llama", impl="eager"), SINK)


def perplexity(model: Any, ids_BT: Tensor, skip: int) -> float:
    with torch.no_grad():
        logits = model(ids_BT).logits[:, skip:-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, ids_BT[:, skip + 1 :].flatten()).exp())


@pytest.mark.slow
def test_smollm2_without_its_sink_token_has_the_same_perplexity_and_no_sink() -> None:
    if samples.cached()["smollm2"] is None:
        pytest.skip("sample smollm2 is not cached: run python -m gated_attn.samples fetch smollm2")
    from gated_attn.hf.pretrained import load_sample, tokenizer

    model, words = load_sample("smollm2"), tokenizer("smollm2")
    (batch,) = text_batches(words, python_help(), tokens=1024, length=256)
    ids, bos = batch["input_ids"], words.bos_token_id
    in_front = torch.cat([torch.full_like(ids[:, :1], bos), ids], 1)
    before = perplexity(model, in_front, 1)
    sunk = diagnose(model, [{"input_ids": in_front}], plain=False)
    absorb_sink(model, bos)
    assert perplexity(model, ids, 0) == pytest.approx(before, rel=1e-4)
    after = diagnose(model, [{"input_ids": ids}], plain=False)
    assert sunk.first_token_share is not None
    assert sunk.first_token_share > 0.25
    assert after.max_abs is not None
    assert sunk.max_abs is not None
    assert after.max_abs < sunk.max_abs / 10
    assert after.gate_mean is not None
    print(f"\nshare {sunk.first_token_share:.3f} -> {after.first_token_share:.3f}, sink rate {sunk.sink_rate:.3f} -> "
          f"{after.sink_rate:.3f}, early {sunk.strongest_early_share:.3f} -> {after.strongest_early_share:.3f}, max "
          f"{sunk.max_abs:,.0f} -> {after.max_abs:,.0f}, gate mean {after.gate_mean:.3f}")  # fmt: skip
