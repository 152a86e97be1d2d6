"""Modules with gates in them: attention, its drop-in for torch's, transformer layers, rotary positions and the KV cache."""

from gated_attn.nn.attention import GatedAttention
from gated_attn.nn.block import GatedTransformerBlock, SwiGLU
from gated_attn.nn.cache import KVCache
from gated_attn.nn.rope import Rope

__all__ = ["GatedAttention", "GatedTransformerBlock", "KVCache", "Rope", "SwiGLU"]
