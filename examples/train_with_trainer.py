"""Train a small gated Llama with transformers.Trainer; the gates have a learning rate of their own.

python examples/train_with_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gated_attn import attach
from gated_attn.hf import GateMonitor, gates, param_groups
from gated_attn.samples import text


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([row[0] for row in rows])
    return {"input_ids": ids, "labels": ids}


def main(steps: int = 60) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=160
    )  # fmt: skip
    model = attach(LlamaForCausalLM(config), "paper-headwise")
    data = TensorDataset(torch.tensor(list(text("shakespeare").encode()[: 64 * 1024])).view(-1, 64))
    optimizer = torch.optim.AdamW(param_groups(model, 3e-3, weight_decay=0.1, gate_lr_mult=3.0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, logging_steps=steps // 4, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=data, data_collator=collate, optimizers=(optimizer, None),
            callbacks=[GateMonitor(every=steps // 4)],
        )  # fmt: skip
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per byte with {len(gates(model))} gates")


if __name__ == "__main__":
    main()
