"""Gates in somebody else's model: `attach`, `detach`, `gates`.

No hook, no value kept on a module between calls, no renamed parameter, no copied forward. The class of each attention module
is swapped for a generated subclass (`swap`), and a gate travels with what it multiplies, as an argument or as more channels.

Shapes: B batch, T tokens, H heads, K key/value heads, E head width, D model width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gated_attn.errors import SpecError, UnsupportedError, suggestion
from gated_attn.gate import Gate
from gated_attn.hf import families, native
from gated_attn.hf.families import Found, Part
from gated_attn.hf.layouts import Sizes
from gated_attn.hf.swap import Swapped, check_swappable, check_unswappable, swap, unswap
from gated_attn.hf.wiring import GATE, OWNER, PLAN, Carrier, Follows, GatedLayer, GatedModule, Plan
from gated_attn.spec import GateSpec, as_spec

NOT_DISPATCHING = {
    "DisentangledSelfAttention": "DeBERTa computes its attention itself, with relative positions in the scores",
    "BloomAttention": "BLOOM computes its attention itself, with ALiBi and its residual inside",
    "FalconAttention": "Falcon calls scaled_dot_product_attention itself",
    "MPNetSelfAttention": "MPNet computes its attention itself",
    "GPTNeoSelfAttention": "GPT-Neo computes its attention itself",
}
"""Attention classes that do not ask transformers for an attention function, so there is no place for a gate's argument."""


def attach(
    model: nn.Module,
    spec: GateSpec | str | Mapping[str, GateSpec | str | None],
    *,
    layers: Iterable[int] | str | None = None,
    names: Iterable[str] | str | None = None,
) -> nn.Module:
    """Put gates into a model, in place, and return it (arXiv:2505.06708).

    Args:
        model: a transformers model whose attention is of a family in `families` (a LoRA model is one too), or else any model
            with `nn.MultiheadAttention` or timm's attention in it (`plain` says what holds there).
        spec: the gate, or one for each kind of attention: `{"self": ..., "cross": ...}`. In cross attention an output or
            query gate reads the query side, a value or key gate the memory.
        layers: numbers of the layers that get one, or text such as `0-3,7`, instead of the spec's own `layers=`.
        names: only modules whose name matches one of these shell patterns, such as `model.decoder.*`. Without it all attention of
            the model must be of known families: none is left out in silence.

    With `init=identity` every output of the model stays as it was, bit for bit. The gate is a child `attn_gate` of the
    attention module. Layers that it multiplies may be replaced by setting them on their parent, as PEFT does.

    Raises:
        SpecError: nothing to gate, gates already there, or a layer that the model has not.
        UnsupportedError: attention that no row serves, or a gate that this family cannot carry, with the reason.

    Example:
        >>> model = attach(AutoModelForCausalLM.from_pretrained(path), "output:headwise:2sigmoid,init=identity")
    """
    if any(isinstance(module, Gate) for module in model.modules()):
        raise SpecError("this model has gates already; detach(model) first, or name all of them in one attach")
    found = list(families.find(model))
    if not found:
        raise UnsupportedError("no attention that a gate can be attached to", why_none(model))
    if names is None:
        _check_all_known(model, found)
    specs = _by_kind(spec, {row.kind for row in found})
    if isinstance(layers, str):
        layers = GateSpec.parse(f"paper,layers={layers}").layers
    names = [names] if isinstance(names, str) else names
    return _attach(model, _selected(found, specs, None if layers is None else sorted(set(layers)), names))


def attach_each(model: nn.Module, specs: Mapping[str, GateSpec | str]) -> nn.Module:
    """`attach` with a spec for each attention module by its name; SpecError if one is not there."""
    if any(isinstance(module, Gate) for module in model.modules()):
        raise SpecError("this model has gates already; detach(model) first")
    found = {row.name: row for row in families.find(model)}
    if missing := [name for name in specs if name not in found]:
        raise SpecError(
            f"no attention module is named {missing[0]!r}; there are {', '.join(list(found)[:6])}"
            + (", ..." if len(found) > 6 else "")
        )
    return _attach(model, [(found[name], GateSpec.parse(spec)) for name, spec in specs.items()])


def _attach(model: nn.Module, wanted: list[tuple[Found, GateSpec]]) -> nn.Module:
    from gated_attn.hf import plain  # whose gates are made here

    if wanted[0][0].family in plain.ROWS:
        return plain.attach_wanted(model, wanted)
    from gated_attn.hf.whole import swap_pretrained  # which attaches, too

    plans = [(row, *_plan(model, row, own)) for row, own in wanted]  # all of them, before the first is touched
    for _, _, changes in plans:
        for change in changes:
            check_swappable(change.module)
    for row, gate, changes in plans:
        gate.train(model.training)
        for change in changes:
            swap(change.module, change.mixin)
            change.module.__dict__[PLAN] = change.plan
            change.module.__dict__[OWNER] = row.module
        row.module.add_module(GATE, gate)
        owner = _owner_of_out(model, row)
        if gate.spec.position == "dense" and not isinstance(owner, Follows):
            swap(owner, Follows)
    swap_pretrained(model)
    return model


def detach(model: nn.Module) -> nn.Module:
    """Take every gate out again: classes, children and state-dict keys are those from before, to the bit."""
    if not any(isinstance(module, Gate) for module in model.modules()):
        raise SpecError("this model has no gates to detach")
    changed = [module for module in model.modules() if isinstance(module, Swapped)]
    for module in changed:  # all of them, before the first is touched
        check_unswappable(module)
    for module in changed:
        unswap(module)
        for kept in (PLAN, OWNER):
            module.__dict__.pop(kept, None)
        module._modules.pop(GATE, None)
    from gated_attn.hf import plain

    return plain.detach(model)


def gates(model: nn.Module) -> dict[str, Any]:
    """Every gate by its name in the model; a module that several layers share is one.

    Attached gates are `Gate` modules; those that the model was made with (Qwen3.5, LFM3, ...) are `NativeGate`s, read-only and by
    the name of the projection that holds them. Both have a `spec` and `logits(x)`, and called with x (B, T, D) give values
    (B, T, H, G).
    """
    return {**attached(model), **native.native_gates(model)}


def attached(model: nn.Module) -> dict[str, Gate]:
    """The gates that are modules of this package; of those that PEFT keeps copies of (`modules_to_save`), the active one."""
    wrappers = [module for module in model.modules() if isinstance(getattr(module, "original_module", None), Gate)]
    copies = {gate for wrapper in wrappers for gate in wrapper.modules() if isinstance(gate, Gate)}
    spare = copies - {active_gate(wrapper) for wrapper in wrappers}
    return {name: gate for name, gate in model.named_modules() if isinstance(gate, Gate) and gate not in spare}


def active_gate(held: nn.Module) -> nn.Module:
    """The gate that runs, of what stands in a gate's place: itself, or in PEFT's wrapper one of its copies or the original."""
    copies: Any = getattr(held, "modules_to_save", None)
    if isinstance(held, Gate) or copies is None:
        return held
    shown: Any = held
    active = [] if shown.disable_adapters else [name for name in shown.active_adapters if name in copies]
    return copies[active[0]] if active else shown.original_module


def _by_kind(spec: GateSpec | str | Mapping[str, Any], kinds: set[str]) -> dict[str, GateSpec]:
    if not isinstance(spec, Mapping):
        one = as_spec(spec)
        if one is None:
            raise SpecError("'none' is no gate to attach; leave the model as it is")
        return dict.fromkeys(kinds, one)
    for kind in spec:
        if kind not in ("self", "cross"):
            raise SpecError(
                f"unknown kind of attention {kind!r}; legal: self, cross{suggestion(kind, ('self', 'cross'))}"
            )
        if kind not in kinds:
            raise SpecError(
                f"a gate for {kind} attention, and this model has {' and '.join(sorted(kinds))} attention only"
            )
    return {kind: one for kind, text in spec.items() if (one := as_spec(text)) is not None}


def _selected(
    found: list[Found], specs: dict[str, GateSpec], layers: list[int] | None, names: Iterable[str] | None
) -> list[tuple[Found, GateSpec]]:
    """The modules that get a gate; SpecError if there are none or a layer asked for is not there."""
    for kind, spec in specs.items():
        there = {row.layer for row in found if row.kind == kind}
        asked = set(spec.layers or () if layers is None else layers)
        if missing := sorted(asked - there):
            raise SpecError(
                f"'layers={missing[0]}': the {kind} attention of this model has layers {min(there)} to {max(there)}"
            )
    patterns = None if names is None else list(names)
    chosen = [
        (row, specs[row.kind])
        for row in found
        if row.kind in specs
        and (specs[row.kind].applies_to(row.layer) if layers is None else row.layer in layers)
        and (patterns is None or any(fnmatchcase(row.name, pattern) for pattern in patterns))
    ]
    if not specs:
        raise SpecError("every kind of attention is given 'none'; there is nothing to attach")
    if layers == []:
        numbers = [row.layer for row in found]
        raise SpecError(f"layers=[] names no layer; this model has layers {min(numbers)} to {max(numbers)}")
    if not chosen:
        raise SpecError(
            f"no attention module is named {' or '.join(patterns or ['[]'])}; there are {', '.join(row.name for row in found[:6])}"
            + (", ..." if len(found) > 6 else "")
        )
    return chosen


class Change(NamedTuple):
    """One module that changes class, and what it does then."""

    module: nn.Module
    mixin: type[Swapped]
    plan: Plan


def _plan(model: nn.Module, row: Found, spec: GateSpec) -> tuple[Gate, list[Change]]:
    """The gate of one attention module, and what changes class for it."""
    family, module = row.family, row.module
    if spec.source == "latent":
        raise UnsupportedError(
            f"{row.name}: gate {spec} reads a compressed query, and {family.name} attention has none"
        )
    if getattr(module, "reorder_and_upcast_attn", False):
        raise UnsupportedError(
            f"{row.name}: with reorder_and_upcast_attn=True its eager attention is a method that takes no gate; load the model "
            "with reorder_and_upcast_attn=False"
        )
    if hasattr(module, "_attn"):
        raise UnsupportedError(
            f"{row.name}: {type(module).__name__} of this release of transformers computes attention itself (`_attn`), so no gate "
            "would reach it; use a newer one"
        )
    size = families.sizes(module, family)
    q_layer = families.read(module, family.q.child)
    dim = families.in_features(q_layer)
    if spec.position in ("output", "weights"):
        return make_gate(model, row, spec, dim, size, q_layer), [Change(module, GatedModule, Plan(inside=True))]
    if spec.position == "dense":
        out, main = out_projection(model, row), size.heads * size.head_dim
        gate = make_gate(model, row, spec, dim, size, out)
        carried = max(gate.n_in, 1)
        behind = Plan(axis="all", main=main, carried=carried, inner=dim, size=dim, channels=dim)
        return gate, [Change(module, GatedModule, Plan(carried=carried)), Change(out, GatedLayer, behind)]
    letter = spec.position[0]
    part: Part = {"q": family.q, "k": family.k, "v": family.v}[letter]
    layer = families.read(module, part.child)
    gate = make_gate(model, row, spec, families.in_features(layer), size, layer)
    norm = getattr(module, family.norms["qk".index(letter)], None) if family.norm and letter != "v" else None
    if norm is None:
        return gate, [Change(module, Follows, Plan(follows=True)), Change(layer, GatedLayer, _rows(part, letter, size))]
    assert family.norm is not None
    groups = size.heads if letter == "q" else size.kv_heads
    width, carried = groups * size.head_dim, max(gate.n_in if spec.source == "hidden" else 0, 1)
    behind = Plan(
        axis=family.norm, main=width if family.norm == "all" else groups, carried=carried, inner=width, size=width,
        channels=size.head_dim,
    )  # fmt: skip
    return gate, [
        Change(module, Follows, Plan(follows=True)),
        Change(layer, Carrier, Plan(carried=carried, channels=size.head_dim)),
        Change(norm, GatedLayer, behind),
    ]


def _rows(part: Part, letter: str, size: Sizes) -> Plan:
    """Where one of q, k, v lies in what its projection gives."""
    heads = {"q": size.heads, "k": size.kv_heads, "v": size.kv_heads}
    if part.layout == "per_head":
        each = [1] * len(part.order)
        outer = size.heads
    else:
        each = [heads[one] for one in part.order or letter]
        outer = 1
    place = (part.order or letter).index(letter)
    before, here, total = sum(each[:place]), each[place], sum(each)
    E = size.head_dim
    return Plan(outer=outer, inner=total * E, start=before * E, size=here * E, channels=E)


def make_gate(model: nn.Module, row: Found, spec: GateSpec, dim: int, size: Sizes, beside: nn.Module) -> Gate:
    """A new gate in the dtype that the model computes in, on the device of the layer beside it, that no loader re-initialises."""
    if any(parameter.numel() == 0 for parameter in row.module.parameters()):
        raise UnsupportedError(
            f"{row.name} has parameters of size 0, whose values another process keeps (ZeRO-3); attach before deepspeed.initialize"
        )
    weight = getattr(beside, "weight", None)
    if not isinstance(weight, Tensor):  # quantised linear layers may have buffers alone
        weight = next(itertools.chain(beside.parameters(), beside.buffers(), model.parameters()))
    dtype = weight.dtype
    if not _computes(dtype):  # quantised: the gate is a plain linear layer in the compute dtype
        dtype = next((p.dtype for p in model.parameters() if _computes(p.dtype)), torch.get_default_dtype())
    # Accelerate's hook brings offloaded weights from the meta device to this one.
    hook = getattr(beside, "_hf_hook", None)
    offloaded = getattr(hook, "execution_device", None) if weight.device.type == "meta" else None
    device = weight.device if offloaded is None else offloaded
    gate = Gate(spec, dim, size.heads, kv_heads=size.kv_heads, head_dim=size.head_dim, device=device, dtype=dtype)
    for thing in [*gate.modules(), *gate.parameters()]:
        setattr(thing, "_is_hf_initialized", True)  # noqa: B010 - transformers' word on modules and tensors alike
    return gate


def _computes(dtype: torch.dtype) -> bool:
    """Whether a linear layer can compute in this dtype: floating point of two bytes or more."""
    return dtype.is_floating_point and dtype.itemsize > 1


def out_projection(model: nn.Module, row: Found) -> nn.Module:
    """The out projection of an attention module, which may be a child of the module's parent."""
    if not row.family.out.startswith("../"):
        return families.read(row.module, row.family.out)
    return families.read(model.get_submodule(row.name.rpartition(".")[0]), row.family.out.removeprefix("../"))


def _owner_of_out(model: nn.Module, row: Found) -> nn.Module:
    """The module that has the out projection as a child."""
    parent = row.family.out.removeprefix("../").rpartition(".")[0]
    if not row.family.out.startswith("../"):
        return row.module
    return families.read(model.get_submodule(row.name.rpartition(".")[0]), parent)


def _check_all_known(model: nn.Module, found: list[Found]) -> None:
    """UnsupportedError for attention beside the known that would be left out without a word."""
    paths = [row.name.split(".") for row in found]
    around = {".".join(words[:depth]) for words in paths for depth in range(len(words) + 1)}
    left = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention")
        and name not in around
        and not any(name.startswith(f"{row.name}.") for row in found)
    }
    if left:
        first = next(iter(left))
        raise UnsupportedError(
            f"{len(found)} attention modules can have a gate, and {len(left)} cannot, such as {first}; to gate some only, say "
            f"which: names=[{found[0].name!r}, ...]",
            why_none(model, set(left.values())),
        )


def why_none(model: nn.Module, only: set[str] | None = None) -> dict[str, str]:
    """A reason for each kind of module that looks like attention, or for these classes."""
    classes = {type(module).__name__ for module in model.modules()}
    found = {name for name in classes if (name in only if only is not None else "attention" in name.lower())}
    rows = ", ".join(family.name for family in families.FAMILIES)
    known = f"not of a known family ({rows}), and neither nn.MultiheadAttention nor timm's Attention, AttentionRope or EvaAttention"
    reasons = {name: NOT_DISPATCHING.get(name, known) for name in sorted(found)}
    for module in model.modules():
        if native.row_of(module) is not None and (only is None or type(module).__name__ in only):
            reasons[type(module).__name__] = "it has a gate of its own, which gated_attn.hf.native_gates(model) shows"
    return reasons
