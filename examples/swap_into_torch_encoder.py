"""Give every layer of a torch.nn.TransformerEncoder a gate, keeping its trained weights.

python examples/swap_into_torch_encoder.py
"""

from __future__ import annotations

import torch
from torch import nn

from gated_attn import GatedMultiheadAttention


def main() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(d_model=32, nhead=4, dim_feedforward=64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 7, 32)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])  # True at padding, as torch has it
    with torch.no_grad():
        before = encoder(x, src_key_padding_mask=padding)
        for each in encoder.layers:
            each.self_attn = GatedMultiheadAttention.from_torch(each.self_attn, gate="identity")
        after = encoder(x, src_key_padding_mask=padding)
        real = ~padding
        print(f"identity gates changed the output by {(after - before)[real].abs().max():.0e}")
        for each in encoder.layers:
            each.self_attn.attn_gate.proj.weight.normal_(std=1.0)
        print(f"awake gates changed it by {(encoder(x, src_key_padding_mask=padding) - before)[real].abs().max():.1f}")
    gates = sum(p.numel() for n, p in encoder.named_parameters() if "attn_gate" in n)
    print(f"{gates} gate parameters, in {', '.join(n for n, _ in encoder.named_parameters() if 'attn_gate' in n)}")


if __name__ == "__main__":
    main()
