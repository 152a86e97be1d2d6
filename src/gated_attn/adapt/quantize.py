"""Simulated quantisation: values are rounded to an integer grid and computed with as floats, to see what rounding costs.

Every linear layer of a model is rounded (`nn.Linear`, and the `Conv1D` of GPT-2), except gates (a gate is tiny, and a sigmoid of
what is rounded is not), the embeddings and the output head: these stay in full precision, and so does all that is no linear layer,
such as convolutions, norms and experts that are fused into one parameter. Biases, scores, softmax and sums are not rounded either.
Nothing of the model changes: the weights are the same bits afterwards.

Shapes: N tokens, I input channels, O output channels, B batch, K key/value heads, S keys, E head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from gated_attn.errors import SpecError, suggestion
from gated_attn.gate import Gate
from gated_attn.hf.modes import evaluating
from gated_attn.hf.swap import Swapped, swap, unswap

SCHEMES = ("none", "w8a8-static", "w8a8-dynamic", "w4a16")
"""`none` runs everything but the rounding, as a control."""

GROUP = 64
"""Input channels of a linear layer that share a 4-bit scale; fewer where the width has no multiple of it."""

STATE = "_gated_attn_rounded"
"""Where a rounded layer keeps what it is rounded with, while it is."""


class _Rounding:
    """How one layer is rounded. `largest` is the range of its input: learned on calibration text, then kept; None before."""

    def __init__(self, scheme: str, name: str) -> None:
        self.scheme, self.name, self.learns = scheme, name, False
        self.largest: float | None = None

    def input(self, x: Tensor) -> Tensor:
        if self.learns:
            if x.numel():
                self.largest = max(self.largest or 0.0, float(x.detach().abs().max()))
            return x
        if self.scheme == "w8a8-static":
            if self.largest is None:
                raise SpecError(
                    f"no calibration batch reached the linear layer {self.name!r}, so its input has no range; calibrate with "
                    "batches of the kind that the model is run on"
                )
            return rounded(x, 8, torch.full((), self.largest, device=x.device))
        return rounded(x, 8, x.abs().amax(-1, keepdim=True)) if self.scheme == "w8a8-dynamic" else x


class RoundedLayer(Swapped):
    """A linear layer whose input is rounded; its weights are rounded in place meanwhile."""

    gated_prefix = "Rounded"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.__dict__[STATE].input(x), *args, **kwargs)  # type: ignore[misc]


def rounded(x: Tensor, bits: int, largest: Tensor) -> Tensor:
    """clamp(round(x / s), -m, m) s, s = largest / m, m = 2^(bits - 1) - 1: x on the symmetric grid that ends at +-largest.

    In float32 at least, then as x is.
    """
    m, dtype = 2 ** (bits - 1) - 1, torch.promote_types(x.dtype, torch.float32)
    scale = (largest.to(dtype) / m).clamp(min=torch.finfo(dtype).tiny)
    return (x.to(dtype) / scale).round().clamp(-m, m).mul(scale).to(x.dtype)


def rounded_weight(weight_OI: Tensor, scheme: str) -> Tensor:
    """int8: a scale per output channel. int4: a scale per group of input channels."""
    if scheme == "w4a16":
        grouped = weight_OI.unflatten(1, (-1, group_of(weight_OI.shape[1])))
        return rounded(grouped, 4, grouped.abs().amax(-1, keepdim=True)).flatten(1)
    if scheme == "none":
        return weight_OI
    return rounded(weight_OI, 8, weight_OI.abs().amax(1, keepdim=True))


def group_of(width: int) -> int:
    """The largest divisor of the width that is at most `GROUP`."""
    return max(size for size in range(1, GROUP + 1) if width % size == 0)


@contextlib.contextmanager
def quantized(model: nn.Module, scheme: str, *, calibration: Iterable[Mapping[str, Any]] = ()) -> Iterator[nn.Module]:
    """The model with its linear layers rounded, for a while.

    Args:
        scheme: `w8a8-static`: int8 weights, symmetric per output channel, and int8 inputs, symmetric per tensor, with the range
            that the calibration batches show (max |x|, arXiv:2306.12929); `w8a8-dynamic`: the same weights, and a range for
            every token (vector-wise inputs in LLM.int8, arXiv:2208.07339; per token in SmoothQuant, arXiv:2211.10438);
            `w4a16`: int4 weights, symmetric in groups of 64 input channels, or of the largest divisor of the width below;
            `none`: no rounding, bit for bit the plain model.
        calibration: keywords of the model's forward, for `w8a8-static`.

    Raises SpecError for an unknown scheme, linear layers that are not plain (quantised, parametrized or within another
    `quantized`), without the batches it needs, and where a layer is run that no batch reached.
    """
    if scheme not in SCHEMES:
        raise SpecError(f"unknown scheme {scheme!r}; legal: {', '.join(SCHEMES)}{suggestion(scheme, SCHEMES)}")
    layers = linear_layers(model)
    if not layers:
        raise SpecError(f"{type(model).__name__} has no linear layers that could be rounded")
    names = {module: name for name, module in model.named_modules()}
    for layer in layers:
        _check_plain(names[layer], layer)
    kept = [layer.weight.detach().clone() for layer in layers]
    with contextlib.ExitStack() as undo:
        for layer in layers:
            swap(layer, RoundedLayer)
            undo.callback(unswap, layer)
            layer.__dict__[STATE] = _Rounding(scheme, names[layer])
            undo.callback(layer.__dict__.pop, STATE)
        if scheme == "w8a8-static":
            _learn(model, layers, calibration)
        undo.callback(_copy, layers, kept)
        # Each from its kept copy: layers may share a weight, which is rounded once.
        rounded_ones = (
            _oriented(layer, rounded_weight(_oriented(layer, weight), scheme))
            for layer, weight in zip(layers, kept, strict=True)
        )
        _copy(layers, rounded_ones)
        yield model


def _check_plain(name: str, layer: nn.Module) -> None:
    """SpecError if rounding the weight in place would not be what the layer computes with."""
    if isinstance(layer, RoundedLayer):
        raise SpecError(f"{name!r} is rounded already; leave the other quantized(...) first")
    weight = layer._parameters.get("weight")
    if weight is None:
        raise SpecError(f"the weight of {name!r} is computed, not a parameter; remove its parametrization first")
    if not weight.is_floating_point():
        raise SpecError(
            f"the weight of {name!r} is {weight.dtype}: quantised for real; load the model in full precision"
        )


def linear_layers(model: nn.Module) -> list[Any]:
    """The linear layers that are rounded: all but gates' and the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    left_out = {inner for module in model.modules() if isinstance(module, Gate) for inner in module.modules()} | {head}
    return [one for one in model.modules() if isinstance(one, (nn.Linear, Conv1D)) and one not in left_out]


def _oriented(layer: nn.Module, weight: Tensor) -> Tensor:
    """Conv1D holds its weight as (I, O)."""
    return weight.T if isinstance(layer, Conv1D) else weight


def _learn(model: nn.Module, layers: list[Any], batches: Iterable[Mapping[str, Any]]) -> None:
    states = [layer.__dict__[STATE] for layer in layers]
    for state in states:
        state.learns = True
    with evaluating(model):
        for batch in batches:
            model(**batch)
    for state in states:
        state.learns = False
    if all(state.largest is None for state in states):
        raise SpecError("static ranges are learned from text: pass calibration=batches of the model's input")


def _copy(layers: list[Any], weights: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.copy_(weight)


class RoundedCache(DynamicCache):
    """A cache whose keys and values (B, K, S, E) are rounded to `bits`, symmetric per token and head; the first `keep` are not.

    Keys are rounded as they are cached, after rotation. For one forward or for `generate`, as their past keys and values:
    `model.generate(ids, past_key_values=RoundedCache(4, keep=1))`. SpecError for fewer than 2 bits or a negative `keep`.
    """

    def __init__(self, bits: int, keep: int = 0) -> None:
        if bits < 2 or keep < 0:
            raise SpecError(f"a symmetric grid needs bits >= 2 and a cache keep >= 0; got {bits=}, {keep=}")
        super().__init__()
        self.bits, self.keep = bits, keep

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What is new is rounded as it comes in."""
        start = self.get_seq_length(layer_idx)
        new = (self._rounded(key_states, start), self._rounded(value_states, start))
        return super().update(*new, layer_idx, *args, **kwargs)

    def _rounded(self, x_BKSE: Tensor, start: int) -> Tensor:
        own = rounded(x_BKSE, self.bits, x_BKSE.abs().amax(-1, keepdim=True))
        exact = max(0, min(self.keep - start, x_BKSE.shape[2]))
        return torch.cat([x_BKSE[:, :, :exact], own[:, :, exact:]], 2) if exact else own
