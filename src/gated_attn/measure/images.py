"""What a vision model's tokens are: prefix tokens, and patches by row and column."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def patch_labels(model: Any, pixels_BCHW: Tensor | None) -> list[str] | None:
    """A name for each token of a model whose patches are of one size: `[CLS]`, `[register 1]`, `(row, column)`; None for others.

    Images need not be square: the grid is that of these pixels.
    """
    config = getattr(model.config, "vision_config", model.config)
    patch = getattr(config, "patch_size", None)
    if pixels_BCHW is None or patch is None or hasattr(config, "window_size"):
        return None
    high, wide = (patch, patch) if isinstance(patch, int) else patch
    rows, columns = pixels_BCHW.shape[2] // high, pixels_BCHW.shape[3] // wide
    registers = [f"[register {i + 1}]" for i in range(getattr(config, "num_register_tokens", 0) or 0)]
    return ["[CLS]", *registers, *(f"({row}, {column})" for row in range(rows) for column in range(columns))]
