"""Tiny models of transformers and gates that are awake, for the tests of this folder and of `laws`.

One configuration per attention family at least, with 1 < KV heads < heads and heads * width other than the model's width where
the family has them.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

from gated_attn.hf.attach import attached

LLM: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29,
    "max_position_embeddings": 64,
}  # fmt: skip
GQA = LLM | {"num_key_value_heads": 2}
WIDE = GQA | {"head_dim": 10}
GPT: dict[str, Any] = {
    "vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29, "image_size": 16, "patch_size": 4,
}  # fmt: skip
SPEECH: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29, "conv_dim": (8, 8),
    "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0,
}  # fmt: skip
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 97, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 29, "decoder_ffn_dim": 29, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
TEXT2TEXT = SEQ2SEQ | {"max_position_embeddings": 64, "forced_eos_token_id": None}
PADS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    """The settings that a configuration with other names for some of them takes."""
    return {name: value for name, value in settings.items() if name not in names}


class Tiny(NamedTuple):
    """A row of `families.py`, two classes of transformers and the settings of the second."""

    row: str
    model: str
    config: str
    settings: dict[str, Any]


TINY = {
    "llama": Tiny("llama", "LlamaForCausalLM", "LlamaConfig", WIDE),
    "mistral": Tiny("llama", "MistralForCausalLM", "MistralConfig", WIDE | {"sliding_window": 4}),
    "qwen3": Tiny("qwen3", "Qwen3ForCausalLM", "Qwen3Config", WIDE),
    "gemma2": Tiny("llama", "Gemma2ForCausalLM", "Gemma2Config", WIDE),
    "gpt_oss": Tiny(
        "llama", "GptOssForCausalLM", "GptOssConfig",
        WIDE | {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4, "pad_token_id": 0},
    ),
    "gemma3": Tiny("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", WIDE | {"sliding_window": 4}),
    "olmo2": Tiny("olmo2", "Olmo2ForCausalLM", "Olmo2Config", GQA | PADS),
    "cohere": Tiny("cohere", "CohereForCausalLM", "CohereConfig", GQA | PADS | {"use_qk_norm": True, "logit_scale": 1.0}),
    "phi": Tiny(
        "phi", "PhiForCausalLM", "PhiConfig", LLM | {"hidden_size": 32, "qk_layernorm": True, "bos_token_id": 1, "eos_token_id": 2}
    ),
    "phi3": Tiny("phi3", "Phi3ForCausalLM", "Phi3Config", GQA | PADS),
    "gptj": Tiny("gptj", "GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}),
    "gpt2": Tiny("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt2 cross": Tiny(  # attends to a memory, under the generic encoder-decoder model
        "gpt2 cross", "EncoderDecoderModel", "EncoderDecoderConfig",
        {
            "encoder": LLM | {"model_type": "bert"},
            "decoder": GPT
            | {"model_type": "gpt2", "is_decoder": True, "add_cross_attention": True, "bos_token_id": 0, "eos_token_id": 0},
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "gpt_neox": Tiny("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", LLM),
    "opt": Tiny(
        "bart", "OPTForCausalLM", "OPTConfig", without(LLM, "intermediate_size") | {"ffn_dim": 29, "word_embed_proj_dim": 24}
    ),
    "bert": Tiny("bert", "BertForMaskedLM", "BertConfig", LLM),
    "roberta": Tiny("bert", "RobertaForMaskedLM", "RobertaConfig", LLM),
    "albert": Tiny("albert", "AlbertForMaskedLM", "AlbertConfig", LLM | {"embedding_size": 12}),
    "distilbert": Tiny(
        "distilbert", "DistilBertForMaskedLM", "DistilBertConfig",
        {"vocab_size": 97, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 29, "max_position_embeddings": 64},
    ),
    "modernbert": Tiny(
        "modernbert", "ModernBertForMaskedLM", "ModernBertConfig", LLM | PADS | {"cls_token_id": 1, "sep_token_id": 2}
    ),
    "vit": Tiny("vit", "ViTModel", "ViTConfig", IMAGE),
    "dinov2": Tiny("vit", "Dinov2Model", "Dinov2Config", without(IMAGE, "intermediate_size") | {"mlp_ratio": 2}),
    "swin": Tiny(
        "vit", "SwinModel", "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 2},
    ),
    "clip": Tiny(
        "bart", "CLIPModel", "CLIPConfig", {"text_config": LLM | {"eos_token_id": 2}, "vision_config": IMAGE}
    ),
    "t5": Tiny(
        "t5", "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 97, "d_model": 24, "d_kv": 5, "d_ff": 29, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "bart": Tiny("bart", "BartForConditionalGeneration", "BartConfig", TEXT2TEXT),
    "marian": Tiny("bart", "MarianMTModel", "MarianConfig", TEXT2TEXT),
    "whisper": Tiny(
        "bart", "WhisperForConditionalGeneration", "WhisperConfig",
        SEQ2SEQ
        | {"num_mel_bins": 8, "max_source_positions": 15, "max_target_positions": 20, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "wav2vec2": Tiny("bart", "Wav2Vec2Model", "Wav2Vec2Config", SPEECH),
}  # fmt: skip


def build(name: str, *, seed: int = 7, impl: str | None = None, **changes: Any) -> Any:
    """A model of the table as transformers initialises it, in float32 and evaluation mode; `changes` replace settings."""
    which = TINY[name]
    config = getattr(hf, which.config)(**copy.deepcopy(which.settings | changes))
    if name == "gpt_oss":
        config._experts_implementation = "eager"  # the others have no float64
    torch.manual_seed(seed)
    return getattr(hf, which.model)._from_config(config, attn_implementation=impl).eval()


def spread(model: nn.Module, std: float = 1.0, *, only: str = "", seed: int | None = None) -> Any:
    """Weights of std / sqrt(inputs), far from the start, so that attention matters; of parameters with `only` in their name."""
    if seed is not None:
        torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and only in name:
            nn.init.normal_(parameter, std=std * parameter.shape[-1] ** -0.5)
    return model


def wake(model: nn.Module, std: float = 5.0, *, seed: int = 11) -> Any:
    """Attached gates' weights of std / sqrt(inputs) and biases of std 1, the same ones every time."""
    made = torch.Generator().manual_seed(seed)
    for gate in attached(model).values():
        for parameter in gate.parameters():
            scale = std * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=made))
    return model
