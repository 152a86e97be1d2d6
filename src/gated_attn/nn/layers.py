"""torch.nn's transformer layers with every attention gated: `GatedEncoderLayer`, `GatedDecoderLayer`, `GatedTransformer`.

They are subclasses, so whatever takes torch's takes these; state-dict keys are torch's plus each attention's `attn_gate.*`.

Shapes: B batch, S source tokens, T target tokens, D model width; (S, B, D) without `batch_first`, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_attn.errors import SpecError
from gated_attn.gate import Gate
from gated_attn.nn.multihead import GatedMultiheadAttention
from gated_attn.spec import PAPER, GateSpec, as_spec

PLACES = ("encoder", "decoder", "cross")

GateChoice = GateSpec | str | None


class GatedEncoderLayer(nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer whose `self_attn` is a `GatedMultiheadAttention`; constructor and call are torch's.

    x = norm1(x + attention(x)), then norm2(x + feed_forward(x)); with norm_first the norms stand inside (arXiv:2002.04745).
    torch's inference fast path, which computes the layer without calling its attention, never applies to it: training and
    evaluation run the same code, and a fully padded sample gives no NaN.

    Args:
        d_model ... dtype: as torch's.
        gate: a GateSpec, its text or None; `impl`: who computes attention. See `GatedMultiheadAttention`.

    Example:
        >>> layer = GatedEncoderLayer(16, 4, batch_first=True, gate="paper-headwise")
        >>> encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> encoder(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gate: GateChoice = PAPER,
        impl: str = "auto",
    ) -> None:
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip
        self.self_attn: Any = GatedMultiheadAttention.from_torch(self.self_attn, gate, impl)


class GatedDecoderLayer(nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer whose `self_attn` and `multihead_attn` are gated; constructor and call are torch's.

    Args:
        d_model ... dtype: as torch's.
        gate: of the self attention; `cross_gate`: of the attention over the memory, whose gate reads the decoder's side.
            Each is a GateSpec, its text or None.
        impl: who computes attention. See `GatedMultiheadAttention`.

    Example:
        >>> layer = GatedDecoderLayer(16, 4, batch_first=True, cross_gate=None)
        >>> layer(torch.randn(2, 5, 16), torch.randn(2, 7, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gate: GateChoice = PAPER,
        cross_gate: GateChoice = PAPER,
        impl: str = "auto",
    ) -> None:
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip
        self.self_attn: Any = GatedMultiheadAttention.from_torch(self.self_attn, gate, impl)
        self.multihead_attn: Any = GatedMultiheadAttention.from_torch(self.multihead_attn, cross_gate, impl)


class GatedTransformer(nn.Transformer):
    """torch.nn.Transformer, the encoder-decoder of arXiv:1706.03762, with every attention gated: encoder, decoder and cross.

    Constructor, call and masks are torch's. With `gate=None` one seed gives both classes the same weights.

    Args:
        d_model ... dtype: as torch's; `custom_encoder` and `custom_decoder` are used with the gates that they
            have; as in torch, all matrices are drawn anew.
        gate: one GateSpec, text or None for all attentions, or a dict with some of the keys `encoder`, `decoder` (its self
            attention) and `cross`; a key left out is no gate there. `layers=` counts within each stack, from 0.
        impl: who computes attention.

    The *_is_causal arguments are masks of their own, as in `GatedMultiheadAttention`; None is False, since the mask itself is
    always applied and need not be recognised (which would read its values, and so break torch.export).

    Errors: SpecError for an unknown key or gate.

    Example:
        >>> model = GatedTransformer(16, 4, 1, 1, 32, batch_first=True, gate={"encoder": "paper", "cross": "paper-headwise"})
        >>> model(torch.randn(2, 7, 16), torch.randn(2, 5, 16), tgt_is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Any = None,
        custom_decoder: Any = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gate: GateChoice | Mapping[str, GateChoice] = PAPER,
        impl: str = "auto",
    ) -> None:
        specs = _specs_by_place(gate)
        sizes = (
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype)

        encoder, decoder = custom_encoder, custom_decoder
        if encoder is None:
            layer = GatedEncoderLayer(*sizes, gate=specs["encoder"], impl=impl)
            encoder = nn.TransformerEncoder(layer, num_encoder_layers, norm(), enable_nested_tensor=False)
            _keep_gates(encoder.layers, "self_attn", specs["encoder"])
        if decoder is None:
            both = GatedDecoderLayer(*sizes, gate=specs["decoder"], cross_gate=specs["cross"], impl=impl)
            decoder = nn.TransformerDecoder(both, num_decoder_layers, norm())
            _keep_gates(decoder.layers, "self_attn", specs["decoder"])
            _keep_gates(decoder.layers, "multihead_attn", specs["cross"])
        super().__init__(
            d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout, activation, encoder, decoder,
            layer_norm_eps, batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip

    def _reset_parameters(self) -> None:
        """Xavier for torch's own matrices, as in torch; the gates start as their specs say, and each for itself."""
        gates = [module for module in self.modules() if isinstance(module, Gate)]
        gated = {id(parameter) for gate in gates for parameter in gate.parameters()}
        for parameter in self.parameters():
            if parameter.dim() > 1 and id(parameter) not in gated:
                nn.init.xavier_uniform_(parameter)
        for gate in gates:
            gate.reset_parameters()

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Decoder output, shaped as tgt. Masks are torch's: bool True hides, float is added; see torch.nn.Transformer."""
        return super().forward(
            src, tgt, src_mask, tgt_mask, memory_mask, src_key_padding_mask, tgt_key_padding_mask, memory_key_padding_mask,
            bool(src_is_causal), bool(tgt_is_causal), memory_is_causal,
        )  # fmt: skip


def _specs_by_place(gate: GateChoice | Mapping[str, GateChoice]) -> dict[str, GateSpec | None]:
    if not isinstance(gate, Mapping):
        return dict.fromkeys(PLACES, as_spec(gate))
    unknown = sorted(set(gate) - set(PLACES))
    if unknown:
        raise SpecError(f"gate has no place {', '.join(map(repr, unknown))}; legal: {', '.join(PLACES)}")
    return {place: as_spec(gate.get(place)) for place in PLACES}


def _keep_gates(layers: Any, name: str, spec: GateSpec | None) -> None:
    """Take the gate out of the layers that `layers=` leaves out: torch builds all layers as copies of one."""
    for index, layer in enumerate(layers):
        if spec is not None and not spec.applies_to(index):
            getattr(layer, name).attn_gate = None
