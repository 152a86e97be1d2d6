"""Reading a text without end with a cache of fixed size (StreamingLLM, arXiv:2309.17453): the first few tokens and the recent ones.

Positions are those within the cache: when tokens are dropped between the first and the recent ones, the keys of the recent ones are
turned back by as many positions, so none is ever at window + block or beyond. Rotations add up, so that is what a fresh rotation
would have given. Every key is kept as the model made it and turned from there: what is turned again and again is rounded as often.

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
from gated_attn.hf.attach import attached
from gated_attn.hf.modes import evaluating

FEW = 6
"""Tokens that a model is tried on."""

GROWN = 0.1
"""The largest relative error of keys behind the first layer that can be rounding in any format; a wrong turn's is about 1."""


def streaming_nll(
    model: nn.Module, ids_T: Tensor, *, window: int, keep: int = 0, block: int = 64, first: int | None = None
) -> Loss:
    """The next-token loss of the tokens 1 to T - 1 of one text that is read block by block.

    Before each block tokens leave the cache until it holds at most `window`, the `keep` first ones and the most recent; a query
    sees these and its own block up to itself.

    Args:
        first: a token in front of the text, which is not scored; it is the first of the `keep`.

    Raises:
        RecipeError: sizes that do not fit each other.
        UnsupportedError: keys that cannot be turned, as those of learned positions.
    """
    if not 0 <= keep < window or block < 1 or ids_T.dim() != 1 or len(ids_T) < 2:
        raise RecipeError(
            f"a stream needs 0 <= keep < window, block >= 1 and at least 2 tokens (T,); got {keep=}, {window=}, {block=}, tokens "
            f"{tuple(ids_T.shape)}"
        )
    device = next(model.parameters()).device
    ids_T = ids_T.to(device)
    read_T = ids_T if first is None else torch.cat([ids_T.new_tensor([first]), ids_T])
    skipped = len(read_T) - len(ids_T)
    held = StreamCache(Turn(model, min(window + block, len(read_T))), window, keep)
    total, last_1V = 0.0, None
    with evaluating(model):
        for start in range(0, len(read_T), block):
            new_R = read_T[start : start + block]
            held.evict()
            size = held.cache.get_seq_length()
            places_1R = torch.arange(size, size + len(new_R), device=device)[None]
            logits_RV = model(
                input_ids=new_R[None], position_ids=places_1R, use_cache=True, **{cache_word(model): held.cache}
            ).logits[0]
            # The logits before a token tell it; those before the block's first token are the last block's last.
            before_RV = logits_RV[:-1] if last_1V is None else torch.cat([last_1V, logits_RV[:-1]])
            told_R = new_R[len(new_R) - len(before_RV) :]
            unscored = max(0, skipped + 1 - (start + len(new_R) - len(told_R)))
            if len(told_R) > unscored:
                total += summed(before_RV[unscored:], told_R[unscored:])
            last_1V = logits_RV[-1:].clone()
    return Loss(total, len(ids_T) - 1)


class StreamCache:
    """A stream's cache, each layer's keys as the model made them, and how far each key has moved back since."""

    def __init__(self, turn: Turn, window: int, keep: int) -> None:
        self.turn, self.window, self.keep = turn, window, keep
        self.cache, self.back_S = DynamicCache(), torch.zeros(0, dtype=torch.long)
        self.made: list[Tensor] = []

    def evict(self) -> None:
        size = self.cache.get_seq_length()
        gone = size - self.window
        if gone <= 0:
            return
        known, device = len(self.back_S), self.cache.layers[0].keys.device
        stay_S = torch.cat([torch.arange(self.keep), torch.arange(self.keep + gone, size)]).to(device)
        back_S = torch.cat([self.back_S.to(device), stay_S.new_zeros(size - known)])[stay_S]
        back_S[self.keep :] += gone
        made = []
        for number, layer in enumerate(self.cache.layers):
            new_BKSE = layer.keys[:, :, known:]
            own_BKSE = torch.cat([self.made[number], new_BKSE], 2) if self.made else new_BKSE
            made.append(own_BKSE[:, :, stay_S])
            layer.keys, layer.values = self.turn(number, made[number], back_S), layer.values[:, :, stay_S]
        self.made, self.back_S = made, back_S


class Turn:
    """Turns keys back by a number of positions each, as the model's own rotary embedding does: `turn(layer, key_BKSE, back_S)`.

    The model is tried once, on a few tokens at the first positions and at the last ones before `longest`. Layers whose keys do
    not depend on positions are left alone. UnsupportedError for a model whose keys at other positions this does not give: learned
    positions, say, or rotary frequencies that change with the length.
    """

    def __init__(self, model: nn.Module, longest: int) -> None:
        self.rotary: Any = next((one for name, one in model.named_modules() if name.endswith("rotary_emb")), None)
        self.apply: Any = getattr(sys.modules[type(self.rotary).__module__], "apply_rotary_pos_emb", None)
        if self.rotary is None or self.apply is None:
            raise UnsupportedError(
                f"{type(model).__name__} has no rotary embedding by which keys could be turned, and a stream outgrows other "
                "positions"
            )
        self.types: Any = getattr(getattr(model, "config", None), "layer_types", None)
        self.typed = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self.still: set[int] = set()
        self._try(model, max(1, longest - FEW))

    def __call__(self, layer: int, key_BKSE: Tensor, back_S: Tensor | int) -> Tensor:
        if layer in self.still:
            return key_BKSE
        back_S = torch.as_tensor(back_S, device=key_BKSE.device).expand(key_BKSE.shape[2])
        key = key_BKSE.to(torch.promote_types(key_BKSE.dtype, torch.float32))
        cos_1SE, sin_1SE = self.rotary(key, back_S[None], **({"layer_type": self.types[layer]} if self.typed else {}))
        size = (cos_1SE.square() + sin_1SE.square()).sqrt()  # longer contexts scale both, which the keys are already
        width = cos_1SE.shape[-1]
        turned, _ = self.apply(*(key[..., :width],) * 2, cos_1SE / size, -sin_1SE / size)
        return torch.cat([turned.to(key_BKSE.dtype), key_BKSE[..., width:]], -1)

    def _try(self, model: nn.Module, by: int) -> None:
        try:
            keys = [(near, far, self(number, far, by)) for number, (near, far) in enumerate(self._keys(model, by))]
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            raise UnsupportedError(
                f"a plain cache of {type(model).__name__} cannot be moved by {by} positions: {type(error).__name__}, {error}"
            ) from error
        # Behind a gate that looks for a sink at a fixed position, keys change with positions otherwise, too.
        fixed = any(gate.spec.source == "lse" and gate.spec.sink_key for gate in attached(model).values())
        for number, (near, far, turned) in enumerate(keys):
            scale = near.float().norm()
            wrong, left = (float((other - near).float().norm() / scale) for other in (turned, far))
            if left < wrong:
                self.still.add(number)
            # Angles are computed in float32, so their error grows with the position; that of the input grows with the layers.
            eps, single = (torch.finfo(dtype).eps for dtype in (near.dtype, torch.float32))
            eps = max(eps, single)
            allowed = 4 * by * single + (2 * eps if number == 0 else min(GROWN, 256 * eps))
            if not min(wrong, left) <= allowed and not (fixed and number):
                raise UnsupportedError(
                    f"layer {number} of {type(model).__name__}: keys turned back by {by} positions are off those of the model by "
                    f"{wrong:.3g} of their size (rounding: {allowed:.3g}), so a cache cannot be moved; positions are learned, or "
                    "frequencies change with the length, for which a smaller window may do"
                )

    def _keys(self, model: nn.Module, by: int) -> list[tuple[Tensor, Tensor]]:
        """Of every layer, those of a few tokens at the first positions and of the same ones `by` later."""
        device = next(model.parameters()).device
        size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        ids_1T = torch.arange(3, 3 + FEW, device=device)[None] % size
        places_1T, caches = torch.arange(FEW, device=device)[None], (DynamicCache(), DynamicCache())
        with evaluating(model):
            for cache, shift in zip(caches, (0, by), strict=True):
                model(input_ids=ids_1T, position_ids=places_1T + shift, use_cache=True, **{cache_word(model): cache})
        return [(near.keys, far.keys) for near, far in zip(caches[0].layers, caches[1].layers, strict=True)]
