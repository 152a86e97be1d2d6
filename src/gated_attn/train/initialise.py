"""Where a run starts: models whose shared parameters are alike whatever the gate, and feed-forwards narrowed to match.

Shapes: D model width, F feed-forward width.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gated_attn.errors import RecipeError
from gated_attn.gate import Gate
from gated_attn.models.decoder import Decoder, DecoderConfig
from gated_attn.spec import as_spec
from gated_attn.train.data import vocab_size
from gated_attn.train.recipe import Recipe

MATCHES = ("ffn", "none")
TOLERANCE = 0.005
"""Matched models differ from the ungated one by at most this share of its parameters."""


@dataclass(frozen=True)
class Plan:
    """A model to be trained: its config, parameters, the gate's share before matching, and the difference left after it."""

    config: DecoderConfig
    parameters: int
    added: float
    difference: float


def plan(recipe: Recipe, gate: str, match: str = "ffn") -> Plan:
    """The decoder of this recipe with this gate; `match="ffn"` narrows F until its parameters match the ungated model's.

    Raises RecipeError if no width matches within 0.5 %, with the numbers.
    """
    if match not in MATCHES:
        raise RecipeError(f"unknown match {match!r}; legal: {', '.join(MATCHES)}")
    spec = as_spec(gate)
    model = recipe.model
    base = DecoderConfig(
        vocab_size=vocab_size(recipe), layers=model.layers, heads=model.heads, dim=model.dim, ffn_dim=model.ffn_dim,
        kv_heads=model.kv_heads, head_dim=model.head_dim, qk_norm=model.qk_norm,
        rope_theta=model.rope_theta, dropout=model.dropout, tie_embeddings=model.tie_embeddings,
    )  # fmt: skip
    config = replace(base, gate="none" if spec is None else str(spec))
    ungated, gated = count(base), count(config)
    added = gated - ungated
    if match == "ffn" and added:
        per_width = 3 * model.dim * model.layers  # SwiGLU's three D x F matrices
        config = replace(config, ffn_dim=model.ffn_dim - round(added / per_width))
        if config.ffn_dim < 1:
            raise RecipeError(
                f"gate {gate} adds {added} parameters, more than the feed-forward of width {model.ffn_dim} has; use match=none"
            )
        gated = count(config)
        if abs(gated - ungated) > TOLERANCE * ungated:
            raise RecipeError(
                f"gate {gate}: the nearest feed-forward width, {config.ffn_dim}, gives {gated} parameters against {ungated}, "
                f"more than {TOLERANCE:.1%} apart; use match=none or a wider model"
            )
    return Plan(config, gated, added / ungated, (gated - ungated) / ungated)


def count(config: DecoderConfig) -> int:
    """Parameters of a decoder, without allocating it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


@torch.no_grad()
def initialise(model: Decoder, seed: int, ffn_dim: int | None = None) -> Decoder:
    """Draw every parameter from a generator seeded by (seed, its name), so it starts alike whatever else the model has.

    A feed-forward narrower than `ffn_dim` takes the first rows (or columns) of the full one.
    """
    full = ffn_dim or model.decoder_config.ffn_dim
    gates = [(name, module) for name, module in model.named_modules() if isinstance(module, Gate)]
    for name, module in gates:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(seed, name))
            module.reset_parameters()
    for name, parameter in model.named_parameters():
        std = model.initial_std(name)
        if std is None or any(name.startswith(f"{gate}.") for gate, _ in gates):
            continue
        parameter.copy_(_draw(parameter, name, std, seed, full))
    return model


def _draw(parameter: nn.Parameter, name: str, std: float, seed: int, ffn_dim: int) -> Tensor:
    shape = list(parameter.shape)
    if name.endswith(("ffn.gate_proj.weight", "ffn.up_proj.weight")):
        shape[0] = ffn_dim
    elif name.endswith("ffn.down_proj.weight"):
        shape[1] = ffn_dim
    generator = torch.Generator().manual_seed(_seed(seed, name))
    drawn = torch.randn(shape, generator=generator) * std
    return drawn[: parameter.shape[0], : parameter.shape[1]]


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
