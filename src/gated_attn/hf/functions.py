"""The attention functions that gated modules call, registered with transformers.

A gated module asks for the implementation that the model is set to under the name `gated_attn|NAME`: the same function, and
the gate on its output. `gated_attn` alone, which `model.set_attn_implementation` takes too, is `gated_attention` itself.

Shapes: B batch, T queries, S keys, H heads, K key/value heads, E head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gated_attn.attention import PairLogits, Sink, apply_gate, gated_attention
from gated_attn.errors import UnsupportedError
from gated_attn.gate import Gate

NAME = "gated_attn"
PREFIX = f"{NAME}|"

HARMLESS = (
    "position_ids", "use_cache", "cache_position", "encoder_hidden_states", "deterministic", "output_hidden_states",
    "sliding_window", "return_dict", "num_items_in_batch", "layer_idx", "position_embeddings", "kernel_options", "is_causal",
    "position_bias", "max_length_q", "max_length_k", "output_router_logits",
)  # fmt: skip
"""Keywords that models pass to every attention function and that change no number of `gated_attention` beside the mask."""


class Handover:
    """What a gated module hands to the attention function, by argument: the gate and its source, or what to append.

    `carry` (B, T, D) is appended to the output as further heads, for a gate behind the out projection.
    """

    __slots__ = ("carry", "gate", "source", "taken")

    def __init__(self, gate: Gate | None, source: Tensor, carry: Tensor | None = None) -> None:
        self.gate, self.source, self.carry, self.taken = gate, source, carry, False


class Stock:
    """A gated module with the model's own configuration, in which the attention implementation has its stock name."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.config = module, module.__dict__["config"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def register(name: str) -> str:
    """The name under which gated modules find this implementation with the gate; registered at the first request."""
    wanted = NAME if name == NAME else PREFIX + name
    if wanted not in AttentionInterface._global_mapping:
        AttentionInterface.register(wanted, _own if name == NAME else _around(name))
        AttentionMaskInterface.register(wanted, ALL_MASK_ATTENTION_FUNCTIONS.get(name, sdpa_mask))
    return wanted


def _around(name: str) -> Callable[..., Any]:
    """The attention function `name`, with the gate on its output."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        attn_gate: Handover | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if attn_gate is None:
            raise UnsupportedError(f"{type(module).__name__} called the gated attention function without its gate")
        attn_gate.taken = True
        gate = attn_gate.gate
        if gate is not None and (gate.spec.source == "lse" or gate.spec.width == "pairwise"):
            if name != "sdpa":
                raise UnsupportedError(
                    f"gate {gate.spec} is read from the scores inside attention, which attn_implementation={name!r} does not show; "
                    "use model.set_attn_implementation('sdpa') or 'gated_attn'"
                )
            return _own(module, query, key, value, attention_mask, *args, **kwargs, attn_gate=attn_gate)  # type: ignore[misc]
        # The model's own function where the class has one of that name: `eager` always is.
        stock = ALL_ATTENTION_FUNCTIONS.get_interface(name, module.eager_attention)
        seen = Stock(module) if "flash" in name else module  # it looks its kernel up by the name in the module's config
        out_BTHE, weights = stock(seen, query, key, value, attention_mask, *args, **kwargs)
        if gate is not None:
            values_BTHG = cast(Tensor, _values(gate, attn_gate.source, query))
            out_BTHE = apply_gate(out_BTHE, values_BTHG, gate.fill_HE, gate.spec.op)
        return (out_BTHE if attn_gate.carry is None else append(out_BTHE, attn_gate.carry)), weights

    return attention


def _own(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    attn_gate: Handover | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`gated_attention`, whichever impl serves the call. Masks are those of sdpa; no attention weights are returned."""
    _refuse(kwargs, attention_mask)
    T, S = query.shape[2], key.shape[2]
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and attention_mask is None and T > 1
    bias = kwargs.get("position_bias")
    if causal and S > T:  # prefill of an empty static cache: what lies behind the queries is not written yet
        key, value = key[:, :, :T], value[:, :, :T]
        bias = None if bias is None else bias[..., :T]
    gate = None if attn_gate is None else attn_gate.gate
    if attn_gate is not None:
        attn_gate.taken = True
    q_BTHE, k_BSKE, v_BSKE = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    form: Any = None
    if gate is not None and gate.spec.op == "mul":
        form = gate(q_BTHE, k_BSKE) if gate.spec.width == "pairwise" else _values(gate, attn_gate.source, query)  # type: ignore[union-attr]
    out_BTHE = gated_attention(
        q_BTHE, k_BSKE, v_BSKE, form, causal=causal, mask=_with_bias(attention_mask, bias), scale=scaling, dropout=dropout,
        fill=None if gate is None else gate.fill_HE,
    )  # fmt: skip
    if gate is not None and gate.spec.op == "add":
        out_BTHE = gate.modulate(out_BTHE, attn_gate.source)  # type: ignore[union-attr]
    if attn_gate is not None and attn_gate.carry is not None:
        out_BTHE = append(out_BTHE, attn_gate.carry)
    return out_BTHE, None


def _refuse(kwargs: dict[str, Any], mask: Tensor | None) -> None:
    """UnsupportedError for a keyword that would change the answer and that `gated_attention` does not serve."""
    for name, value in kwargs.items():
        packed = name in ("cu_seq_lens_q", "cu_seq_lens_k") and mask is not None  # the mask says it already
        if value is not None and value is not False and name not in HARMLESS and not packed:
            raise UnsupportedError(
                f"attn_implementation='gated_attn' does not serve {name}={_short(value)}, which this model passes; "
                "keep 'eager', or the implementation that the model had"
            )


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The mask with a position bias added to the scores that it shows."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _values(gate: Gate, source: Tensor, query_BHTE: Tensor) -> Tensor | Sink | PairLogits:
    return gate(query_BHTE.transpose(1, 2) if gate.spec.source == "query" else source)


def append(out_BTHE: Tensor, carry: Tensor) -> Tensor:
    """The output with x (B, T, D) behind it as ceil(D / E) further heads, padded with zeros."""
    width = out_BTHE.shape[-1]
    carried = F.pad(carry.to(out_BTHE.dtype), (0, -carry.shape[-1] % width))
    return torch.cat([out_BTHE, carried.unflatten(-1, (-1, width))], 2)


for _name in ("eager", NAME, *ALL_ATTENTION_FUNCTIONS):
    if not _name.startswith(PREFIX):
        register(_name)
