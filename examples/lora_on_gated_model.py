"""LoRA on a gated model: adapters on queries and values, the gates trained whole beside them, then all merged.

python examples/lora_on_gated_model.py
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from gated_attn import attach, verify


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=160,
    )
    model = attach(LlamaForCausalLM(config), "output:headwise:2sigmoid,init=identity")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["attn_gate"])
    adapted = get_peft_model(model, lora)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)

    ids = torch.randint(97, (4, 16))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(20):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    adapted.eval()
    with torch.no_grad():
        before = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()
        print(
            f"{trained:,} trained numbers; merging changed the logits by {(merged(input_ids=ids).logits - before).abs().max():.0e}"
        )
        print(verify(merged, {"input_ids": ids}))


if __name__ == "__main__":
    main()
