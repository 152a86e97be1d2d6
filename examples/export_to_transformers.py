"""Export a gated decoder of this package as a folder that stock transformers loads.

python examples/export_to_transformers.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from gated_attn.hf.export import export
from gated_attn.models import Decoder
from gated_attn.models.decoder import DecoderConfig


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=97,
        dim=48,
        layers=2,
        heads=4,
        kv_heads=2,
        ffn_dim=96,
        qk_norm=True,
        gate="output:elementwise:sigmoid",
    )
    model = Decoder(config).eval()
    ids = torch.randint(97, (1, 12))
    with tempfile.TemporaryDirectory() as folder:
        report = export(model, Path(folder) / "exported")  # checks logits and greedy tokens itself
        stock = AutoModelForCausalLM.from_pretrained(report.folder)
        print(
            f"{type(stock).__name__}, its gates inside q_proj: {tuple(stock.model.layers[0].self_attn.q_proj.weight.shape)}"
        )
        print(f"largest difference of the logits {(stock(ids).logits - model(ids).logits).abs().max():.0e}")


if __name__ == "__main__":
    main()
