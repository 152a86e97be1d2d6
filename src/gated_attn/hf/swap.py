"""Class swaps: a module becomes an instance of a generated subclass of its own class, and back.

The module, its parameters and its names stay; only its behaviour changes. `torch.nn.utils.parametrize` and FSDP2 do the same.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from gated_attn.errors import UnsupportedError


class Swapped:
    """Base of the mixins that `swap` puts before a module's own class; copies and pickles keep the swap."""

    gated_mixin: type[Swapped]
    gated_base: type[nn.Module]
    gated_prefix: ClassVar[str] = "Gated"

    @classmethod
    def gated_space(cls, base: type[nn.Module]) -> dict[str, Any]:
        """Further class attributes of the subclass of `base`."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _remake, (self.gated_mixin, self.gated_base), self.__getstate__()


def _remake(mixin: type[Swapped], base: type[nn.Module]) -> nn.Module:
    cls = swapped(mixin, base)
    return cls.__new__(cls)


def swapped(mixin: type[Swapped], base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `base` that behaves as the mixin says; one per pair."""
    if (mixin, base) not in _MADE:
        space = {"gated_mixin": mixin, "gated_base": base, "__module__": base.__module__, "__doc__": base.__doc__}
        space |= mixin.gated_space(base)
        _MADE[mixin, base] = type(f"{mixin.gated_prefix}{base.__name__}", (mixin, base), space)
    return _MADE[mixin, base]


_MADE: dict[tuple[type, type], type[nn.Module]] = {}


def check_swappable(module: nn.Module) -> None:
    """UnsupportedError if the module's forward has been replaced on the instance, where no class is asked."""
    if "forward" in module.__dict__ and "_old_forward" not in module.__dict__:
        raise UnsupportedError(
            f"the forward of this {type(module).__name__} was replaced on the instance, so a gate in its class would be skipped; "
            "attach before patching it"
        )


def swap(module: nn.Module, mixin: type[Swapped]) -> None:
    """Make the module an instance of the swapped class."""
    check_swappable(module)
    module.__class__ = swapped(mixin, type(module))
    _rebind(module)


def check_unswappable(module: nn.Module) -> None:
    """UnsupportedError if something else made a class of the swapped one since."""
    if vars(type(module)).get("gated_base") is None:
        raise UnsupportedError(
            f"{type(module).__name__} was made of a gated module since (by fully_shard or parametrize, say); undo that before "
            "detaching"
        )


def unswap(module: nn.Module) -> None:
    """Give the module its own class back."""
    check_unswappable(module)
    module.__class__ = type(module).gated_base  # type: ignore[attr-defined]
    _rebind(module)


@contextlib.contextmanager
def stock(model: nn.Module) -> Iterator[None]:
    """The model as it was before anything in it was swapped, for a while: without its gates, with the same weights."""
    classes = {module: type(module) for module in model.modules() if isinstance(module, Swapped)}
    for module in classes:
        unswap(module)
    try:
        yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
            _rebind(module)


def _rebind(module: nn.Module) -> None:
    """Accelerate's device hooks keep the bound forward that they call; let it be the class's of now."""
    if "_old_forward" in module.__dict__:
        module._old_forward = types.MethodType(type(module).forward, module)  # type: ignore[assignment]
