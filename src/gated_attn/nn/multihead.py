"""`GatedMultiheadAttention`: torch.nn.MultiheadAttention with a gate, on every path.

Shapes: B batch, T queries, S keys, D embed_dim (keys and values may come in other widths), H heads, E head width, G gate width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_attn.attention import apply_gate, gated_attention, known_names
from gated_attn.attention.call import GateInput, make_call
from gated_attn.attention.masks import hides
from gated_attn.attention.reference import softmax_weights
from gated_attn.errors import ShapeError, SpecError
from gated_attn.gate import Gate
from gated_attn.spec import PAPER, GateSpec, as_spec


class GatedMultiheadAttention(nn.Module):
    """A drop-in for `torch.nn.MultiheadAttention` with a gate: out = W_o concat_h(g_h * softmax(q_h k_h^T / sqrt(E)) v_h).

    Constructor, forward, default initialisation and state-dict keys are those of `torch.nn.MultiheadAttention`, plus
    `attn_gate.*`; a stock state dict loads with `strict=False` and misses the gate's keys only. The gate is that of
    arXiv:2505.06708.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as torch's.
        gate: a GateSpec, its text, a preset, or None. Output, weights, query and dense gates read the query side, key and
            value gates their own input. The keys that `add_bias_kv` and `add_zero_attn` append belong to no token: key and
            value gates leave them as they are. `layers=` is for models of many layers and not read here.
        impl: who computes the attention, as in `gated_attention`.

    What differs from torch, on purpose:
        A query that may see no key (a fully padded sample) attends to nothing, where torch gives NaN: its output is what
            `out_proj` makes of zeros, and its gradients are finite.
        `is_causal=True` is a mask of its own, combined with `attn_mask` (which it then does not need), never a hint that
            replaces it. As torch's, it is aligned to the first key: query t sees keys 0 to t, and the appended ones.
        The weights returned are the softmax weights before dropout and before the gate on them: their rows sum to 1.
        `out_proj` is called as a module, so its hooks, LoRA and quantisation act.
        Second derivatives need `impl="reference"`: PyTorch's fused attention has none.

    Errors: SpecError for a gate that this module cannot have, ShapeError for sizes or masks that do not fit, with both shapes.

    Example:
        >>> attn = GatedMultiheadAttention(16, 4, batch_first=True, gate="output:headwise:sigmoid")
        >>> x = torch.randn(2, 5, 16)
        >>> out, weights = attn(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
    """

    # torch.nn.TransformerEncoderLayer and TransformerEncoder read this name to decide whether they may compute attention
    # from the weights alone, without calling the module, which would skip the gate. False makes them call it.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    attn_gate: Gate | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gate: GateSpec | str | None = PAPER,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ShapeError(
                f"embed_dim={embed_dim} cannot be split into num_heads={num_heads} heads; make the first a multiple of the second"
            )
        if not 0.0 <= dropout < 1.0:
            raise ShapeError(f"dropout={dropout}: pass a probability in [0, 1)")
        known_names(impl)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        self.dropout, self.batch_first, self.add_zero_attn, self.impl = dropout, batch_first, add_zero_attn, impl
        self.fused_in_proj = self.kdim == embed_dim and self.vdim == embed_dim
        kind = {"device": device, "dtype": dtype}

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **kind)) if wanted else None

        self.register_parameter("in_proj_weight", parameter(self.fused_in_proj, 3 * embed_dim, embed_dim))
        self.register_parameter("q_proj_weight", parameter(not self.fused_in_proj, embed_dim, embed_dim))
        self.register_parameter("k_proj_weight", parameter(not self.fused_in_proj, embed_dim, self.kdim))
        self.register_parameter("v_proj_weight", parameter(not self.fused_in_proj, embed_dim, self.vdim))
        self.register_parameter("in_proj_bias", parameter(bias, 3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **kind)
        self.register_parameter("bias_k", parameter(add_bias_kv, 1, 1, embed_dim))
        self.register_parameter("bias_v", parameter(add_bias_kv, 1, 1, embed_dim))
        self._reset_parameters()
        self.register_module("attn_gate", self._make_gate(as_spec(gate), **kind))

    @classmethod
    def from_torch(
        cls,
        attention: nn.MultiheadAttention,
        gate: GateSpec | str | None = PAPER,
        impl: str = "auto",
    ) -> GatedMultiheadAttention:
        """The gated module that takes a stock one's place: the same parameters (shared, not copied, frozen ones
        stay frozen), plus a new gate.

        Example:
            >>> layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
            >>> layer.self_attn = GatedMultiheadAttention.from_torch(layer.self_attn, gate="identity")
        """
        if isinstance(attention, cls):
            gate = None if attention.attn_gate is None else str(attention.attn_gate.spec)
            raise SpecError(f"this attention has been swapped already, gate={gate}; swap stock modules once")
        like = attention.out_proj.weight
        module = cls(
            attention.embed_dim, attention.num_heads, attention.dropout, attention.in_proj_bias is not None,
            attention.bias_k is not None, attention.add_zero_attn, attention.kdim, attention.vdim, attention.batch_first,
            "meta", like.dtype, gate=None, impl=impl,
        )  # fmt: skip
        trained = {name: parameter.requires_grad for name, parameter in attention.named_parameters()}
        module.load_state_dict(attention.state_dict(keep_vars=True), assign=True)
        for name, requires_grad in trained.items():  # assigning makes them all trainable, the stock module's too
            module.get_parameter(name).requires_grad_(requires_grad)
        module.attn_gate = module._make_gate(as_spec(gate), device=like.device, dtype=like.dtype)
        return module.train(attention.training)

    def _make_gate(self, spec: GateSpec | None, **kind: Any) -> Gate | None:
        if spec is None:
            return None
        if spec.source == "latent":
            raise SpecError(
                f"'source=latent' in {str(spec)!r}: this module has no latent query; use source=hidden or source=query"
            )
        width = {"key": self.kdim, "value": self.vdim}.get(spec.position, self.embed_dim)
        return Gate(spec, width, self.num_heads, head_dim=self.head_dim, **kind)

    def _reset_parameters(self) -> None:
        """What torch.nn.MultiheadAttention draws, in its order, so that one seed gives both the same weights."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, softmax weights or None), in the layouts of torch.nn.MultiheadAttention.forward.

        Args:
            query, key, value: (B, T, D), (B, S, kdim), (B, S, vdim) with batch_first, (T, B, D) and so on without, (T, D)
                and so on for one sample; or nested tensors.
            key_padding_mask: (B, S), or (S,) for one sample; bool, True where a key is hidden, or float, added to the scores.
            need_weights: also return the weights, (B, T, S) averaged over heads or (B, H, T, S); S counts appended keys.
            attn_mask: (T, S) or (B*H, T, S), bool, True where attention is not allowed, or float, added to the scores.
            average_attn_weights: average over heads; done head by head, so that (B, H, T, S) never stands in memory.
            is_causal: queries see no later key, whatever attn_mask says.
        """
        if query.is_nested:
            return self._forward_nested(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        single = query.dim() == 2
        self._check_inputs(query, key, value)
        q_BTD, k_BSD, v_BSD = self._to_batch_first(query, key, value, single)
        if single and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        # SDPA's own causal mask is free, but serves only queries and keys of one length; other calls get a dense one.
        causal = is_causal and attn_mask is None and query is key and not self._appended
        mask = self._mask(
            key_padding_mask, attn_mask, is_causal and not causal, (q_BTD.shape[0], q_BTD.shape[1], k_BSD.shape[1])
        )

        q_BTHE, k_BSHE, v_BSHE = self._append(*self._project(q_BTD, k_BSD, v_BSD))
        out_BTD = self._attend(q_BTD, q_BTHE, k_BSHE, v_BSHE, mask, causal)
        weights = self._weights(q_BTHE, k_BSHE, mask, causal, average_attn_weights) if need_weights else None
        if single:
            return out_BTD[0], (None if weights is None else weights[0])
        return (out_BTD if self.batch_first else out_BTD.transpose(0, 1)), weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, need_weights: bool,
        attn_mask: Tensor | None, average_attn_weights: bool, is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Nested tensors, as padded ones with a mask. torch.nn.TransformerEncoder makes them from `src_key_padding_mask`."""
        if not (
            self.batch_first and key.is_nested and value.is_nested and key_padding_mask is None and attn_mask is None
        ):
            raise ShapeError(
                "nested tensors carry their own lengths: pass all of query, key and value nested, batch_first=True and no masks"
            )
        lengths_of = [[sample.shape[0] for sample in x.unbind()] for x in (key, value)]
        if lengths_of[0] != lengths_of[1]:
            raise ShapeError(f"nested keys have lengths {lengths_of[0]} and values {lengths_of[1]}; they come in pairs")
        lengths = [sample.shape[0] for sample in key.unbind()]
        # By identity, so that what was one tensor stays one and self-attention is still seen as such.
        padded = {id(x): torch.nested.to_padded_tensor(x, 0.0) for x in (query, key, value)}
        q_BTD, k_BSD, v_BSD = (padded[id(x)] for x in (query, key, value))
        hidden_BS = (
            torch.arange(k_BSD.shape[1], device=query.device) >= torch.tensor(lengths, device=query.device)[:, None]
        )
        out_BTD, weights = self.forward(
            q_BTD, k_BSD, v_BSD, hidden_BS, need_weights, None, average_attn_weights, is_causal
        )
        rows = [out_TD[: sample.shape[0]] for out_TD, sample in zip(out_BTD, query.unbind(), strict=True)]
        if query.layout == torch.jagged:  # with the query's own offsets, so that a residual can be added
            return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets=query.offsets()), weights  # type: ignore[attr-defined]
        return torch.nested.as_nested_tensor(rows, layout=query.layout), weights

    def _to_batch_first(self, query: Tensor, key: Tensor, value: Tensor, single: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(B, tokens, width) each; inputs that were one tensor stay one, so that self-attention is seen as such."""

        def turn(x: Tensor) -> Tensor:
            return x[None] if single else x if self.batch_first else x.transpose(0, 1)

        q_BTD = turn(query)
        k_BSD = q_BTD if key is query else turn(key)
        return q_BTD, k_BSD, (k_BSD if value is key else turn(value))

    def _project(self, q_BTD: Tensor, k_BSD: Tensor, v_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values per head, with the gates that act on one of them applied."""
        if self.in_proj_weight is not None and q_BTD is k_BSD and k_BSD is v_BSD:
            q, k, v = F.linear(q_BTD, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
            biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            inputs = zip((q_BTD, k_BSD, v_BSD), weights, biases, strict=True)
            q, k, v = (F.linear(x, weight, bias) for x, weight, bias in inputs)  # type: ignore[arg-type]
        q_BTHE, k_BSHE, v_BSHE = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in (q, k, v))
        gate = self.attn_gate
        if gate is not None and gate.spec.position == "query":
            q_BTHE = gate.modulate(q_BTHE, q_BTHE if gate.spec.source == "query" else q_BTD)
        elif gate is not None and gate.spec.position == "key":
            k_BSHE = gate.modulate(k_BSHE, k_BSD)
        elif gate is not None and gate.spec.position == "value":
            v_BSHE = gate.modulate(v_BSHE, v_BSD)
        return q_BTHE, k_BSHE, v_BSHE

    @property
    def _appended(self) -> int:
        """How many keys `add_bias_kv` and `add_zero_attn` append."""
        return int(self.bias_k is not None) + int(self.add_zero_attn)

    def _append(self, q_BTHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The learned key and value, then the zero key and value, behind the given ones."""
        B, _, H, E = k_BSHE.shape
        keys, values = [k_BSHE], [v_BSHE]
        if self.bias_k is not None and self.bias_v is not None:
            keys.append(self.bias_k.view(1, 1, H, E).to(k_BSHE.dtype).expand(B, 1, H, E))
            values.append(self.bias_v.view(1, 1, H, E).to(v_BSHE.dtype).expand(B, 1, H, E))
        if self.add_zero_attn:
            keys.append(k_BSHE.new_zeros(B, 1, H, E))
            values.append(v_BSHE.new_zeros(B, 1, H, E))
        return (q_BTHE, torch.cat(keys, 1), torch.cat(values, 1)) if self._appended else (q_BTHE, k_BSHE, v_BSHE)

    def _attend(
        self, q_BTD: Tensor, q_BTHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        gate, values, fill = self.attn_gate, None, None
        spec = None if gate is None else gate.spec
        if gate is not None and gate.spec.position in ("output", "weights"):
            values, fill = self._gate_values(gate, q_BTD, q_BTHE, k_BSHE), gate.fill_HE
        added = values if spec is not None and spec.op == "add" else None
        out_BTHE = gated_attention(
            q_BTHE, k_BSHE, v_BSHE, None if added is not None else values, causal=causal, mask=mask, fill=fill, impl=self.impl,
            dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        if isinstance(added, Tensor):
            out_BTHE = apply_gate(out_BTHE, added, op="add")
        out_BTD = self.out_proj(out_BTHE.flatten(2))
        if gate is not None and gate.spec.position == "dense":
            out_BTD = gate.modulate(out_BTD[:, :, None], q_BTD)[:, :, 0]
        return out_BTD

    @staticmethod
    def _gate_values(gate: Gate, q_BTD: Tensor, q_BTHE: Tensor, k_BSHE: Tensor) -> GateInput:
        if gate.spec.width == "pairwise":
            return gate(q_BTHE, k_BSHE)
        return gate(q_BTHE if gate.spec.source == "query" else q_BTD)

    def _weights(self, q_BTHE: Tensor, k_BSHE: Tensor, mask: Tensor | None, causal: bool, average: bool) -> Tensor:
        """Softmax weights, (B, T, S) averaged over heads or (B, H, T, S)."""

        def weights(heads: slice) -> Tensor:
            q, k = q_BTHE[:, :, heads], k_BSHE[:, :, heads]
            part = mask[:, heads] if mask is not None and mask.shape[1] > 1 else mask
            return softmax_weights(make_call(q, k, k, causal=causal, mask=part))[0]

        if not average:
            return weights(slice(None))
        total_BTS = weights(slice(0, 1))[:, 0]
        for head in range(1, self.num_heads):
            total_BTS = total_BTS + weights(slice(head, head + 1))[:, 0]
        return total_BTS / self.num_heads

    def _mask(
        self, padding_BS: Tensor | None, attn_mask: Tensor | None, causal: bool, shape_BTS: tuple[int, int, int]
    ) -> Tensor | None:
        """One mask for `gated_attention`, broadcastable to (B, H, T, S + appended), from torch's two and causality."""
        B, T, S = shape_BTS
        masks: list[Tensor] = []
        if padding_BS is not None:
            self._check_mask("key_padding_mask", padding_BS, {2: (B, S)})
            masks.append(_attend_polarity(padding_BS)[:, None, None, :])
        if attn_mask is not None:
            self._check_mask("attn_mask", attn_mask, {2: (T, S), 3: (B * self.num_heads, T, S)})
            sizes = (1, 1, T, S) if attn_mask.dim() == 2 else (B, self.num_heads, T, S)
            masks.append(_attend_polarity(attn_mask).reshape(sizes))
        if causal:
            device = self.out_proj.weight.device if not masks else masks[0].device
            masks.append((torch.arange(S, device=device) <= torch.arange(T, device=device)[:, None])[None, None])
        if not masks:
            return None
        mask = masks[0]
        for other in masks[1:]:
            mask = _both(mask, other)
        return F.pad(mask, (0, self._appended), value=float(mask.dtype == torch.bool)) if self._appended else mask

    @staticmethod
    def _check_mask(name: str, mask: Tensor, shapes: dict[int, tuple[int, ...]]) -> None:
        if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            raise ShapeError(
                f"{name} is {mask.dtype}: pass bool, True where attention is not allowed, or float, added to the scores"
            )
        if tuple(mask.shape) != shapes.get(mask.dim()):
            raise ShapeError(
                f"{name} has shape {tuple(mask.shape)}; these inputs need {' or '.join(map(str, shapes.values()))}"
            )

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        inputs = (query, key, value)
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ShapeError(f"{_shapes(*inputs)}: pass three dimensions each, or two each for a single sample")
        widths = (self.embed_dim, self.kdim, self.vdim)
        for name, x, width in zip(("query", "key", "value"), inputs, widths, strict=True):
            if x.shape[-1] != width:
                raise ShapeError(
                    f"{_shapes(*inputs)}: {name} is {x.shape[-1]} wide and this module was built for {width}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(f"{_shapes(*inputs)}: keys and values come in pairs, so all but their widths must agree")
        axis = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[axis] != key.shape[axis]:
            raise ShapeError(
                f"{_shapes(*inputs)}: batch sizes differ; with batch_first={self.batch_first} the batch is dimension {axis}"
            )


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _attend_polarity(mask: Tensor) -> Tensor:
    """torch.nn.MultiheadAttention's bool masks are True where attention is *not* allowed: turned round, here and nowhere else.

    Float masks are added to the scores in both worlds; what hides a key becomes -inf before masks of different dtypes meet.
    """
    if mask.dtype == torch.bool:
        return ~mask
    return mask.masked_fill(hides(mask), -math.inf)


def _both(a: Tensor, b: Tensor) -> Tensor:
    """The mask that hides what either hides and adds what either adds."""
    if a.dtype == torch.bool and b.dtype == torch.bool:
        return a & b
    if b.dtype == torch.bool:
        a, b = b, a
    if a.dtype == torch.bool:
        return b.masked_fill(~a, -math.inf)
    return a + b
