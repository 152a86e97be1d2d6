"""Law 1, generated: every decoder family, whatever keeps the keys and however the tokens are looked for, padded on the left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gated_attn.hf.attach import attach
from tests.hf.tiny import wake
from tests.laws.test_families import DECODERS, EAGER_ONLY, SEQUENCE, batch, build, close

ENCODED = [*SEQUENCE, "whisper"]
SPECS = ["output:elementwise:sigmoid,fill", "key:headwise:sigmoid", "dense:elementwise:sigmoid"]
STEPS = 7
OPTIONS = {
    "max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True,
}  # fmt: skip
CACHES: list[dict[str, Any]] = [{}, {"use_cache": False}, {"cache_implementation": "static"}]


def made(name: str) -> Any:
    """The model of the laws, without an end of sequences; in float32 where attention is, whose float64 masks are infinite there."""
    model = build(name)
    model.generation_config.eos_token_id = None
    return model.float() if name in EAGER_ONLY else model


def prompts(name: str, model: Any) -> dict[str, Any]:
    inputs = batch(name, "left" if name in DECODERS else "right")
    inputs.pop("decoder_input_ids", None)
    return {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in inputs.items()}


def generated(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """(the new tokens, the scores of all tokens at each step)."""
    found = model.generate(**inputs, **OPTIONS, **options)
    return found.sequences[:, -STEPS:], torch.stack(found.scores, 1)


def greedy(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What `generated` gives, of each row alone and unpadded, one whole forward per token."""
    tokens, scores = [], []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        row, seen = ids[mask.bool()][None], []
        for _ in range(STEPS):
            seen.append(model(row, use_cache=False).logits[0, -1])
            row = torch.cat([row, seen[-1].argmax()[None, None]], 1)
        tokens.append(row[0, -STEPS:])
        scores.append(torch.stack(seen))
    return torch.stack(tokens), torch.stack(scores)


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], want[0])
    close([got[1]], [want[1].to(got[1].dtype)], 1e-9 if want[1].dtype == torch.float64 else 1e-4)


def differs(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return bool((one[1][:, 0] - other[1][:, 0]).abs().max() > 1e-2)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_decoders_generate_what_each_row_alone_would(name: str, spec: str) -> None:
    stock = made(name)
    inputs = prompts(name, stock)
    plain = generated(stock, inputs)
    model = wake(attach(stock, spec))
    want = greedy(model, inputs)
    assert differs(want, plain)
    for impl in ["eager"] if name in EAGER_ONLY else ["sdpa", "gated_attn"]:
        model.set_attn_implementation(impl)
        for cache in CACHES:
            same(generated(model, inputs, **cache), want)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", [*DECODERS, *ENCODED])
@torch.no_grad()
def test_beams_are_the_same_with_every_cache(name: str, spec: str) -> None:
    stock = made(name)
    inputs, options = prompts(name, stock), {"num_beams": 3, "num_return_sequences": 2}
    plain = generated(stock, inputs, **options)
    model = wake(attach(stock, spec))
    want = generated(model, inputs, **options, use_cache=False)
    assert differs(want, plain)
    for cache in CACHES:
        same(generated(model, inputs, **options, **cache), want)
