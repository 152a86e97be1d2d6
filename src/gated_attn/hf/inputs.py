"""Small random inputs that a transformers model of any kind accepts, for checking it without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gated_attn.errors import UnsupportedError


def example_inputs(model: Any, *, batch: int = 2, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens, pixels or sound, as the model's `main_input_name` and sizes ask; the second text is padded on the right.

    Raises UnsupportedError for a model whose input is none of these; pass a batch of your own then.
    """
    made = torch.Generator().manual_seed(seed)
    config, name = model.config, model.main_input_name
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)

    def tokens() -> Tensor:
        return torch.randint(0, text.vocab_size, (batch, length), generator=made).to(model.device)

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=made).to(model.device, model.dtype)

    if name == "input_ids":
        mask = torch.ones(batch, length, dtype=torch.long, device=model.device)
        mask[1:, length - length // 3 :] = 0
        found = {"input_ids": tokens(), "attention_mask": mask}
        if vision is not config:
            found["pixel_values"] = noise(vision.num_channels, vision.image_size, vision.image_size)
    elif name == "pixel_values":
        found = {name: noise(vision.num_channels, vision.image_size, vision.image_size)}
    elif name == "input_features":
        found = {name: noise(config.num_mel_bins, 2 * config.max_source_positions)}
    elif name == "input_values":
        found = {name: noise(4000)}
    else:
        raise UnsupportedError(
            f"{type(model).__name__} reads {name!r}, for which there is no example input; pass a batch"
        )
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = tokens()[:, : max(length // 2, 1)]
    return found
