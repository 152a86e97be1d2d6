"""LoRA on a gated model: before attach, after it, merged, disabled, taken away. The gate multiplies the adapter's part too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from gated_attn.errors import SpecError
from gated_attn.hf import load_pretrained, save_gates
from gated_attn.hf.attach import attach, detach, gates
from gated_attn.hf.verify import verify
from tests.hf import tiny
from tests.hf.tiny import spread, wake

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {
    "llama": LLAMA,
    "qwen3": LLAMA,
    "gpt2": ["c_attn", "attn.c_proj"],
    "bert": ["query", "key", "value", "attention.output.dense"],
}
SPECS = [
    "output:headwise:sigmoid", "value:elementwise:sigmoid", "key:headwise:sigmoid", "query:elementwise:sigmoid",
    "dense:elementwise:sigmoid",
]  # fmt: skip
IDS = torch.arange(3, 21).view(2, 9)


def build(name: str) -> Any:
    return spread(tiny.build(name, seed=5).double())


def adapt(model: Any, name: str) -> Any:
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2")
    return peft.get_peft_model(model, config).double().eval()


def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits.detach()


def close(a: Tensor, b: Tensor) -> None:
    assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", TARGETS)
def test_before_and_after_attach_merged_and_disabled_are_one_answer(name: str, spec: str) -> None:
    base = build(name)
    after = adapt(attach(copy.deepcopy(base), spec), name)
    before = attach(adapt(copy.deepcopy(base), name), spec)
    for model in (after, before):
        wake(model)
    gated = logits(attach_like(copy.deepcopy(base), spec))
    close(logits(after), gated)  # a new adapter adds nothing
    for model in (after, before):
        spread(model, only="lora_B", seed=9)
        spread(model, only="lora_A", seed=9)
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
    wake(model)
    return model


@pytest.mark.parametrize("spec", SPECS)
def test_unloading_leaves_the_gated_model(spec: str) -> None:
    model = attach_like(build("llama"), spec)
    want = logits(model)
    adapted = adapt(model, "llama")
    spread(adapted, only="lora_B", seed=9)
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
    spread(adapted, only="lora_B", seed=9)
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
    spread(adapted, only="lora_B", seed=9)
    want = logits(adapted)
    merged = adapted.merge_and_unload()
    close(logits(merged), want)
    assert len(gates(merged)) == 2
    assert verify(merged, {"input_ids": IDS}).ok


def test_only_the_gate_that_runs_is_shown() -> None:
    model = attach(build("llama"), "output:headwise")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["attn_gate"], task_type="CAUSAL_LM")
    )
    names = list(gates(wrapped))
    assert len(names) == 2
    assert all(name.endswith("attn_gate.modules_to_save.default") for name in names)
    assert len(verify(wrapped, {"input_ids": IDS}).rows) == 2
    with wrapped.disable_adapter():
        assert all(name.endswith("attn_gate.original_module") for name in gates(wrapped))
