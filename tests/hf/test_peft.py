"""LoRA on a gated model: before attach, after it, merged, disabled, taken away. The gate multiplies the adapter's part too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from gated_attn.errors import SpecError
from gated_attn.hf import load_pretrained, save_gates
from gated_attn.hf.attach import attach, detach, gates
from gated_attn.hf.verify import verify

SMALL = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "intermediate_size": 29, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)), ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL)), ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=97, n_embd=24, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)),
        ["c_attn", "attn.c_proj"],
    ),
    "bert": (
        lambda: hf.BertForMaskedLM(
            hf.BertConfig(vocab_size=97, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=29)
        ),
        ["query", "key", "value", "attention.output.dense"],
    ),
}  # fmt: skip
SPECS = [
    "output:headwise:sigmoid", "value:elementwise:sigmoid", "key:headwise:sigmoid", "query:elementwise:sigmoid",
    "dense:elementwise:sigmoid",
]  # fmt: skip
IDS = torch.arange(3, 21).view(2, 9)


def build(name: str) -> Any:
    torch.manual_seed(5)
    model = MODELS[name][0]().double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def adapt(model: Any, name: str) -> Any:
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=MODELS[name][1], fan_in_fan_out=name == "gpt2")
    return peft.get_peft_model(model, config).double().eval()


def wake(model: Any, what: str) -> None:
    torch.manual_seed(9)
    for key, parameter in model.named_parameters():
        if what in key and parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 * (5 if what == "attn_gate" else 1))


def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits.detach()


def close(a: Tensor, b: Tensor) -> None:
    assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", MODELS)
def test_before_and_after_attach_merged_and_disabled_are_one_answer(name: str, spec: str) -> None:
    base = build(name)
    after = adapt(attach(copy.deepcopy(base), spec), name)
    before = attach(adapt(copy.deepcopy(base), name), spec)
    for model in (after, before):
        wake(model, "attn_gate")
    gated = logits(attach_like(copy.deepcopy(base), spec))
    close(logits(after), gated)  # a new adapter adds nothing
    for model in (after, before):
        wake(model, "lora_B")
        wake(model, "lora_A")
    want = logits(after)
    assert (want - gated).abs().max() > 1e-3
    close(logits(before), want)
    assert verify(after, {"input_ids": IDS}).ok
    assert verify(before, {"input_ids": IDS}).ok
    with after.disable_adapter():
        close(logits(after), gated)
    after.merge_adapter()
    close(logits(after), want)
    assert verify(after, {"input_ids": IDS}).ok
    after.unmerge_adapter()
    close(logits(after), want)
    merged = after.merge_and_unload()
    close(logits(merged), want)
    assert not any("lora" in key or "base_layer" in key for key in merged.state_dict())
    assert verify(merged, {"input_ids": IDS}).ok
    detach(merged)
    assert [type(module) for module in merged.modules()] == [type(module) for module in base.modules()]


def attach_like(model: Any, spec: str) -> Any:
    attach(model, spec)
    wake(model, "attn_gate")
    return model


@pytest.mark.parametrize("spec", SPECS)
def test_unloading_leaves_the_gated_model(spec: str) -> None:
    model = attach_like(build("llama"), spec)
    want = logits(model)
    adapted = adapt(model, "llama")
    wake(adapted, "lora_B")
    assert (logits(adapted) - want).abs().max() > 1e-3
    close(logits(adapted.unload()), want)


def test_gates_train_beside_the_adapter_when_named() -> None:
    model = attach_like(build("llama"), "output:headwise:sigmoid")
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["attn_gate"])
    adapted = peft.get_peft_model(model, config).double()
    trained = {key for key, p in adapted.named_parameters() if p.requires_grad}
    assert any("attn_gate.modules_to_save" in key for key in trained)
    logits(adapted)
    adapted(input_ids=IDS).logits.square().sum().backward()
    grads = {key: p.grad for key, p in adapted.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in grads.values())
    assert any(bool(grad.any()) for key, grad in grads.items() if "attn_gate" in key and grad is not None)


def test_the_gates_linear_takes_an_adapter_of_its_own() -> None:
    model = attach_like(build("llama"), "output:headwise:sigmoid")
    want = logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["attn_gate.proj"])).double().eval()
    close(logits(adapted), want)
    wake(adapted, "lora_B")
    moved = logits(adapted)
    assert (moved - want).abs().max() > 1e-3
    close(logits(adapted.merge_and_unload()), moved)
    assert len(gates(model)) == 2


@pytest.mark.parametrize("spec", SPECS)
def test_an_adapter_on_every_linear_layer_leaves_none_behind(spec: str, tmp_path: Path) -> None:
    """The gates' own linear layers are adapted too, and merged or unloaded like all others."""
    model = attach_like(build("llama"), spec)
    want = logits(model)
    config = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).double().eval()
    moved = logits(adapted)
    assert (moved - want).abs().max() > 1e-3
    assert verify(adapted, {"input_ids": IDS}).ok
    with pytest.raises(SpecError, match=r"adapter of their own.*merge it"):
        save_gates(adapted, tmp_path)
    close(logits(copy.deepcopy(adapted).unload()), want)
    merged = adapted.merge_and_unload()
    close(logits(merged), moved)
    assert not any("lora" in key or "base_layer" in key for key in merged.state_dict())
    merged.save_pretrained(tmp_path / "whole")
    close(logits(load_pretrained(tmp_path / "whole", dtype=torch.float64)), moved)


@pytest.mark.parametrize("spec", SPECS)
def test_gates_that_peft_keeps_copies_of_are_one_again_afterwards(spec: str) -> None:
    model = attach_like(build("llama"), spec)
    config = peft.LoraConfig(
        r=3, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], modules_to_save=["attn_gate"]
    )
    adapted = peft.get_peft_model(model, config).double().eval()
    wake(adapted, "lora_B")
    want = logits(adapted)
    merged = adapted.merge_and_unload()
    close(logits(merged), want)
    assert len(gates(merged)) == 2
    assert verify(merged, {"input_ids": IDS}).ok
