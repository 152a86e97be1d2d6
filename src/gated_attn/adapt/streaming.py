"""Reading a text without end with a cache of fixed size (StreamingLLM, arXiv:2309.17453): the first few tokens and the recent ones.

Positions are those within the cache: when tokens are dropped between the first and the recent ones, the keys of the recent ones are
turned back by as many positions. Rotary scores depend on differences alone, so that is what a fresh rotation would have given.

Shapes: T tokens, R tokens of a block, B batch, K key/value heads, S keys, E head width, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from gated_attn.adapt.perplexity import Loss, cache_word, summed
from gated_attn.errors import RecipeError, UnsupportedError
from gated_attn.hf import families
from gated_attn.hf.attach import attached
from gated_attn.hf.modes import evaluating

TRIED = 37
"""Positions that keys are turned by when a model is tried."""


def streaming_nll(
    model: nn.Module, ids_T: Tensor, *, window: int, keep: int = 0, block: int = 64, first: int | None = None
) -> Loss:
    """The next-token loss of the tokens 1 to T - 1 of one text that is read block by block.

    Before each block tokens leave the cache until it holds at most `window`, the `keep` first ones and the most recent; a query
    sees these and its own block up to itself.

    Args:
        first: a token in front of the text, which is not scored.

    Raises:
        RecipeError: sizes that do not fit each other.
        UnsupportedError: keys that cannot be turned, as those of learned positions.
    """
    if not 0 <= keep < window or block < 1 or len(ids_T) < 2:
        raise RecipeError(
            f"a stream needs 0 <= keep < window, block >= 1 and 2 tokens; got {keep=}, {window=}, {block=}, {len(ids_T)} tokens"
        )
    turn = Turn(model)
    device = next(model.parameters()).device
    ids_T = ids_T.to(device)
    read_T = ids_T if first is None else torch.cat([ids_T.new_tensor([first]), ids_T])
    skipped = len(read_T) - len(ids_T)
    total, cache, last_1V = 0.0, DynamicCache(), None
    with evaluating(model):
        for start in range(0, len(read_T), block):
            new_R = read_T[start : start + block]
            _evict(cache, turn, window, keep)
            held = cache.get_seq_length()
            places = torch.arange(held, held + len(new_R), device=device)[None]
            logits_RV = model(
                input_ids=new_R[None], position_ids=places, use_cache=True, **{cache_word(model): cache}
            ).logits[0]
            # The logits before a token tell it; those before the block's first token are the last block's last.
            before_RV = logits_RV[:-1] if last_1V is None else torch.cat([last_1V, logits_RV[:-1]])
            told_R = new_R[len(new_R) - len(before_RV) :]
            unscored = max(0, skipped + 1 - (start + len(new_R) - len(told_R)))
            if len(told_R) > unscored:
                total += summed(before_RV[unscored:], told_R[unscored:])
            last_1V = logits_RV[-1:].clone()
    return Loss(total, len(ids_T) - 1)


def _evict(cache: DynamicCache, turn: Turn, window: int, keep: int) -> None:
    gone = cache.get_seq_length() - window
    if gone <= 0:
        return
    for number, layer in enumerate(cache.layers):
        recent_BKSE = turn(number, layer.keys[:, :, keep + gone :], -gone)
        layer.keys = torch.cat([layer.keys[:, :, :keep], recent_BKSE], 2)
        layer.values = torch.cat([layer.values[:, :, :keep], layer.values[:, :, keep + gone :]], 2)


class Turn:
    """Turns keys by a number of positions, as the model's own rotary embedding does: `turn(layer, key_BKSE, by)`.

    UnsupportedError for a model whose keys at other positions this does not give; it is tried once, on a few tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rotary: Any = next((one for name, one in model.named_modules() if name.endswith("rotary_emb")), None)
        rows = [row for row in families.find(model) if row.kind == "self"]
        self.apply: Any = (
            getattr(sys.modules.get(type(rows[0].module).__module__), "apply_rotary_pos_emb", None) if rows else None
        )
        for base in type(rows[0].module).__mro__ if rows and self.apply is None else ():
            self.apply = self.apply or getattr(sys.modules.get(base.__module__), "apply_rotary_pos_emb", None)
        self.types: Any = getattr(getattr(model, "config", None), "layer_types", None)
        self.typed = self.rotary is not None and "layer_type" in inspect.signature(self.rotary.forward).parameters
        if self.rotary is None or self.apply is None:
            raise UnsupportedError(
                f"{type(model).__name__} has no rotary embedding by which keys could be turned, and a stream outgrows other "
                "positions"
            )
        self._try(model)

    def __call__(self, layer: int, key_BKSE: Tensor, by: int) -> Tensor:
        place = torch.tensor([[abs(by)]], device=key_BKSE.device)
        typed = (
            {"layer_type": self.types[layer]}
            if "layer_type" in inspect.signature(self.rotary.forward).parameters
            else {}
        )
        cos_B1E, sin_B1E = self.rotary(key_BKSE.float(), place, **typed)
        size = (cos_B1E.square() + sin_B1E.square()).sqrt()  # longer contexts scale both, which the keys are already
        width = cos_B1E.shape[-1]
        turned, _ = self.apply(
            *(key_BKSE[..., :width].float(),) * 2, cos_B1E / size, (sin_B1E if by > 0 else -sin_B1E) / size
        )
        return torch.cat([turned.to(key_BKSE.dtype), key_BKSE[..., width:]], -1)

    def _try(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        ids_BT = torch.arange(3, 9, device=device)[None] % size
        places, caches = torch.arange(6, device=device)[None], (DynamicCache(), DynamicCache())
        with evaluating(model):
            for cache, by in zip(caches, (0, TRIED), strict=True):
                model(input_ids=ids_BT, position_ids=places + by, use_cache=True, **{cache_word(model): cache})
        # Behind a gate that looks for a sink at a fixed position, keys change with positions otherwise, too.
        fixed = any(gate.spec.source == "lse" and gate.spec.sink_key for gate in attached(model).values())
        layers = list(zip(caches[0].layers, caches[1].layers, strict=True))[: 1 if fixed else None]
        for number, (near, far) in enumerate(layers):
            error, largest = (self(number, far.keys, -TRIED) - near.keys).abs().max(), near.keys.abs().max()
            if not error <= 256 * torch.finfo(near.keys.dtype).eps * largest:
                raise UnsupportedError(
                    f"layer {number} of {type(model).__name__}: keys turned by {TRIED} positions are {float(error):.3g} off those "
                    f"of the model, of size {float(largest):.3g}, so a cache cannot be moved"
                )
