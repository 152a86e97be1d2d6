"""The proof of an export: the folder loaded by stock transformers, against the model that it was written from.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.errors import MissingExtraError, VerificationError

TOLERANCE = 1e-5
"""Largest difference between source and export that float32 rounding explains, as a share of the largest logit."""

NEW_TOKENS = 16


@torch.no_grad()
def verify_export(model: nn.Module, folder: str | os.PathLike[str]) -> tuple[float, float, float]:
    """(largest error of the logits, the same at the real tokens of a padded batch, what is allowed), all in float32.

    Raises VerificationError for a missing, unexpected or reshaped tensor, a larger error, or a `generate` (with cache) that
    chooses another token than the source does without one.
    """
    with _no_progress_bar():
        loaded, info = stock_transformers().AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, local_files_only=True
        )
    loaded.generation_config = stock_transformers().GenerationConfig()  # no end of text, no sampling
    wrong = {kind: sorted(map(str, found)) for kind, found in info.items() if found}
    if wrong:
        told = "; ".join(f"{len(found)} {kind}, such as {found[0]}" for kind, found in wrong.items())
        raise VerificationError(f"transformers does not load the export whole: {told}")
    source, loaded = copy.deepcopy(model).cpu().float().eval(), loaded.eval()
    generator = torch.Generator().manual_seed(0)
    vocab, longest = loaded.config.vocab_size, loaded.config.max_position_embeddings
    tokens_BT = torch.randint(vocab, (3, min(24, longest)), generator=generator)
    mask_BT = torch.ones_like(tokens_BT)
    mask_BT[1, : tokens_BT.shape[1] // 3] = 0
    mask_BT[2, tokens_BT.shape[1] // 2 :] = 0
    errors, scale = [], 0.0
    for mask in (None, mask_BT):
        want_BTV, got_BTV = (m(input_ids=tokens_BT, attention_mask=mask).logits for m in (source, loaded))
        real = slice(None) if mask is None else mask.bool()
        scale = max(scale, float(want_BTV[real].abs().max()))
        errors.append(float((got_BTV - want_BTV)[real].abs().max()))
    for kind, error in zip(("random tokens", "a padded batch"), errors, strict=True):
        if not error <= TOLERANCE * scale:
            raise VerificationError(
                f"logits on {kind} differ by up to {error:.3g}, and {TOLERANCE * scale:.3g} is float32 rounding "
                f"({TOLERANCE:g} of the largest, {scale:.3g})"
            )
    _same_tokens(source, loaded, tokens_BT[:2, : max(1, min(5, longest - NEW_TOKENS))])
    return errors[0], errors[1], TOLERANCE * scale


def _same_tokens(source: nn.Module, loaded: Any, prompt_BT: Tensor) -> None:
    want_BT = prompt_BT
    for _ in range(NEW_TOKENS):
        want_BT = torch.cat([want_BT, source(input_ids=want_BT).logits[:, -1:].argmax(-1)], 1)
    got_BT = loaded.generate(
        prompt_BT,
        attention_mask=torch.ones_like(prompt_BT),
        do_sample=False,
        use_cache=True,
        max_new_tokens=NEW_TOKENS,
    )
    if not torch.equal(want_BT, got_BT):
        raise VerificationError(
            f"greedy generation differs: the source goes on {want_BT[:, prompt_BT.shape[1]:].tolist()}, the export "
            f"{got_BT[:, prompt_BT.shape[1]:].tolist()}"
        )  # fmt: skip


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    logging = stock_transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def stock_transformers() -> Any:
    """The package, or MissingExtraError."""
    try:
        import transformers
        import transformers.models.auto.modeling_auto
    except ImportError as error:
        raise MissingExtraError(str(error.name), "hf", "exporting to transformers") from None
    return transformers
