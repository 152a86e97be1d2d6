"""`Gate`: the module that turns what a spec names as its source into gate values.

Shapes: B batch, T tokens, S keys, D source width, H heads (1 for shared and dense gates), K key/value heads, E head width,
G gate width (1 or E), R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.attention.activations import activate
from gated_attn.attention.call import PairLogits, Sink, apply_gate
from gated_attn.errors import ShapeError, SpecError, UnsupportedError
from gated_attn.spec import GateSpec


class Fill(nn.Module):
    """The learned fill c (H, E) of a gate, or (1, D) of a dense one: calling it gives it.

    A module, so that whoever moves parameters in and out around a module's call (offloading) moves these too.
    """

    def __init__(self, heads: int, channels: int, **kind: Any) -> None:
        super().__init__()
        self.fill_HE = nn.Parameter(torch.zeros(heads, channels, **kind))

    def forward(self) -> Tensor:
        return self.fill_HE


class Gate(nn.Module):
    """g = act(W x + b) per head or channel, arXiv:2505.06708 section 2.2; sigmoid in float32, rounded once.

    Args:
        spec: a GateSpec or its text.
        dim, heads, kv_heads, head_dim: the attention module's sizes (kv_heads defaults to heads, head_dim to dim // heads).
        latent_dim: width of the compressed query, for `source=latent`.

    Calling it:
        most specs: `gate(x_BTD) -> gate_BTHG` in x's dtype, where x is the hidden state or the latent query, or the query
            (B, T, H, E) for `source=query`. `source=constant` ignores x's values and returns (1, 1, H, G).
        `source=lse`: `gate(x) -> Sink`, for `gated_attention` to read from the scores.
        `weights:pairwise`: `gate(q_BTHE, k_BSKE) -> PairLogits`, likewise.

    `fill_HE` is the learned fill, a parameter of the child `fill`, or None. The initial value that `spec.init` names holds after
    construction and after `reset_parameters()`: `identity` is exactly 1 in float32, bfloat16 and float16.

    Raises ShapeError for an input of the wrong width, SpecError for a spec that these sizes cannot serve.

    Example:
        >>> Gate("output:headwise:2sigmoid,init=identity", dim=16, heads=4)(torch.randn(2, 3, 16)).shape
        torch.Size([2, 3, 4, 1])
    """

    def __init__(
        self,
        spec: GateSpec | str,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        latent_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec = GateSpec.parse(spec)
        n_in, n_out = spec.linear_shape(dim, heads, kv_heads, head_dim, latent_dim)
        groups, channels = spec.grouping(dim, heads, kv_heads, head_dim)
        self.shape_HG = spec.gate_shape(dim, heads, kv_heads, head_dim)
        self.n_in = n_in
        self._top_axis = -1 if self.shape_HG[1] > 1 else -2
        if spec.top_k is not None and spec.top_k > self.shape_HG[self._top_axis]:
            raise SpecError(
                f"'top_k={spec.top_k}' keeps more than there are: {self.shape_HG[0]} heads of {self.shape_HG[1]} gate values"
            )
        kind = {"device": device, "dtype": dtype}
        self.down: nn.Linear | None = None
        self.bias: nn.Parameter | None = None
        if spec.width == "pairwise":
            rank = spec.rank or channels
            self.query_proj = nn.Linear(n_in, rank, bias=False, **kind)
            self.key_proj = nn.Linear(n_out, rank, bias=False, **kind)
        elif n_in:
            self.down = nn.Linear(n_in, spec.rank, bias=False, **kind) if spec.rank else None
            self.proj = nn.Linear(spec.rank or n_in, n_out, bias=spec.has_bias, **kind)
        if spec.has_bias and not (n_in and spec.width != "pairwise"):
            self.bias = nn.Parameter(torch.empty(1 if spec.width == "pairwise" else n_out, **kind))
        self.sink_key = nn.Parameter(torch.empty(groups, channels, **kind)) if spec.sink_key else None
        self.fill = Fill(groups, channels, **kind) if spec.fill else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights N(0, std), or 0 under `init`; bias at `spec.start`; fill and inner factors where gradients can reach them.

        Of two factors only the outer one starts at 0: with both at 0 neither would get a gradient.
        """
        spec = self.spec
        inner, outer = (
            (self.query_proj, self.key_proj) if spec.width == "pairwise" else (self.down, getattr(self, "proj", None))
        )
        if inner is not None:
            nn.init.normal_(inner.weight, std=inner.in_features**-0.5)
        if outer is not None:
            nn.init.normal_(outer.weight, std=spec.weight_std)
        bias = self.bias if outer is None or outer.bias is None else outer.bias
        if bias is not None:
            nn.init.constant_(bias, spec.start)
        if self.sink_key is not None:
            nn.init.normal_(self.sink_key, std=spec.weight_std)
        if self.fill is not None:
            nn.init.zeros_(self.fill.fill_HE)

    @property
    def fill_HE(self) -> Tensor | None:
        """The learned fill (H, E), or None.

        UnsupportedError where the gate is an FSDP2 unit of its own: its parameters are whole inside its forward only.
        """
        fill_HE = None if self.fill is None else self.fill()
        if hasattr(self, "unshard") and hasattr(fill_HE, "full_tensor"):
            raise UnsupportedError(
                f"gate {self.spec} is sharded by itself, and its fill is needed where attention is computed; call fully_shard "
                "on the attention module or the layer around it instead"
            )
        return fill_HE

    def logits(self, x: Tensor) -> Tensor:
        """What the activation is applied to, (B, T, H, G); for specs other than `source=lse` and `weights:pairwise`."""
        H, G = self.shape_HG
        if self.spec.source == "constant":
            assert self.bias is not None
            return self.bias.view(1, 1, H, G).to(x.dtype)
        self._check_width(x)
        x = x[..., : self.n_in]
        logits = self.proj(x if self.down is None else self.down(x))
        return logits if self.spec.source == "query" else logits.unflatten(-1, (H, G))

    def _check_width(self, x: Tensor) -> None:
        if x.shape[-1] < self.n_in or (self.spec.in_features is None and x.shape[-1] != self.n_in):
            raise ShapeError(
                f"gate {self.spec} reads {self.n_in} channels of {self.spec.source}, and got shape {tuple(x.shape)}"
            )

    def forward(self, x: Tensor, key_BSKE: Tensor | None = None) -> Tensor | Sink | PairLogits:
        spec = self.spec
        if spec.source == "lse":
            assert self.bias is not None
            return Sink(self._kept(self.bias), None if self.sink_key is None else self._kept(self.sink_key))
        if spec.width == "pairwise":
            if key_BSKE is None:
                raise ShapeError(f"gate {spec} is computed from queries and keys: call gate(q_BTHE, k_BSKE)")
            n = self.n_in
            for source in (x, key_BSKE):
                self._check_width(source)
            bias = None if self.bias is None else self._kept(self.bias)
            return PairLogits(self.query_proj(x[..., :n]), self.key_proj(key_BSKE[..., :n]), bias, spec.activation)
        gate_BTHG = activate(self.logits(x), spec.activation)
        return gate_BTHG if spec.top_k is None else keep_largest(gate_BTHG, spec.top_k, self._top_axis)

    def _kept(self, parameter: Tensor) -> Tensor:
        """A parameter to be read after this forward; as an FSDP2 unit of its own the gate frees it at its end."""
        return parameter.clone() if hasattr(self, "unshard") else parameter

    def modulate(self, x_BTHE: Tensor, source: Tensor) -> Tensor:
        """x gated where it stands: `apply_gate` with this gate's values of `source`, its op and its fill."""
        gate = self(source)
        assert isinstance(gate, Tensor)
        return apply_gate(x_BTHE, gate, self.fill_HE, self.spec.op)

    def extra_repr(self) -> str:
        return str(self.spec)


def keep_largest(gate_BTHG: Tensor, k: int, axis: int) -> Tensor:
    """The k largest values along the axis as they are, with their gradients, and exactly 0 elsewhere."""
    kept = gate_BTHG.topk(k, dim=axis).indices
    mask = torch.zeros_like(gate_BTHG, dtype=torch.bool).scatter(axis, kept, True)
    return torch.where(mask, gate_BTHG, 0.0)
