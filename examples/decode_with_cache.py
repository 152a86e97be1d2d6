"""A gate on the output needs nothing from the KV cache: prefill, then single steps, equal one pass over everything.

python examples/decode_with_cache.py
"""

from __future__ import annotations

import torch

from gated_attn import GatedAttention
from gated_attn.nn import KVCache, Rope


def main() -> None:
    torch.manual_seed(0)
    attention = GatedAttention(
        64, 8, kv_heads=2, gate="paper", qk_norm=True, rope=Rope(8), causal=True, window=16
    ).eval()
    x = torch.randn(1, 24, 64)
    with torch.no_grad():
        whole = attention(x)
        out, cache = attention(x[:, :20], cache=KVCache())
        steps = [out]
        for token in range(20, 24):
            out, cache = attention(x[:, token : token + 1], cache=cache)
            steps.append(out)
    print(f"{cache.length} tokens cached, largest difference {(torch.cat(steps, 1) - whole).abs().max():.0e}")


if __name__ == "__main__":
    main()
