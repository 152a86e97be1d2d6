"""Small random inputs that a transformers model of any kind accepts, for checking it without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gated_attn.errors import UnsupportedError

PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
"""Tokens that stand for something else than text, which random text must not have."""


def example_inputs(model: Any, *, batch: int = 2, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens, pixels or sound, as the model's `main_input_name` and sizes ask.

    All texts but the first are padded on the right. A model of text and images gets both; if its text has places for images, they
    come first. One whose images have no fixed size (Qwen-VL) gets text alone.

    Args:
        batch: texts, images or sounds.
        length: tokens of a text, padding among them; a decoder behind an encoder gets half as many.
        seed: of the generator that draws them; PyTorch's own stays as it is.

    Raises UnsupportedError for a model whose input is none of these, or images of no fixed size alone; pass a batch of your own
    then.
    """
    made = torch.Generator().manual_seed(seed)
    config, name = model.config, model.main_input_name

    def tokens(n: int, side: str) -> Tensor:
        ids = torch.randint(0, _part(config, "vocab_size", "text_config", side).vocab_size, (batch, n), generator=made)
        for special in (getattr(config, word, None) for word in PLACEHOLDERS):
            ids = ids if special is None else ids.where(ids != special, 0)
        return ids.to(model.device)

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=made).to(model.device, model.dtype)

    found: dict[str, Tensor] = {}
    if name == "input_ids":
        found = {"input_ids": tokens(length, "encoder")}
        if hasattr(getattr(config, "vision_config", None), "image_size"):
            found["pixel_values"] = noise(*_image(model))
            found["input_ids"] = torch.cat([_places(model, found["pixel_values"]), found["input_ids"]], 1)
        mask = torch.ones_like(found["input_ids"])
        mask[1:, mask.shape[1] - length // 3 :] = 0
        found["attention_mask"] = mask
    elif name == "pixel_values":
        found[name] = noise(*_image(model))
    elif name == "input_features":
        found[name] = noise(config.num_mel_bins, 2 * config.max_source_positions)
    elif name == "input_values":
        found[name] = noise(4000)
    else:
        raise UnsupportedError(
            f"{type(model).__name__} reads {name!r}, for which there is no example input; pass a batch"
        )
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = tokens(max(length // 2, 1), "decoder")
    return found


def _part(config: Any, has: str, *names: str) -> Any:
    """The first of the parts with these names that has this number, or the configuration itself."""
    parts = (getattr(config, name, None) for name in names)
    return next((part for part in parts if hasattr(part, has)), config)


def _image(model: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image; UnsupportedError where it has no fixed size."""
    vision = _part(model.config, "image_size", "vision_config", "encoder")
    size = getattr(vision, "image_size", None)
    if size is None:
        raise UnsupportedError(
            f"{type(model).__name__} reads images of no fixed size, for which there is no example input; pass a batch"
        )
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(vision, "num_channels", 3), height, width


@torch.no_grad()
def _places(model: Any, pixel_values: Tensor) -> Tensor:
    """As many image tokens for each image as the model has features of it: (B, n), none where it mixes in no images."""
    token = getattr(model.config, "image_token_id", None)
    n = 0
    if token is not None:
        found = model.get_image_features(pixel_values)
        n = sum(one.shape[:-1].numel() for one in getattr(found, "pooler_output", found)) // len(pixel_values)
    return torch.full((len(pixel_values), n), token or 0, device=model.device)
