"""A model with heads changed for a while: `scaled` multiplies what a head hands on, `gated_to` puts a value in its gate's place.

    with scaled(model, {("model.layers.3.self_attn", 2): 0.0}):
        model(**batch)  # head 2 of layer 3 is shut

Shapes: B batch, T tokens, H heads, E head width, G gate width.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.errors import SpecError, UnsupportedError, suggestion
from gated_attn.gate import Gate
from gated_attn.hf import families, native
from gated_attn.hf.attach import out_projection
from gated_attn.hf.families import Found
from gated_attn.hf.store import unwrapped
from gated_attn.hf.wiring import GATE
from gated_attn.measure.capture import AGAIN, attention_modules, uncompiled
from gated_attn.measure.seen import Calls

Heads = Mapping[tuple[str, int], float]
"""(name of an attention module, head) -> a number. Of a module that layers share, `name#1` is the second call."""

BORN_OUT = {"neomme": "output_projection.o_proj", "inkling2": "o_proj.linear"}
"""Where models with gates of their own have the out projection, if not at `o_proj`."""


@contextlib.contextmanager
def scaled(model: nn.Module, factors: Heads) -> Iterator[None]:
    """Multiply what these heads hand to the out projection, gated where they have a gate, by a factor each; in this context only.

    That is what an output gate of this value would do, and for a head with an output gate, what the gate times the factor would.
    A factor of 1 leaves every bit as it is; 0 for all heads of a module leaves exactly the out projection's bias. Half precision
    is multiplied in float32 and rounded once.

    Raises:
        UnsupportedError: no attention of a known family.
        SpecError: a module or head that is not there, or a factor that is no finite number.
    """
    inner = unwrapped(model)
    rows = attention_modules(inner)
    wanted = _by_module(rows, factors)
    with contextlib.ExitStack() as undo:
        undo.enter_context(uncompiled(model))
        calls = Calls()
        calls.reset_with(inner, undo)
        for bare, per_call in wanted.items():
            row = rows[bare]
            out = out_of(inner, row)
            undo.callback(out.register_forward_pre_hook(_scale(row, per_call, calls)).remove)
            undo.callback(inner.register_forward_hook(_all_called(bare, per_call, calls, "")).remove)
        yield


def _scale(row: Found, per_call: Mapping[str, Mapping[int, float]], calls: Calls) -> Any:
    H, E = width_of(row)

    def hook(out: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        factors = per_call.get(calls.name(row.name), {})
        factors = {head: factor for head, factor in factors.items() if factor != 1}
        if not factors:
            return None
        x_BTD = args[0]
        wide = x_BTD.dtype if x_BTD.dtype == torch.float64 else torch.float32
        factor_H = torch.tensor([factors.get(head, 1.0) for head in range(H)], dtype=wide, device=x_BTD.device)
        heads = x_BTD[..., : H * E].unflatten(-1, (H, E)).to(wide) * factor_H[:, None]
        heads = heads.masked_fill(factor_H[:, None] == 0, 0.0)  # an infinite output, too
        return torch.cat([heads.to(x_BTD.dtype).flatten(-2), x_BTD[..., H * E :]], -1), *args[1:]

    return hook


@contextlib.contextmanager
def gated_to(model: nn.Module, values: Heads) -> Iterator[None]:
    """Put a value in the place of these heads' attached output gates, for all tokens and channels; in this context only.

    Raises SpecError as `scaled`, and for a module without an attached gate; UnsupportedError for gates that are not one number or
    one per channel of a head's output: scale the head instead.
    """
    inner = unwrapped(model)
    rows = attention_modules(inner)
    wanted = _by_module(rows, values)
    for bare in wanted:
        if reason := why_not_set(rows[bare].module):
            raise UnsupportedError(f"{bare}: {reason}; scale the head instead")
    with contextlib.ExitStack() as undo:
        undo.enter_context(uncompiled(model))
        calls = Calls()
        calls.reset_with(inner, undo)
        for bare, per_call in wanted.items():
            gate = getattr(rows[bare].module, GATE)
            undo.callback(gate.register_forward_hook(_put(rows[bare], per_call, calls)).remove)
            undo.callback(inner.register_forward_hook(_all_called(bare, per_call, calls, "")).remove)
        yield


def _put(row: Found, per_call: Mapping[str, Mapping[int, float]], calls: Calls) -> Any:
    H, _ = width_of(row)

    def hook(gate: Gate, args: Any, gate_BTHG: Tensor) -> Tensor:
        values = per_call.get(calls.name(row.name), {})
        B, T, _, G = gate_BTHG.shape
        if values:  # of a shared gate: for each head its own
            gate_BTHG = gate_BTHG.expand(B, T, H, G).clone()
        for head, value in values.items():
            gate_BTHG[:, :, head] = value
        return gate_BTHG

    return hook


def why_not_set(module: nn.Module) -> str:
    """Why the gate of an attention module cannot be set to a value; empty where it can."""
    gate = getattr(module, GATE, None)
    if not isinstance(gate, Gate):
        return "it has no attached gate"
    if gate.spec.position not in ("output", "weights"):
        return f"gate {gate.spec} is not on the heads' outputs"
    if gate.spec.source == "lse" or gate.spec.width == "pairwise":
        return f"gate {gate.spec} is read from the scores"
    return ""


def out_of(model: nn.Module, row: Found) -> nn.Module:
    """The out projection of an attention module, of a known family or with a gate of its own."""
    if row.family in families.FAMILIES:
        return out_projection(model, row)
    return families.read(row.module, BORN_OUT.get(row.family.name, "o_proj"))


def width_of(row: Found) -> tuple[int, int]:
    """Heads, and channels that each hands to the out projection."""
    if row.family in families.FAMILIES:
        size = families.sizes(row.module, row.family)
        return size.heads, size.head_dim
    born = native.row_of(row.module)
    assert born is not None
    return int(families.read(row.module, born.heads)), int(families.read(row.module, born.head_dim))


def _by_module(rows: Mapping[str, Found], numbers: Heads) -> dict[str, dict[str, dict[int, float]]]:
    """Module -> call -> head -> number; SpecError for what is not there."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for (name, head), number in numbers.items():
        bare = name.partition(AGAIN)[0]
        if bare not in rows:
            raise SpecError(f"no attention module is named {bare!r}{suggestion(bare, rows)}")
        heads, _ = width_of(rows[bare])
        if not 0 <= head < heads:
            raise SpecError(f"{bare} has heads 0 to {heads - 1}, and no head {head}")
        if not abs(number) < float("inf"):
            raise SpecError(f"{name}, head {head}: {number} is no finite number")
        found[bare][name][head] = number
    return found


def _all_called(bare: str, per_call: Mapping[str, Any], calls: Calls, kind: str) -> Any:
    """A hook that raises if a shared module was called less often than a change names."""

    def hook(*_: Any) -> None:
        made = calls.made[kind, bare]
        for name in per_call:
            number = int(name.partition(AGAIN)[2] or 0)
            if made and number >= made:
                raise SpecError(
                    f"{name}: {bare} is called {made} times in one pass, so the last is {bare}{AGAIN}{made - 1}"
                )

    return hook
