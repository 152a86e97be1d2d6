"""`transformers.pipeline` takes a model with gates: identity gates give the stock pipeline's answer, shut gates another.

Tiny models with a tiny tokenizer for tasks of text, sound and images, and the real models that are cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from gated_attn import attach, samples
from gated_attn.hf import gates
from gated_attn.hf.pretrained import load_sample, processor, tokenizer

SMALL = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
TEXT = "w11 w5 w83 w7 w31 w5 w19"
SPECS = [
    f"{where}:2sigmoid,bias=0,init=identity" for where in ("output:headwise", "value:elementwise", "dense:headwise")
]
SOUND = [math.sin(i * i / 9973) for i in range(811)]  # a rising tone


def words() -> Any:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="w3 $A", special_tokens=[("w3", 3)])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", unk_token="w1", eos_token="w2", mask_token="w4"
    )


def of_text(name: str, config: str, **more: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    return lambda: (getattr(hf, name)(getattr(hf, config)(**SMALL, **more)), {"tokenizer": words()})


def of_sound() -> tuple[Any, dict[str, Any]]:
    config = hf.Wav2Vec2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=29, conv_dim=(8, 8), conv_stride=(5, 2),
        conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=5,
        classifier_proj_size=11,
    )  # fmt: skip
    return hf.Wav2Vec2ForSequenceClassification(config), {"feature_extractor": hf.Wav2Vec2FeatureExtractor()}


def of_images() -> tuple[Any, dict[str, Any]]:
    pytest.importorskip("PIL", reason="pipelines of images need Pillow")
    config = hf.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=29, image_size=16, patch_size=4, num_labels=5
    )  # fmt: skip
    return hf.ViTForImageClassification(config), {
        "image_processor": hf.ViTImageProcessorPil(size={"height": 16, "width": 16})
    }


def picture() -> Any:
    from PIL import Image

    return Image.frombytes("RGB", (19, 23), bytes(i * i % 251 for i in range(19 * 23 * 3)))


LLAMA = {"num_key_value_heads": 2, "head_dim": 10, "bos_token_id": None, "eos_token_id": None}
TASKS: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], Any, dict[str, Any]]] = {
    "text-generation": (
        of_text("LlamaForCausalLM", "LlamaConfig", **LLAMA),
        TEXT,
        {"generation_config": hf.GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)},
    ),
    "fill-mask": (of_text("BertForMaskedLM", "BertConfig"), "w11 w5 w4 w7", {"top_k": 5}),
    "text-classification": (of_text("RobertaForSequenceClassification", "RobertaConfig", num_labels=3), TEXT, {"top_k": None}),
    "token-classification": (of_text("BertForTokenClassification", "BertConfig", num_labels=5), TEXT, {}),
    "feature-extraction": (of_text("BertModel", "BertConfig"), TEXT, {}),
    "zero-shot-classification": (
        of_text("BertForSequenceClassification", "BertConfig", num_labels=3, label2id={"entailment": 0, "b": 1, "c": 2}),
        TEXT,
        {"candidate_labels": ["w13", "w59"], "hypothesis_template": "w41 {}"},
    ),
    "audio-classification": (of_sound, lambda: {"raw": torch.tensor(SOUND).numpy(), "sampling_rate": 16000}, {}),
    "image-classification": (of_images, picture, {"top_k": 5}),
}  # fmt: skip
"""Task -> (what makes the model and what prepares its inputs, the input or what makes it, keywords of the call)."""


def build(task: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(7)
    model, beside = TASKS[task][0]()
    for parameter in model.parameters():  # far from the start, so that attention matters
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.eval(), beside


@torch.no_grad()
def shut(model: Any) -> None:
    for gate in gates(model).values():
        gate.proj.weight.zero_()
        gate.proj.bias.fill_(-200.0)


def ask(model: Any, task: str, beside: dict[str, Any]) -> Any:
    _, given, options = TASKS[task]
    return hf.pipeline(task, model=model, **beside)(given() if callable(given) else given, **options)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_answers_with_gates(task: str, spec: str) -> None:
    model, beside = build(task)
    want = ask(model, task, beside)
    attach(model, spec)
    assert ask(model, task, beside) == want
    shut(model)
    assert ask(model, task, beside) != want


def test_a_batch_of_several_lengths_is_each_alone() -> None:
    model, beside = build("text-generation")
    stock = ask(model, "text-generation", beside)
    torch.manual_seed(11)
    attach(model, "output:elementwise:sigmoid")
    for gate in gates(model).values():
        nn.init.normal_(gate.proj.weight, std=5 * 24**-0.5)
    pipe = hf.pipeline("text-generation", model=model, **beside)
    pipe.tokenizer.padding_side = "left"
    options = TASKS["text-generation"][2]
    texts = [TEXT, "w17 w23", "w41 w43 w47 w53 w61"]
    alone = [pipe(text, **options) for text in texts]
    assert pipe(texts, batch_size=3, **options) == alone
    assert alone[0] != stock


def sample(name: str) -> Any:
    if samples.cached()[name] is None:
        pytest.skip(f"sample {name} is not cached: run python -m gated_attn.samples fetch {name}")
    return load_sample(name)


def speech() -> Any:
    """Two seconds of a rising tone at 16 kHz, as numpy."""
    t = torch.arange(32000) / 16000
    return (0.3 * torch.sin(2 * math.pi * (200 + 300 * t) * t)).numpy()


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("minilm", "feature-extraction"),
        ("rxnmapper", "fill-mask"),
        pytest.param("smollm2", "text-generation", marks=pytest.mark.slow),
        pytest.param("whisper", "automatic-speech-recognition", marks=pytest.mark.slow),
    ],
)
def test_real_models_answer_as_before_until_their_gates_shut(name: str, task: str) -> None:
    model = sample(name)
    given, options = "The capital of France is", {}
    if name == "whisper":
        parts = processor(name)
        beside = {"tokenizer": parts.tokenizer, "feature_extractor": parts.feature_extractor}
        options = {"generate_kwargs": {"max_new_tokens": 11, "do_sample": False}}
    else:
        beside = {"tokenizer": tokenizer(name)}
        if name == "rxnmapper":
            given = f"CC(=O)O{beside['tokenizer'].mask_token}1ccccc1C(=O)O"
        if name == "smollm2":
            options = {"generation_config": hf.GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)}
    pipe = hf.pipeline(task, model=model, **beside)

    def answer() -> Any:  # the pipeline of speech empties the dict that it is given
        return pipe({"raw": speech(), "sampling_rate": 16000} if name == "whisper" else given, **options)

    want = answer()
    attach(model, SPECS[0])
    assert answer() == want
    if name == "smollm2":
        assert "Paris" in want[0]["generated_text"]
    shut(model)
    assert answer() != want
