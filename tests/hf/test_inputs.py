"""Example inputs: every family's model accepts them, and so do models of text and images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from gated_attn.errors import UnsupportedError
from gated_attn.hf.attach import attach
from gated_attn.hf.inputs import example_inputs
from gated_attn.hf.verify import verify
from tests.hf.tiny import IMAGE, LLM, TINY, WIDE, build, spread, wake

CLIP_TOWER = IMAGE | {"model_type": "clip_vision_model"}
VIT_TO_BERT: dict[str, Any] = {
    "encoder": IMAGE | {"model_type": "vit"},
    "decoder": LLM | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip


def llava(**changes: Any) -> Any:
    settings: dict[str, Any] = {"image_token_id": 95, "vision_feature_layer": -1} | changes
    text = WIDE | {"model_type": "llama"}
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(text_config=text, vision_config=CLIP_TOWER, **settings))


def qwen2_vl() -> Any:
    vision = {"depth": 1, "embed_dim": 24, "hidden_size": 24, "num_heads": 4, "patch_size": 4}
    text = WIDE | {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 6,
    }  # its own width of a head is the model's, divided
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=95, video_token_id=94)
    return hf.Qwen2VLForConditionalGeneration(config)


MIXED: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "llava": (llava, {"input_ids", "pixel_values", "attention_mask"}),
    "gemma3": (
        lambda: hf.Gemma3ForConditionalGeneration(
            hf.Gemma3Config(
                text_config=WIDE | {"sliding_window": 4}, vision_config=IMAGE | {"model_type": "siglip_vision_model"},
                mm_tokens_per_image=4, image_token_id=95, boi_token_id=94, eoi_token_id=93,
            )
        ),
        {"input_ids", "pixel_values", "attention_mask"},
    ),
    "qwen2_vl": (qwen2_vl, {"input_ids", "attention_mask"}),
    "vit to bert": (
        lambda: hf.VisionEncoderDecoderModel(hf.VisionEncoderDecoderConfig(**VIT_TO_BERT)),
        {"pixel_values", "decoder_input_ids"},
    ),
}  # fmt: skip


@torch.no_grad()
def outputs(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the model makes of the inputs; all of it is finite."""
    found = [one for one in model(**inputs).to_tuple() if isinstance(one, Tensor)]
    assert found
    assert all(bool(torch.isfinite(one).all()) for one in found)
    return found


@pytest.mark.parametrize(("batch", "length"), [(2, 9), (1, 1), (3, 5)])
@pytest.mark.parametrize("name", TINY)
def test_every_family_accepts_its_inputs(name: str, batch: int, length: int) -> None:
    model = build(name)
    inputs = example_inputs(model, batch=batch, length=length)
    assert model.main_input_name in inputs
    assert {len(one) for one in inputs.values()} == {batch}
    outputs(model, inputs)
    if "input_ids" in inputs:
        assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (batch, length)
        real = inputs["attention_mask"].sum(1).tolist()
        assert real == [length, *[length - length // 3] * (batch - 1)]
        assert (inputs["attention_mask"].diff(dim=1) <= 0).all(), "padded on the right"
    if "decoder_input_ids" in inputs:
        assert inputs["decoder_input_ids"].shape == (batch, max(length // 2, 1))


@pytest.mark.parametrize("name", MIXED)
def test_models_of_text_and_images(name: str) -> None:
    make, keys = MIXED[name]
    torch.manual_seed(0)
    model = make().eval()
    for batch in (1, 2):
        inputs = example_inputs(model, batch=batch)
        assert inputs.keys() == keys
        outputs(model, inputs)


def test_images_have_their_places_in_the_text() -> None:
    """16 patches; and no other token of the text is the one that stands for them."""
    ids = example_inputs(llava(), batch=3, length=200)["input_ids"]
    assert ids.shape == (3, 16 + 200)
    assert (ids[:, :16] == 95).all()
    assert not (ids[:, 16:] == 95).any()


def test_gates_in_both_towers_are_reached() -> None:
    model = wake(attach(spread(llava()).eval(), "output:headwise"))
    shown = verify(model, example_inputs(model))
    assert len(shown.rows) == 4
    assert shown.ok, str(shown)


@pytest.mark.parametrize("name", ["llama", "clip", "whisper", "wav2vec2", "gpt2 cross"])
def test_a_seed_gives_the_same_inputs_and_leaves_pytorch_s_alone(name: str) -> None:
    model = build(name)
    torch.manual_seed(8)
    want = torch.rand(3)
    torch.manual_seed(8)
    first, again, other = (example_inputs(model, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(torch.rand(3), want)
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert all(not torch.equal(first[key], other[key]) for key in first if key != "attention_mask")


def test_inputs_come_in_the_model_s_dtype() -> None:
    model = build("vit").to(torch.bfloat16)
    assert example_inputs(model)["pixel_values"].dtype == torch.bfloat16
    outputs(model, example_inputs(model))


def test_a_model_that_reads_something_else_is_refused() -> None:
    model = build("llama")
    model.main_input_name = "waveform"
    with pytest.raises(
        UnsupportedError, match="LlamaForCausalLM reads 'waveform', for which there is no example input"
    ):
        example_inputs(model)
    model.main_input_name = "pixel_values"
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM reads images of no fixed size"):
        example_inputs(model)
