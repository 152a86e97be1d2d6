"""Tiny models whose sizes differ from each other, for what tools ask of them: one per way of packing queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from gated_attn.models.decoder import Decoder, DecoderConfig

HEADWISE = "output:headwise,bias=0.3,std=0.9"
ELEMENTWISE = "output:elementwise:2sigmoid,std=0.7"


def llama(**changes: Any) -> nn.Module:
    sizes = {
        "hidden_size": 44, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 10, "vocab_size": 61, "max_position_embeddings": 64,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=44, intermediate_size=37, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
            vocab_size=61, tie_word_embeddings=True,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=44, n_layer=2, n_head=4, vocab_size=61, n_positions=64)
    )


def phi3() -> nn.Module:
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            hidden_size=48, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=61, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=44, d_kv=10, d_ff=37, num_layers=2, num_heads=4, vocab_size=61, decoder_start_token_id=0
        )
    )


def neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            hidden_size=44, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, vocab_size=61
        )
    )


def qwen3_5() -> nn.Module:
    return transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            hidden_size=44, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            vocab_size=61, layer_types=["full_attention", "full_attention"],
        )
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "qwen3": qwen3, "gpt2": gpt2, "phi3": phi3, "t5": t5, "gpt_neox": neox,
}  # fmt: skip

NATIVE: dict[str, Callable[[], nn.Module]] = {
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            hidden_size=44, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            vocab_size=61, layer_types=["linear_attention", "full_attention"], num_experts=0, mlp_only_layers=[0, 1],
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        )
    ),
    "afmoe": lambda: transformers.AfmoeForCausalLM(
        transformers.AfmoeConfig(
            hidden_size=44, intermediate_size=37, moe_intermediate_size=12, num_hidden_layers=2, num_dense_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=61, num_experts=2, num_experts_per_tok=1,
            layer_types=["full_attention", "full_attention"],
        )
    ),
}  # fmt: skip


def ours() -> nn.Module:
    return Decoder(
        DecoderConfig(vocab_size=61, layers=2, heads=4, kv_heads=2, dim=44, ffn_dim=37, head_dim=10, gate=ELEMENTWISE)
    )


def wake(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
