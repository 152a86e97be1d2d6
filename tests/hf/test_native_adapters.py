"""transformers' own adapters (`model.add_adapter`) on a gated model: before attach, after it, disabled, taken away."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from gated_attn.hf.attach import attach
from gated_attn.hf.verify import verify
from tests.hf import tiny
from tests.hf.tiny import spread, wake

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {"llama": LLAMA, "qwen3": LLAMA, "gpt2": ["c_attn", "attn.c_proj"]}
SPECS = [
    "output:elementwise:sigmoid,fill", "value:elementwise:sigmoid", "key:headwise:sigmoid", "query:headwise:sigmoid",
    "dense:elementwise:sigmoid",
]  # fmt: skip
IDS = torch.arange(3, 21).view(2, 9)


@pytest.fixture(autouse=True)
def _any_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 asks for a release of PEFT (0.22) that is newer than what is out; what it needs here, 0.21 has."""
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)


def add(model: Any, name: str) -> Any:
    model.add_adapter(peft.LoraConfig(r=3, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2"))
    return model.double().eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def close(a: Tensor, b: Tensor) -> None:
    assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", TARGETS)
def test_before_and_after_attach_disabled_and_deleted_are_one_answer(name: str, spec: str) -> None:
    base = spread(tiny.build(name, seed=5).double())
    plain = logits(base)
    after = wake(attach(copy.deepcopy(base), spec))
    gated = logits(after)
    add(after, name)
    before = wake(attach(add(copy.deepcopy(base), name), spec))
    close(logits(after), gated)  # a new adapter adds nothing
    for model in (after, before):
        spread(model, only="lora_", seed=9)
    want = logits(after)
    assert (gated - plain).abs().max() > 1e-2
    assert (want - gated).abs().max() > 1e-2
    for model in (after, before):
        close(logits(model), want)
        assert verify(model, {"input_ids": IDS}).ok
        model.disable_adapters()
        close(logits(model), gated)
        model.enable_adapters()
        close(logits(model), want)
        model.delete_adapter("default")
        close(logits(model), gated)
        assert verify(model, {"input_ids": IDS}).ok
