"""Modules with gates in them: attention, its drop-in for torch's, transformer layers, rotary positions, the KV cache."""

from gated_attn.nn.attention import GatedAttention
from gated_attn.nn.block import GatedTransformerBlock, SwiGLU
from gated_attn.nn.cache import KVCache
from gated_attn.nn.layers import GatedDecoderLayer, GatedEncoderLayer, GatedTransformer
from gated_attn.nn.multihead import GatedMultiheadAttention
from gated_attn.nn.rope import Rope

__all__ = [
    "GatedAttention",
    "GatedDecoderLayer",
    "GatedEncoderLayer",
    "GatedMultiheadAttention",
    "GatedTransformer",
    "GatedTransformerBlock",
    "KVCache",
    "Rope",
    "SwiGLU",
]
