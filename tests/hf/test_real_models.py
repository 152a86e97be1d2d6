"""Real weights: attach is bit-identical, gates saved and loaded give the same model, detach gives the first one back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gated_attn import samples
from gated_attn.hf.attach import attach, detach, gates
from gated_attn.hf.pretrained import folder, load_sample, tokenizer
from gated_attn.hf.store import load_gates, save_gates
from gated_attn.hf.verify import verify

NAMES = ["rxnmapper", "minilm", "smollm2", "dinov2", "whisper"]
SMILES = "CC(=O)Oc1ccccc1C(=O)O"
TEXT = "A gate scales each attention head's output by a function of the current token."


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if samples.cached()[request.param] is None:
        pytest.skip(f"sample {request.param} is not cached: run python -m gated_attn.samples fetch {request.param}")
    return request.param


def batch(name: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    if name == "dinov2":
        return {"pixel_values": torch.randn(2, 3, 70, 70)}
    if name == "whisper":
        return {
            "input_features": torch.randn(1, 80, 3000),
            "decoder_input_ids": torch.tensor([[50257, 50362, 314, 423]]),
        }
    return dict(tokenizer(name)(SMILES if name == "rxnmapper" else TEXT, return_tensors="pt"))


def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    found = model(**inputs)
    return found.logits if "logits" in found else found.last_hidden_state


@torch.no_grad()
def test_attach_save_reload_detach(name: str, tmp_path: Path) -> None:
    model, inputs = load_sample(name), batch(name)
    want, keys = run(model, inputs), list(model.state_dict())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attach(model, "output:headwise:2sigmoid,init=identity")
    assert torch.equal(run(model, inputs), want)
    shown = verify(model, inputs)
    assert shown.ok, str(shown)
    torch.manual_seed(5)
    for gate in gates(model).values():
        for parameter in gate.parameters():
            nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
    gated = run(model, inputs)
    assert not torch.equal(gated, want)
    save_gates(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gates.json", "gates.safetensors"]
    numbers = sum(p.numel() for gate in gates(model).values() for p in gate.parameters())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * numbers + 20_000
    other = load_sample(name)
    load_gates(other, tmp_path)
    assert torch.equal(run(other, inputs), gated)
    detach(model)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert torch.equal(run(model, inputs), want)


@torch.no_grad()
def test_smollm2_generates_the_same_with_an_identity_gate() -> None:
    if samples.cached()["smollm2"] is None:
        pytest.skip("sample smollm2 is not cached: run python -m gated_attn.samples fetch smollm2")
    model, words = load_sample("smollm2", torch.bfloat16), tokenizer("smollm2")
    ids = words("The capital of France is", return_tensors="pt").input_ids
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    assert "Paris" in words.decode(want[0])
    gated = attach(copy.deepcopy(model), "identity")
    assert torch.equal(gated.generate(ids, **options), want)
    assert torch.equal(detach(gated).generate(ids, **options), want)
    assert folder("smollm2").is_dir()
