"""Gated attention for PyTorch: add the gate to a transformer, train it, prove what it does."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gated_attn.attention import explain as explain
    from gated_attn.attention import gated_attention as gated_attention
    from gated_attn.errors import GatedAttnError as GatedAttnError
    from gated_attn.gate import Gate as Gate
    from gated_attn.hf.attach import attach as attach
    from gated_attn.hf.attach import detach as detach
    from gated_attn.hf.verify import verify as verify
    from gated_attn.nn.attention import GatedAttention as GatedAttention
    from gated_attn.nn.multihead import GatedMultiheadAttention as GatedMultiheadAttention
    from gated_attn.spec import GateSpec as GateSpec

_HOMES = {
    "Gate": "gated_attn.gate",
    "GateSpec": "gated_attn.spec",
    "GatedAttention": "gated_attn.nn.attention",
    "GatedAttnError": "gated_attn.errors",
    "GatedMultiheadAttention": "gated_attn.nn.multihead",
    "attach": "gated_attn.hf.attach",
    "detach": "gated_attn.hf.attach",
    "explain": "gated_attn.attention",
    "gated_attention": "gated_attn.attention",
    "verify": "gated_attn.hf.verify",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that `import gated_attn` itself stays free of torch."""
    if name == "__version__":
        return import_module("importlib.metadata").version("gated-attn")
    if name not in _HOMES:
        raise AttributeError(f"module 'gated_attn' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
