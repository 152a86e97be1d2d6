"""`Rope`: rotary positions, full or partial, with the published ways of stretching them to longer contexts.

Shapes: B batch, T tokens, H heads, E head width, R rotated pairs (half of the rotated channels).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gated_attn.attention.activations import widen
from gated_attn.errors import SpecError

Scaling = Mapping[str, Any] | tuple[tuple[str, Any], ...] | None

_LEGAL: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    ),
}
"""kind -> (keys it needs, keys it may have), named as in transformers' rope_parameters."""


@dataclass(frozen=True)
class Rope:
    """Rotate channel pairs (i, i + R) by position * theta^(-i/R), RoFormer (arXiv:2104.09864), in Llama's pairing.

    Fields:
        head_dim: head width E.
        theta: base of the frequencies.
        fraction: share of the channels that is rotated, the first ones; Qwen3-Next uses 0.25.
        scaling: None, or `{"rope_type": kind, ...}` with transformers' keys. Kinds: `linear` (positions / factor), `llama3`
            (long wavelengths / factor), `yarn` (arXiv:2309.00071, with its factor on cos and sin).
        rotated: how many channels are rotated, 2R; int(head_dim * fraction).

    A value without tensors: it copies, pickles and compiles like a number.

    Example:
        >>> Rope(8).rotate(torch.ones(1, 3, 2, 8), torch.arange(3)[None]).shape
        torch.Size([1, 3, 2, 8])
    """

    head_dim: int
    theta: float = 10000.0
    fraction: float = 1.0
    scaling: Scaling = None
    rotated: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.scaling is not None:
            options = dict(self.scaling)
            for key, own in (("rope_theta", self.theta), ("partial_rotary_factor", self.fraction)):
                if options.pop(key, own) != own:
                    raise SpecError(
                        f"scaling says {key}={dict(self.scaling)[key]!r} and this Rope has {own!r}; pass it as "
                        f"{'theta' if key == 'rope_theta' else 'fraction'} too"
                    )
            if options != {"rope_type": "default"}:
                _check(options)
            object.__setattr__(self, "scaling", tuple(sorted(options.items())) if len(options) > 1 else None)
        object.__setattr__(self, "rotated", int(self.head_dim * self.fraction))
        if not 0 < self.fraction <= 1 or self.rotated < 2 or self.rotated % 2:
            raise SpecError(
                f"RoPE turns pairs of channels: fraction={self.fraction:g} of head_dim={self.head_dim} is {self.rotated}, "
                "which must be even, at least 2 and at most head_dim"
            )

    def frequencies(
        self, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """(radians per position of each pair, (R,); factor on cos and sin)."""
        exponents_R = torch.arange(0, self.rotated, 2, device=device, dtype=dtype) / self.rotated
        frequencies_R = 1.0 / self.theta**exponents_R
        if not self.scaling:
            return frequencies_R, 1.0
        options = dict(self.scaling)
        return _SCALINGS[options["rope_type"]](frequencies_R, self, options)

    def rotate(self, x_BTHE: Tensor, positions_BT: Tensor) -> Tensor:
        """x rotated to its positions, (B, T) or (1, T); float32 (float64 for float64) inside, rounded once to x's dtype."""
        x = widen(x_BTHE)
        frequencies_R, factor = self.frequencies(x.device, x.dtype)
        angles_BT1R = (positions_BT.to(x.dtype)[..., None] * frequencies_R)[:, :, None]
        cos, sin = angles_BT1R.cos() * factor, angles_BT1R.sin() * factor
        first, second, rest = x.split([self.rotated // 2, self.rotated // 2, self.head_dim - self.rotated], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x_BTHE.dtype)


def _check(options: dict[str, Any]) -> None:
    kind = options.get("rope_type")
    if kind not in _LEGAL:
        raise SpecError(f"unknown rope_type {kind!r} in scaling; legal: {', '.join(_LEGAL)}, or scaling=None")
    needed, optional = _LEGAL[kind]
    given = set(options) - {"rope_type"}
    if given - needed - optional or needed - given:
        raise SpecError(
            f"rope scaling {kind!r} has keys {sorted(given)}; it needs {sorted(needed)} and may have {sorted(optional)}"
        )


def _linear(frequencies_R: Tensor, rope: Rope, options: dict[str, Any]) -> tuple[Tensor, float]:
    return frequencies_R / options["factor"], 1.0


def _llama3(frequencies_R: Tensor, rope: Rope, options: dict[str, Any]) -> tuple[Tensor, float]:
    """Wavelengths beyond context/low are stretched by factor, those within context/high stay, in between interpolated."""
    low, high, context = (
        options[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns_R = context * frequencies_R / (2 * math.pi)
    share_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return (1 - share_R) * frequencies_R / options["factor"] + share_R * frequencies_R, 1.0


def _yarn(frequencies_R: Tensor, rope: Rope, options: dict[str, Any]) -> tuple[Tensor, float]:
    """Pairs that turn fewer than beta_slow times in the original context are stretched, more than beta_fast stay."""
    factor, context = options["factor"], options["original_max_position_embeddings"]

    def pair_with(turns: float) -> float:
        return rope.rotated * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(options.get("beta_fast") or 32), pair_with(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotated - 1)
    pairs_R = torch.arange(rope.rotated // 2, device=frequencies_R.device, dtype=frequencies_R.dtype)
    stretched_R = ((pairs_R - low) / (high - low if high != low else 1e-3)).clamp(0, 1)
    return frequencies_R / factor * stretched_R + frequencies_R * (1 - stretched_R), _yarn_attention(factor, options)


def _yarn_attention(factor: float, options: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])
    if options.get("mscale") and options.get("mscale_all_dim"):
        return mscale(options["mscale"]) / mscale(options["mscale_all_dim"])
    return mscale(1.0)


_SCALINGS: dict[str, Callable[[Tensor, Rope, dict[str, Any]], tuple[Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
