"""What the modules of a model with gates do: the classes that `attach` swaps in, and what each keeps.

A gate is handed to the attention function as an argument, or travels with what it multiplies as more channels; no value waits on
a module between calls.

Shapes: B batch, T tokens, H heads, E head width, D model width.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_attn.errors import UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf.swap import Swapped, swap, unswap

try:
    from gated_attn.hf.functions import Handover, register
except ModuleNotFoundError as _error:  # a model of plain torch needs no transformers
    if (_error.name or "").partition(".")[0] != "transformers":
        raise

GATE = "attn_gate"
"""The gate's name as a child of the attention module, whatever it multiplies."""

PLAN, OWNER = "_gate_plan", "_gate_owner"
"""What a swapped module keeps beside its own attributes: numbers, and, not as a child, the attention module that has the gate."""


class ConfigView:
    """A module's configuration in which the attention implementation goes by its gated name; the rest is the config's own."""

    def __init__(self, config: Any) -> None:
        self.__dict__["_shown"] = config

    @property
    def _attn_implementation(self) -> Any:
        return register(self.__dict__["_shown"]._attn_implementation or "eager")

    def __getattr__(self, name: str) -> Any:
        if "_shown" not in self.__dict__:  # an empty one, which copy and pickle make first
            raise AttributeError(name)
        return getattr(self.__dict__["_shown"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_shown"], name, value)


class Follows(Swapped):
    """A module that hands a gated child's gate on to whatever takes the child's place: a LoRA layer, or what it wrapped."""

    _modules: dict[str, nn.Module | None]

    def __setattr__(self, name: str, value: Any) -> None:
        old = self.__dict__.get("_modules", {}).get(name)
        super().__setattr__(name, value)
        if isinstance(old, (GatedLayer, Carrier)) and isinstance(value, nn.Module) and value is not old:
            _move(cast(nn.Module, old), value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if isinstance(self.__dict__.get("_modules", {}).get(name), (GatedLayer, Carrier)):
            setattr(self, name, module)
        else:
            super().add_module(name, module)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan: Plan | None = self.__dict__.get(PLAN)
        if (
            plan is not None
            and plan.follows
            and not any(isinstance(m, (GatedLayer, Carrier)) for m in self._modules.values())
        ):
            raise UnsupportedError(
                f"the layer that the gate of this {self.gated_base.__name__} multiplies was replaced in `_modules`; "
                "set the new one as an attribute, as setattr and set_submodule do"
            )
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class GatedModule(Follows):
    """An attention module with a gate. It asks for the gated form of the attention function that the model is set to."""

    @property
    def config(self) -> Any:
        if "config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no config")
        return ConfigView(self.__dict__["config"])

    @config.setter
    def config(self, value: Any) -> None:
        self.__dict__["config"] = value

    @classmethod
    def gated_space(cls, base: type[nn.Module]) -> dict[str, Any]:
        return {"eager_attention": staticmethod(eager_of(base))}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan: Plan = self.__dict__[PLAN]
        if plan.inside:
            handover = Handover(getattr(self, GATE), _hidden(args, kwargs))
        elif plan.carried:
            handover = Handover(None, (x := _hidden(args, kwargs)), x[..., : plan.carried])
        else:
            handover = Handover(None, _hidden(args, kwargs))
        out = super().forward(*args, attn_gate=handover, **kwargs)
        if not handover.taken:
            raise UnsupportedError(
                f"the gate did not reach the attention function of {self.gated_base.__name__}: this path of its forward does not "
                "call the one that is set; set another attn_implementation"
            )
        return out


@dataclass(frozen=True)
class Plan:
    """What a swapped module does with a gate; static numbers only.

    Fields:
        inside: the gate is handed to the attention function.
        follows: one of the module's own children is gated.
        carried: so many channels of x travel behind the module's own output (0: none).
        outer, inner, start, size: the rows to multiply: the output as (outer, inner) channels, of which `size` from
            `start` on are gated, in heads of `channels`.
        axis: how what is carried to here lies behind the input: `all` (last axis), `heads` (axis -2), `heads first` (axis 1).
        main: how much of that axis is the layer's own input.
    """

    inside: bool = False
    follows: bool = False
    carried: int = 0
    outer: int = 1
    inner: int = 0
    start: int = 0
    size: int = 0
    channels: int = 1
    axis: str = ""
    main: int = 0


class GatedLayer(Swapped):
    """A projection or norm whose output is multiplied by its gate, which reads the layer's input or what travelled with it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plan: Plan = self.__dict__[PLAN]
        source = x
        if plan.axis:
            x, source = _unpack(x, plan)
        y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if plan.axis == "heads first":
            return self._gated(y.transpose(1, 2), source).transpose(1, 2)
        if plan.axis == "heads":
            return self._gated(y, source)
        rows = y.unflatten(-1, (plan.outer, plan.inner))
        before, piece, after = rows.split([plan.start, plan.size, plan.inner - plan.start - plan.size], -1)
        gated = self._gated(piece.flatten(-2).unflatten(-1, (-1, plan.channels)), source)
        gated = gated.flatten(-2).unflatten(-1, (plan.outer, plan.size))
        return torch.cat([before, gated, after], -1).flatten(-2)

    def _gated(self, heads_BTHE: Tensor, source: Tensor) -> Tensor:
        gate: Gate = getattr(self.__dict__[OWNER], GATE)
        return gate.modulate(heads_BTHE, heads_BTHE if gate.spec.source == "query" else source)


class Carrier(Swapped):
    """A projection behind whose output the first channels of its input travel on, to a gate behind the norm that follows."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plan: Plan = self.__dict__[PLAN]
        y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        carried = x[..., : plan.carried].to(y.dtype)
        return torch.cat([y, F.pad(carried, (0, -plan.carried % plan.channels))], -1)


def _unpack(x: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(the layer's own input, the channels that travelled with it)."""
    if plan.axis == "all":
        return x[..., : plan.main].contiguous(), x[..., plan.main : plan.main + plan.carried]
    if plan.axis == "heads":
        return x[..., : plan.main, :].contiguous(), x[..., plan.main :, :].flatten(-2)[..., : plan.carried]
    x = x.transpose(1, 2)
    return x[..., : plan.main, :].contiguous().transpose(1, 2), x[..., plan.main :, :].flatten(-2)[..., : plan.carried]


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def eager_of(base: type) -> Any:
    """The eager attention function of the file that the class comes from."""
    for cls in base.__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    return _no_eager


def _no_eager(module: nn.Module, *_: Any, **__: Any) -> Any:
    raise UnsupportedError(f"{type(module).__name__} has no eager attention; set another attn_implementation")


def _move(old: nn.Module, new: nn.Module) -> None:
    """Make `new`, which takes the place of a gated layer, the gated one."""
    kept = {name: old.__dict__.pop(name) for name in (PLAN, OWNER)}
    mixin = type(old).gated_mixin  # type: ignore[attr-defined]
    unswap(old)
    swap(new, mixin)
    new.__dict__.update(kept)
