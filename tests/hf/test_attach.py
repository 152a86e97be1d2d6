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

from gated_attn.errors import SpecError, UnsupportedError
from gated_attn.hf import gates
from gated_attn.hf.attach import attach, detach
from gated_attn.hf.swap import unswap
from gated_attn.hf.verify import verify
from gated_attn.hf.wiring import Carrier, GatedLayer
from tests.hf.tiny import build, wake

IDS = torch.arange(3, 21).view(2, 9)
SPECS = ["output:headwise:sigmoid", "value:elementwise:sigmoid", "key:headwise:sigmoid", "dense:elementwise:sigmoid"]


def llama(*, bias: bool = False) -> Any:
    return build("llama", seed=3, attention_bias=bias)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("spec", SPECS)
def test_a_pickled_model_runs_in_another_process(spec: str, tmp_path: Path) -> None:
    model = wake(attach(llama(), spec))
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
    model = wake(attach(llama(), "output:headwise:sigmoid"))
    want = logits(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert torch.equal(logits(model), want)
    assert seen == ["flash_attention_2"] * 2


@pytest.mark.parametrize(
    "spec",
    [*SPECS, "output:headwise:sigmoid,source=constant", "output:headwise:sigmoid,source=lse", "output:headwise,fill",
     "output:headwise:sigmoid,source=lse,fill", "value:elementwise,fill", "key:headwise,fill", "dense:elementwise,fill"],
)  # fmt: skip
def test_offloaded_models_compute_and_verify(spec: str) -> None:
    want = logits(wake(attach(llama(), spec)))
    model = wake(attach(llama(), spec))
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
    wake(attach(model, spec))
    assert {p.dtype for gate in gates(model).values() for p in gate.parameters()} == {dtype}
    assert all(type(gate.proj) is nn.Linear for gate in gates(model).values())
    assert verify(model, {"input_ids": IDS}).ok
    assert torch.isfinite(logits(model)).all()


def test_attention_beside_the_known_is_not_left_out_in_silence() -> None:
    bloom = hf.BloomModel(hf.BloomConfig(vocab_size=97, hidden_size=24, n_layer=1, n_head=4))
    both = nn.ModuleDict({"text": llama(), "other": bloom})
    with pytest.raises(
        UnsupportedError, match=r"2 attention modules can(.|\n)*and 1 cannot, such as other.h.0(.|\n)*ALiBi"
    ):
        attach(both, "paper")
    assert not gates(both)
    assert len(gates(attach(both, "paper", names=["text.*"]))) == 2


SHARDED = """
import os, sys, torch
from torch.distributed.fsdp import fully_shard
from gated_attn import attach, verify
from tests.hf.test_attach import IDS, llama, logits, wake
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
kept = []  # torch 2.13 may crash as it frees a model that fully_shard made, or as the process ends in its own way
for spec in sys.argv[2:]:
    model = wake(attach(llama(bias=True), spec))
    want = logits(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    kept.append(model)
    print(spec, torch.equal(logits(model), want), verify(model, {"input_ids": IDS}).ok, flush=True)
os._exit(0)
"""


def test_verify_reads_sharded_parameters_while_they_are_whole(tmp_path: Path) -> None:
    """FSDP2 on one process: outside of their layer's forward its parameters are DTensors."""
    specs = [*SPECS, "output:headwise,fill", "value:headwise,fill", "dense:elementwise,fill"]
    command = [sys.executable, "-c", SHARDED, str(tmp_path / "ranks"), *specs]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.stdout.split("\n")[:-1] == [f"{spec} True True" for spec in specs], done.stderr


def test_a_gated_layer_may_be_replaced_through_add_module() -> None:
    model = wake(attach(llama(), "value:headwise:sigmoid"))
    want = logits(model)
    for layer in model.model.layers:
        old = layer.self_attn.v_proj
        twin = nn.Linear(old.in_features, old.out_features, bias=False)
        twin.load_state_dict(old.state_dict())
        layer.self_attn.add_module("v_proj", twin)
    assert torch.equal(logits(model), want)
    assert verify(model, {"input_ids": IDS}).ok


@pytest.mark.parametrize("spec", ["value:headwise", "key:headwise", "dense:headwise"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert"])
def test_a_gated_layer_that_is_replaced_behind_our_back_is_an_error(name: str, spec: str) -> None:
    """As old quantisers do; its gate would be skipped in silence."""
    model = wake(attach(build(name), spec))
    ids = torch.arange(3, 12)[None]
    model(input_ids=ids)
    for module in list(model.modules()):
        for child, layer in list(module._modules.items()):
            if isinstance(layer, (GatedLayer, Carrier)):
                plain = copy.deepcopy(layer)
                unswap(plain)
                module._modules[child] = plain
    with pytest.raises((UnsupportedError, RuntimeError)):
        model(input_ids=ids)


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


def test_layers_and_names_may_be_text() -> None:
    assert list(gates(attach(llama(), "paper", layers="1"))) == ["model.layers.1.self_attn.attn_gate"]
    assert list(gates(attach(llama(), "paper", names="*.0.*"))) == ["model.layers.0.self_attn.attn_gate"]
    with pytest.raises(SpecError, match="layers=2"):
        attach(llama(), "paper", layers="0-5")


def test_verify_wants_keywords() -> None:
    with pytest.raises(SpecError, match=r'got a Tensor; pass a mapping such as \{"input_ids": ids\}'):
        verify(attach(llama(), "paper"), IDS)  # type: ignore[arg-type]
