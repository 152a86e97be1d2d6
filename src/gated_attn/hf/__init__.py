"""Gates inside other people's models. Importing it lets the Auto classes of transformers load saved models with gates."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("transformers") is not None:  # models of plain torch, and the checkpoint layouts, do without
    from gated_attn.hf import config as _config  # noqa: F401 - it registers itself

if TYPE_CHECKING:
    from gated_attn.hf.attach import gates as gates
    from gated_attn.hf.callbacks import GateDecay as GateDecay
    from gated_attn.hf.callbacks import GateWarmup as GateWarmup
    from gated_attn.hf.counts import count as count
    from gated_attn.hf.groups import lora_targets as lora_targets
    from gated_attn.hf.groups import param_groups as param_groups
    from gated_attn.hf.groups import roles as roles
    from gated_attn.hf.monitor import GateMonitor as GateMonitor
    from gated_attn.hf.native import native_gates as native_gates
    from gated_attn.hf.sharding import sharding_plan as sharding_plan
    from gated_attn.hf.store import load_gates as load_gates
    from gated_attn.hf.store import save_gates as save_gates
    from gated_attn.hf.whole import load_pretrained as load_pretrained

_HOMES = {
    "attach": ("gates",),
    "callbacks": ("GateDecay", "GateWarmup"),
    "counts": ("count",),
    "groups": ("lora_targets", "param_groups", "roles"),
    "monitor": ("GateMonitor",),
    "native": ("native_gates",),
    "sharding": ("sharding_plan",),
    "store": ("load_gates", "save_gates"),
    "whole": ("load_pretrained",),
}

__all__ = [name for names in _HOMES.values() for name in names]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load a name on first use."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"gated_attn.hf.{home}"), name)
    raise AttributeError(f"module 'gated_attn.hf' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
