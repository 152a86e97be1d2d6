"""Gates in models of plain `torch.nn` and of timm: every `nn.MultiheadAttention`, and timm's `Attention` and `EvaAttention`.

`nn.MultiheadAttention` has no place for a gate, so a module of ours with the same parameters takes its place. timm's modules
change class, as in `attach`; their own forward runs, and sees one of its children with the gate around it.

Shapes: B batch, T tokens, D model width, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_attn.errors import UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf import families
from gated_attn.hf.attach import make_gate
from gated_attn.hf.families import Family, Found, Part
from gated_attn.hf.native import row_of
from gated_attn.hf.swap import Swapped, check_swappable, swap
from gated_attn.hf.wiring import GATE
from gated_attn.nn.multihead import GatedMultiheadAttention
from gated_attn.spec import GateSpec

CROSS = ("multihead_attn", "cross_attn", "cross_attention", "crossattention", "encoder_attn")
"""Names of modules that attend to a memory; `multihead_attn` is that of nn.TransformerDecoderLayer."""

TORCH = Family(
    "torch.nn", ("MultiheadAttention",), heads="num_heads", kv_heads="num_heads", q=Part("in_proj", "qkv"),
    k=Part("in_proj", "qkv"), v=Part("in_proj", "qkv"), out="out_proj", cross=CROSS,
)  # fmt: skip
_TIMM: dict[str, Any] = {
    "heads": "num_heads", "q": Part("qkv", "qkv"), "k": Part("qkv", "qkv"), "v": Part("qkv", "qkv"), "out": "proj",
    "norm": "heads first",
}  # fmt: skip
TIMM = (
    Family("timm", ("Attention", "EvaAttention"), kv_heads="num_heads", **_TIMM),
    Family("timm rope", ("AttentionRope",), kv_heads="num_kv_heads", **_TIMM),
)
ROWS = (TORCH, *TIMM)
TIMM_FILES = ("timm.layers.attention", "timm.models.vision_transformer", "timm.models.eva")
"""Where timm's three classes live; other files of timm have other classes of the same names."""


class AttachedMultiheadAttention(GatedMultiheadAttention):
    """The module that stands where an nn.MultiheadAttention stood; `detach` puts one back."""


class GatedTimm(Swapped):
    """A timm attention module whose own forward runs with the gate around one of its children."""

    def forward(self, x_BTD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        reached: list[str] = []
        place, gated = _gated_child(self, getattr(self, GATE), x_BTD)

        def child(y: Tensor) -> Tensor:
            reached.append(place)
            return gated(y)

        shown: dict[str, Any] = {place: child}
        if place == "qkv" and getattr(self, "q_bias", None) is not None:
            shown["q_bias"] = None  # EVA then calls qkv, and `_qkv` adds the biases
        out_BTD = self.gated_base.forward(Shown(self, shown), x_BTD, *args, **kwargs)
        if not reached:
            raise UnsupportedError(
                f"the gate was not applied: this version's {self.gated_base.__name__}.forward does not call its {place}"
            )
        return out_BTD


class Shown:
    """A module as its own forward sees it during one call: its attributes, and other things in place of a few of them."""

    def __init__(self, module: Any, instead: Mapping[str, Any]) -> None:
        self.__dict__.update(instead)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _gated_child(module: Any, gate: Gate, x_BTD: Tensor) -> tuple[str, Callable[[Tensor], Tensor]]:
    """(name of the child that the gate goes around, what is called in its place)."""
    E, position = module.head_dim, gate.spec.position

    def heads(y: Tensor) -> Tensor:
        return gate.modulate(y.unflatten(-1, (-1, E)), x_BTD).flatten(-2)

    def norm(y_BHTE: Tensor) -> Tensor:
        y_BTHE = getattr(module, f"{position[0]}_norm")(y_BHTE).transpose(1, 2)
        return gate.modulate(y_BTHE, y_BTHE if gate.spec.source == "query" else x_BTD).transpose(1, 2)

    def fused(x: Tensor) -> Tensor:
        q, k, v = _qkv(module, x).chunk(3, -1)
        return torch.cat([q, k, heads(v)], -1)

    if position == "dense":
        return "proj", lambda y: gate.modulate(module.proj(y)[:, :, None], x_BTD)[:, :, 0]
    if position in ("query", "key"):
        return f"{position[0]}_norm", norm
    if position == "value":
        if getattr(module, "qkv", None) is not None:
            return "qkv", fused
        return "v_proj", lambda x: heads(module.v_proj(x))
    return "proj", lambda y: module.proj(heads(y))


def _qkv(module: Any, x: Tensor) -> Tensor:
    """What the module's forward makes of its fused projection; EVA has biases for queries and values beside it."""
    if getattr(module, "q_bias", None) is None:
        return module.qkv(x)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    if not module.qkv_bias_separate:
        return F.linear(x, module.qkv.weight, bias)
    rows = module.qkv(x)
    rows += bias  # in its dtype, as EVA does under autocast
    return rows


def family_of(module: nn.Module) -> Family | None:
    """The row of a module that is gated as it is here, or None."""
    if isinstance(module, (nn.MultiheadAttention, AttachedMultiheadAttention)):
        return TORCH
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__ in TIMM_FILES}
    return next((row for row in TIMM if not names.isdisjoint(row.classes)), None)


def reads_a_memory(module: nn.Module, family: Family) -> bool:
    """Whether keys or values are of another width than queries, so that they come from elsewhere."""
    sizes: Any = module
    return family is TORCH and {sizes.kdim, sizes.vdim} != {sizes.embed_dim}


def attach_wanted(model: nn.Module, wanted: list[tuple[Found, GateSpec]]) -> nn.Module:
    """Put gates into these modules, all of them or, with an error, none.

    Parameters are shared, not copied, and keep their names; frozen ones stay frozen. With `init=identity` timm's outputs stay
    as they were, bit for bit; those of `nn.MultiheadAttention`, which has several paths of its own, to rounding.
    """
    reasons = {row.name or type(row.module).__name__: why for row, own in wanted if (why := _why_not(row, own))}
    if reasons:
        raise UnsupportedError(f"{len(reasons)} of {len(wanted)} attention modules cannot have this gate", reasons)
    made = [(row.module, _make(model, row, own)) for row, own in wanted]  # all of them, before the first is touched
    for module, part in made:
        if isinstance(part, Gate):
            check_swappable(module)
    replaced: dict[nn.Module, nn.Module] = {}
    for module, part in made:
        if isinstance(part, Gate):
            swap(module, GatedTimm)
            module.add_module(GATE, part.train(model.training))
        else:
            replaced[module] = _carry(module, part)
    _replace(model, replaced)
    return model


def detach(model: nn.Module) -> nn.Module:
    """Put an nn.MultiheadAttention with the same parameters back in every place where `attach` put a gated one.

    timm's modules get their class back from `hf.attach.detach`.
    """
    _replace(model, {m: _stock(m) for m in model.modules() if isinstance(m, AttachedMultiheadAttention)})
    return model


@contextmanager
def projected_to(module: Any, letter: str, fill_HE: Tensor | None) -> Iterator[None]:
    """Meanwhile queries, keys or values (`q`, `k`, `v`) of a module are zero, or the fill, before its gate: by its own weights.

    UnsupportedError for a fill where the projection has no bias that could be it.
    """
    kept: list[tuple[Tensor, Tensor]] = []

    def put(part: Tensor | None, value: Tensor | float) -> None:
        if part is not None:
            kept.append((part, part.clone()))
            part.copy_(torch.as_tensor(value, dtype=part.dtype, device=part.device).expand_as(part))

    weight, bias = _rows_of(module, letter)
    norm: Any = getattr(module, f"{letter}_norm", None)
    if getattr(norm, "weight", None) is not None:
        weight, bias = norm.weight, getattr(norm, "bias", None)  # E channels, which all heads share
    if fill_HE is not None and (bias is None or bias.numel() != fill_HE.numel()):
        raise UnsupportedError(
            f"a shut {letter} gate with a fill cannot be told in this {type(module).__name__}: its projection has no bias of "
            "its own"
        )
    try:
        with torch.no_grad():
            put(weight, 0.0)
            put(bias, 0.0 if fill_HE is None else fill_HE.flatten())
        yield
    finally:
        with torch.no_grad():
            for part, before in kept:
                part.copy_(before)


def _rows_of(module: Any, letter: str) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of one of queries, keys and values, as views."""
    at = "qkv".index(letter)
    if isinstance(module, GatedMultiheadAttention):
        own = getattr(module, f"{letter}_proj_weight")
        weight = own if module.in_proj_weight is None else module.in_proj_weight.data.chunk(3)[at]
        return weight.data, None if module.in_proj_bias is None else module.in_proj_bias.data.chunk(3)[at]
    if getattr(module, "qkv", None) is None:
        layer = getattr(module, f"{letter}_proj")
        return layer.weight.data, None if layer.bias is None else layer.bias.data
    beside = getattr(module, f"{letter}_bias", None)  # EVA's
    bias = module.qkv.bias
    return module.qkv.weight.data.chunk(3)[
        at
    ], beside.data if beside is not None else None if bias is None else bias.data.chunk(3)[at]


def _replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put new modules in the places of old ones, in all places of each."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in new:
                setattr(parent, name, new[child])


def _make(model: nn.Module, row: Found, spec: GateSpec) -> Gate | AttachedMultiheadAttention:
    if isinstance(row.module, nn.MultiheadAttention):
        return AttachedMultiheadAttention.from_torch(row.module, spec)  # type: ignore[return-value]
    return make_gate(
        model,
        row,
        spec,
        width(row, spec.position),
        families.sizes(row.module, row.family),
        row.module.get_submodule("proj"),
    )


def width(row: Found, position: str) -> int:
    """Width D of what a gate at this position reads: the module's input, or what its keys or values are made of."""
    module: Any = row.module
    if row.family is TORCH:
        return {"key": module.kdim, "value": module.vdim}.get(position, module.embed_dim)
    return families.in_features(module.q_proj if getattr(module, "qkv", None) is None else module.qkv)


def _stock(module: AttachedMultiheadAttention) -> nn.Module:
    """The stock module with this one's parameters."""
    stock = nn.MultiheadAttention(
        module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None, module.bias_k is not None,
        module.add_zero_attn, module.kdim, module.vdim, module.batch_first, "meta",
    )  # fmt: skip
    for name in stock._parameters:
        stock._parameters[name] = module._parameters[name]
    return _carry(module, stock).train(module.training)


def _carry(old: nn.Module, new: nn.Module) -> nn.Module:
    """Give `new` the old module's out projection, its hooks, whose handles still remove them, and attributes set by others."""
    new.add_module("out_proj", old.get_submodule("out_proj"))
    own = {*vars(new), *STOCK} - {key for key in vars(new) if "hook" in key}
    new.__dict__.update({key: value for key, value in vars(old).items() if key not in own})
    return new


STOCK = ("_qkv_same_embed_dim", "fused_in_proj", "impl")
"""Attributes that only one of the two modules has, and that mean something else in the other."""


def _why_not(row: Found, spec: GateSpec) -> str | None:
    """Why this module cannot have this gate, or None."""
    module: Any = row.module
    if isinstance(gate := getattr(module, GATE, None), Gate):
        return f"it is gated already, {gate.spec}; detach(model) first, or name all gates in one attach"
    if spec.source == "latent":
        return f"gate {spec} reads a compressed query, and {row.family.name} attention has none"
    if row.family is TORCH:
        extra = sorted({*module._modules, *module._buffers} - {"out_proj"})
        if not row.name:
            return "it is the model itself, so nothing can take its place; use GatedMultiheadAttention.from_torch(model, spec)"
        if type(module) is not nn.MultiheadAttention:
            return f"{type(module).__qualname__} is a class of its own, which nn.MultiheadAttention's gated form cannot stand for"
        if "forward" in vars(module):
            return "its forward was replaced on the instance, so a gated module in its place would lose that; attach before it"
        if extra or not isinstance(module.out_proj, nn.Linear):
            return f"it was changed since it was built ({', '.join(extra) or type(module.out_proj).__name__}); attach before that"
        return None
    if row_of(module) is not None:
        return "it has a gate of its own, which native_gates(model) shows; build the model without it"
    if spec.source == "lse" or spec.width == "pairwise" or (spec.source == "query" and spec.position != "query"):
        return f"gate {spec} is read from queries or scores inside timm's forward, which does not show them; use source=hidden"
    if spec.position == "dense" and module.proj.out_features != (dim := width(row, spec.position)):
        return f"a dense gate is {dim} wide and this module's output {module.proj.out_features}"
    return None
