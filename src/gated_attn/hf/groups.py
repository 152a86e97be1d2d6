"""What tools around a model ask about its gates: parameter groups, the role of every row, LoRA targets.

Everything is read from attention modules and `Gate`s that stand in the model: transformers models with attached or native
gates, the modules of `gated_attn.nn`, and any of them inside peft.

Shapes: H heads, K key/value heads, E head width, D model width, N output channels of a projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.errors import RecipeError, ShapeError, SpecError, UnsupportedError, suggestion
from gated_attn.gate import Gate
from gated_attn.hf import families, layouts, plain
from gated_attn.hf.families import Family, Part
from gated_attn.hf.layouts import Sizes
from gated_attn.hf.native import native_gates, row_of
from gated_attn.nn.attention import GatedAttention
from gated_attn.nn.multihead import GatedMultiheadAttention

LETTERS = {"q": "q", "g": "gate", "k": "k", "v": "v"}
LINEARS = ("proj", "down", "query_proj", "key_proj")
"""Children of a `Gate` that are linear layers."""


@dataclass(frozen=True)
class Rows:
    """Which slices of a parameter's axis belong to which role; together they tile the axis.

    `split(weight)` gives role -> piece, and `join` puts the pieces back, bit for bit.
    """

    axis: int
    slices: Mapping[str, tuple[slice, ...]]

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        axis = self.axis
        return {
            role: torch.cat([tensor.narrow(axis, one.start, one.stop - one.start) for one in slices], axis)
            for role, slices in self.slices.items()
        }

    def join(self, pieces: Mapping[str, Tensor]) -> Tensor:
        """Inverse of `split`; ShapeError where a piece has another size than its role."""
        places: list[tuple[int, Tensor]] = []
        for role, slices in self.slices.items():
            sizes = [one.stop - one.start for one in slices]
            if pieces[role].shape[self.axis] != sum(sizes):
                raise ShapeError(f"{role} is {tuple(pieces[role].shape)}; axis {self.axis} has {sum(sizes)} rows of it")
            places += [(s.start, p) for s, p in zip(slices, pieces[role].split(sizes, self.axis), strict=True)]
        return torch.cat([piece for _, piece in sorted(places, key=lambda place: place[0])], self.axis)


@dataclass(frozen=True)
class Attention:
    """One attention module: its sizes, and parameter -> rows for its projections, by the parameters' names in the model.

    Fields:
        outputs: parameters with an output axis of q, k, v or a native gate.
        out: parameters of the out projection -> their input axis, or None where they have none (bias).
        norms: names of key and query norms' parameters.
        q_layer: name of the module that projects queries; None where it is no module.
        gate_layer: name of a native gate's own module, or None.
    """

    name: str
    sizes: Sizes
    outputs: dict[str, Rows]
    out: dict[str, int | None]
    norms: tuple[str, ...]
    q_layer: str | None
    gate_layer: str | None = None

    def per_head(self, role: str) -> int:
        """How many heads share this role's rows."""
        return self.sizes.kv_heads if role in ("k", "v") else self.sizes.heads


def attentions(model: nn.Module) -> Iterator[Attention]:
    """Every attention module that a row or a class of ours describes, each once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows = {
        row.name: row.family for row in families.find(model) if row.family is not plain.TORCH
    }  # ours serves its gated form
    for name, module in model.named_modules():
        family = rows.get(name) or _family(module)
        if family in plain.TIMM and getattr(module, "qkv", None) is None:
            family = replace(family, q=Part("q_proj"), k=Part("k_proj"), v=Part("v_proj"))
        if isinstance(module, GatedMultiheadAttention):
            yield _multihead(name, module, names)
        elif family is not None:
            yield _attention(model, name, family, names)


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter of every gate by its name, once; LoRA parameters of a gate are the gate's.

    A native gate counts where it is a layer of its own; one fused with the queries is a part of their weight (see `roles`).
    """
    inside = {id(p) for module in model.modules() if isinstance(module, Gate) for p in module.parameters()}
    for native in native_gates(model).values():
        if native.row.layout == "separate":
            inside |= {id(p) for p in native.layer.parameters()}
        if native.row.head_bias:
            inside.add(id(families.read(native.module, native.row.head_bias)))
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in inside}


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    gate_lr_mult: float = 1.0,
    gate_weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Optimizer groups that cover every trainable parameter exactly once, each with a `name`, `lr` and `weight_decay`.

    `gate weights`, `gate vectors` (biases, fills, sink keys; not decayed), `weights` and `vectors` (not decayed), in this
    order, empty ones left out. Which groups there are depends on the model alone, so that another `gate_weight_decay` fits the
    same optimizer checkpoint; loading one brings its own numbers back, see `callbacks.GateDecay`.

    Raises RecipeError for a negative number and where nothing is trainable.

    Example:
        >>> torch.optim.AdamW(param_groups(model, 2e-5, weight_decay=0.1, gate_lr_mult=10))
    """
    given = {
        "lr": lr,
        "weight_decay": weight_decay,
        "gate_lr_mult": gate_lr_mult,
        "gate_weight_decay": gate_weight_decay,
    }
    for word, value in given.items():
        if not value >= 0:
            raise RecipeError(f"{word}={value}: must be at least 0")
    gates = gate_parameters(model)
    found: dict[str, list[nn.Parameter]] = {"gate weights": [], "gate vectors": [], "weights": [], "vectors": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            vector = parameter.dim() < 2 or (name in gates and name.endswith((".fill_HE", ".sink_key")))
            kind = "vectors" if vector else "weights"
            found[f"gate {kind}" if name in gates else kind].append(parameter)
    if not any(found.values()):
        raise RecipeError(f"none of the {sum(1 for _ in model.parameters())} parameters is trainable (requires_grad)")
    return [
        {
            "params": parameters,
            "lr": lr * (gate_lr_mult if name.startswith("gate") else 1.0),
            "weight_decay": {"gate weights": gate_weight_decay, "weights": weight_decay}.get(name, 0.0),
            "name": name,
        }
        for name, parameters in found.items()
        if parameters
    ]


def roles(model: nn.Module) -> dict[str, Rows]:
    """Parameter name -> which of its output rows are `q`, `gate`, `k`, `v`, or all `out` or `gate`.

    Covers the weights and biases of attention projections and gates (and LoRA's B factors of them): whatever an optimizer such
    as Muon must treat role by role. The slices tile the axis, which is 1 for a transposed weight (GPT-2's Conv1D).

    Raises ShapeError for a weight whose shape is not what its module says (a packed, quantised one).

    Example:
        >>> for name, rows in roles(model).items():
        ...     update[name] = rows.join({role: orthogonal(g) for role, g in rows.split(grad[name]).items()})
    """
    found: dict[str, Rows] = {}
    parameters = dict(model.named_parameters())
    for attention in attentions(model):
        for name, rows in attention.outputs.items():
            size = sum(one.stop - one.start for slices in rows.slices.values() for one in slices)
            if parameters[name].shape[rows.axis] != size:
                raise ShapeError(
                    f"{name} is {tuple(parameters[name].shape)}; {attention.sizes.heads} heads, {attention.sizes.kv_heads} KV "
                    f"heads of width {attention.sizes.head_dim} have {size} rows on axis {rows.axis}: is the weight quantised?"
                )
            found[name] = rows
        for name, axis in attention.out.items():
            out_axis = 0 if axis is None else 1 - axis
            found[name] = Rows(out_axis, {"out": (slice(0, parameters[name].shape[out_axis]),)})
    for name, parameter in gate_parameters(model).items():
        found.setdefault(name, Rows(0, {"gate": (slice(0, parameter.shape[0]),)}))
    return found


def lora_targets(model: nn.Module, what: str) -> list[str]:
    """Full module names for `peft.LoraConfig(target_modules=...)`: query projections (`q`), gates' linear layers (`gate`), `both`.

    No name matches an MLP's `gate_proj`, nor does a target `gate_proj` match an attached gate.

    Raises:
        SpecError: another word, or a model without such layers.
        UnsupportedError: queries that share a module with keys, values or the gate, which peft adapts as a whole.
    """
    if what not in ("q", "gate", "both"):
        raise SpecError(f"unknown LoRA target {what!r}; legal: q, gate, both{suggestion(what, ('q', 'gate', 'both'))}")
    base = _inside_peft(model)
    queries, gates, fused = [], [], {}
    for attention in attentions(base):
        shared = sorted({r for rows in attention.outputs.values() if "q" in rows.slices for r in rows.slices} - {"q"})
        if shared == ["gate"] and what == "both" and attention.q_layer is not None:
            gates.append(attention.q_layer)
        elif attention.q_layer is None or shared:
            fused[re.sub(r"\b\d+\b", "*", attention.q_layer or attention.name)] = f"holds q and {', '.join(shared)}"
            continue
        queries.append(attention.q_layer)
        gates += [attention.gate_layer] if attention.gate_layer else []
    for name, module in base.named_modules():
        if isinstance(module, Gate):
            gates += [f"{name}.{child}" for child in LINEARS if isinstance(getattr(module, child, None), nn.Module)]
    in_queries = any("gate" in reason for reason in fused.values())
    if fused and (what != "gate" or (in_queries and not gates)):
        raise UnsupportedError(
            f"peft adapts whole modules, and {what!r} is a part of one here; name the module yourself to adapt all of it",
            fused,
        )
    found = {"q": queries, "gate": gates, "both": queries + gates}[what]
    if not found or (what == "both" and not gates):
        raise SpecError(f"this model has no {'query projection' if what == 'q' else 'gate with a linear layer'}")
    return list(dict.fromkeys(found))


def owner(owners: Mapping[str, Attention], gate: str) -> Attention | None:
    """The attention module that a gate of this name stands in, or None."""
    inside = [name for name in owners if gate.startswith(f"{name}." if name else "")]
    return owners[max(inside, key=len)] if inside else None


def _family(module: nn.Module) -> Family | None:
    """A row for attention that `families` has none for: ours, and transformers' with a gate of its own."""
    if isinstance(module, GatedAttention):
        return Family("own", (), "heads", "kv_heads", out="out_proj", norm="heads")
    native = row_of(module)
    if native is None or native.package != "transformers":
        return None
    q = Part("q_proj", "qg", "per_head") if native.layout == "per_head" else Part("q_proj")
    family = Family(native.name, (), native.heads, head_dim=native.head_dim, q=q, norm="heads")
    parts = {getattr(module, child, None) for child in (family.q.child, family.k.child, family.v.child, family.out)}
    return family if all(isinstance(part, nn.Module) and hasattr(_base(part), "weight") for part in parts) else None


def _attention(model: nn.Module, name: str, family: Family, names: Mapping[int, str]) -> Attention:
    module = model.get_submodule(name)
    native = row_of(module)
    gate = native.layer if native is not None and native.layout == "separate" else ""
    sizes = families.sizes(module, family)
    outputs = _projections(module, family, sizes, names)
    if gate:
        layer = families.read(module, gate)
        outputs |= _outputs(layer, {"gate": (slice(0, next(layer.parameters()).shape[0]),)}, names)
    if native is not None and native.head_bias:
        outputs[names[id(families.read(module, native.head_bias))]] = Rows(0, {"gate": (slice(0, sizes.heads),)})
    root, path = module, family.out
    if path.startswith("../"):
        root, path = model.get_submodule(name.rpartition(".")[0]), path.removeprefix("../")
    out = dict(_inputs(families.read(root, path), names))
    norms = [getattr(module, norm, None) for norm in family.norms] if family.norm else []
    found = [
        names[id(p)] for norm in norms if norm is not None for n, p in norm.named_parameters() if "attn_gate" not in n
    ]
    dot = f"{name}." if name else ""
    return Attention(
        name, sizes, outputs, out, tuple(found), f"{dot}{family.q.child}", f"{dot}{gate}" if gate else None
    )


def _projections(module: nn.Module, family: Family, sizes: Sizes, names: Mapping[int, str]) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    children: dict[str, Part] = {part.child: part for part in (family.v, family.k, family.q)}
    for child, part in children.items():
        letters = part.order or next(word for word in "qkv" if getattr(family, word) == part)
        found |= _outputs(families.read(module, child), _slices(part.layout, letters, sizes), names)
    for letter in "qkv":  # EVA has them beside its fused projection
        bias = getattr(module, f"{letter}_bias", None)
        if isinstance(bias, nn.Parameter):
            found[names[id(bias)]] = Rows(0, _slices("flat", letter, sizes))
    return found


def _multihead(name: str, module: GatedMultiheadAttention, names: Mapping[int, str]) -> Attention:
    sizes = Sizes(module.num_heads, module.num_heads, module.head_dim)
    outputs = {}
    for letters, parameter in (
        ("qkv", module.in_proj_weight), ("qkv", module.in_proj_bias), ("q", module.q_proj_weight), ("k", module.k_proj_weight),
        ("v", module.v_proj_weight),
    ):  # fmt: skip
        if parameter is not None:
            outputs[names[id(parameter)]] = Rows(0, _slices("flat", letters, sizes))
    return Attention(name, sizes, outputs, dict(_inputs(module.out_proj, names)), (), None)


def _slices(layout: str, letters: str, sizes: Sizes) -> dict[str, tuple[slice, ...]]:
    """Role -> its slices, in order of heads, where the letters' rows lie whole after whole or head by head (see `Part`)."""
    unit = "head" if layout == "per_head" else "all"
    spans = layouts.spans(((unit, tuple(LETTERS[one] for one in letters)),), sizes, "elementwise")
    return {role: tuple(layouts.fewest(span.index().tolist())) for role, span in spans.items()}


def _inside_peft(model: Any) -> nn.Module:
    """The model that peft's target names start from."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _base(layer: nn.Module) -> nn.Module:
    while hasattr(layer, "base_layer"):  # peft's layers hold what they adapt
        layer = layer.base_layer  # type: ignore[assignment]
    return layer


def _outputs(
    layer: nn.Module, slices: Mapping[str, tuple[slice, ...]], names: Mapping[int, str]
) -> Iterator[tuple[str, Rows]]:
    """Every parameter of a projection that has its output axis: weight, bias, and the B factors of LoRA."""
    base = _base(layer)
    yield names[id(base.weight)], Rows(1 if hasattr(base, "nx") else 0, slices)
    if base.bias is not None:
        yield names[id(base.bias)], Rows(0, slices)
    for factor in getattr(layer, "lora_B", {}).values():
        yield names[id(factor.weight)], Rows(0, slices)


def _inputs(layer: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, int | None]]:
    """Every parameter of an out projection with its input axis, or None."""
    base = _base(layer)
    yield names[id(base.weight)], 0 if hasattr(base, "nx") else 1
    if base.bias is not None:
        yield names[id(base.bias)], None
