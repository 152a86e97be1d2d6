"""`attach` beside what others do to a model: other processes, device hooks, quantised layers, modes, flash attention."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gated_attn.errors import UnsupportedError
from gated_attn.hf import gates
from gated_attn.hf.attach import attach, detach
from gated_attn.hf.verify import verify

IDS = torch.arange(3, 21).view(2, 9)
SPECS = ["output:headwise:sigmoid", "value:elementwise:sigmoid", "key:headwise:sigmoid", "dense:elementwise:sigmoid"]


def llama() -> Any:
    torch.manual_seed(3)
    config = hf.LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=29,
    )
    return hf.LlamaForCausalLM(config).eval()


def awake(model: Any) -> Any:
    torch.manual_seed(5)
    for gate in gates(model).values():
        for parameter in gate.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("spec", SPECS)
def test_a_pickled_model_runs_in_another_process(spec: str, tmp_path: Path) -> None:
    model = awake(attach(llama(), spec))
    torch.save(model, tmp_path / "model.pt")
    code = (
        f"import torch; model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "with torch.no_grad(): torch.save(model(torch.arange(3, 21).view(2, 9)).logits, "
        f"{str(tmp_path / 'logits.pt')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(model))


def test_flash_attention_sees_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses its kernel by the name in the module's configuration."""
    seen: list[str] = []

    def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        seen.append(module.config._attn_implementation)
        assert module.is_causal
        assert any(isinstance(part, nn.Linear) for part in module.modules())
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    model = awake(attach(llama(), "output:headwise:sigmoid"))
    want = logits(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert torch.equal(logits(model), want)
    assert seen == ["flash_attention_2"] * 2


@pytest.mark.parametrize(
    "spec", [*SPECS, "output:headwise:sigmoid,source=constant", "output:headwise:sigmoid,source=lse"]
)
def test_offloaded_models_compute_and_verify(spec: str) -> None:
    want = logits(awake(attach(llama(), spec)))
    model = awake(attach(llama(), spec))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(logits(model), want)
    assert verify(model, {"input_ids": IDS}).ok
    assert torch.equal(logits(model), want), "verifying leaves accelerate's hooks on the gates"


def test_attaching_to_an_offloaded_model_changes_nothing() -> None:
    model, want = llama(), logits(llama())
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    attach(model, "output:headwise:2sigmoid,init=identity")
    assert all(not p.is_meta for gate in gates(model).values() for p in gate.parameters())
    assert torch.equal(logits(model), want)
    assert torch.equal(logits(detach(model)), want)


def test_verify_restores_the_mode_of_every_module() -> None:
    model = attach(llama(), "paper").train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    verify(model, {"input_ids": IDS})
    assert [module.training for module in model.modules()] == before


class Packed(nn.Module):
    """A quantised linear layer: nothing of it is a floating-point parameter of a width that computes."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        codes = (linear.weight.detach() / linear.weight.abs().max() * 127).round()
        if kind == "fp8":
            self.weight = nn.Parameter(codes.to(torch.float8_e4m3fn), requires_grad=False)
        elif kind == "uint8":
            self.weight = nn.Parameter((codes + 128).to(torch.uint8), requires_grad=False)
        else:
            self.register_buffer("qweight", codes.to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        codes = self.qweight if self.kind == "buffers" else self.weight
        return nn.functional.linear(x, (codes.to(x.dtype) - (128 if self.kind == "uint8" else 0)) / 600)


@pytest.mark.parametrize("kind", ["fp8", "uint8", "buffers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_beside_quantised_layers_a_gate_is_a_linear_layer_in_the_compute_dtype(
    spec: str, kind: str, dtype: torch.dtype
) -> None:
    model = llama().to(dtype)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Packed(getattr(layer.self_attn, name), kind))
    awake(attach(model, spec))
    assert {p.dtype for gate in gates(model).values() for p in gate.parameters()} == {dtype}
    assert all(type(gate.proj) is nn.Linear for gate in gates(model).values())
    assert verify(model, {"input_ids": IDS}).ok
    assert torch.isfinite(logits(model)).all()


def test_gpt2s_own_upcast_attention_is_refused() -> None:
    config = hf.GPT2Config(vocab_size=97, n_embd=24, n_layer=2, n_head=4, reorder_and_upcast_attn=True)
    with pytest.raises(UnsupportedError, match="reorder_and_upcast_attn=False"):
        attach(hf.GPT2LMHeadModel(config), "paper")


def test_a_gated_modules_configuration_copies() -> None:
    module = attach(llama(), "paper").model.layers[0].self_attn
    twin = copy.deepcopy(module.config)
    assert twin.hidden_size == 24
    assert twin._attn_implementation == "gated_attn|sdpa"
    assert module.config.hidden_size == 24
