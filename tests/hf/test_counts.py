"""Counts of parameters and FLOPs, against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

from gated_attn.hf.attach import attach  # noqa: E402
from gated_attn.hf.counts import count  # noqa: E402
from tests.hf.builders import (  # noqa: E402
    ELEMENTWISE,
    FAMILIES,
    HEADWISE,
    llama,
    ours,
    qwen3_5,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def flops(model: nn.Module, tokens: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi3", "gpt_neox"])
@pytest.mark.parametrize(
    "spec",
    [HEADWISE, ELEMENTWISE, "output:shared,rank=3", "value:elementwise,in=7,fill", "key:headwise", "dense:elementwise",
     "output:elementwise,source=query", "output:headwise,source=constant", "output:headwise,source=lse,sink_key"],
)  # fmt: skip
def test_counts_are_torch_s(family: str, spec: str) -> None:
    """parameters, and the FLOPs that a gate adds according to torch's own counter."""
    model = FAMILIES[family]()
    tokens = torch.randint(3, 61, (2, 6))
    before, numbers = flops(model, tokens), sum(p.numel() for p in model.parameters())
    attach(model, spec)
    found = count(model)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.gate_parameters == found.parameters - numbers
    per_token = found.gate_flops * tokens.numel()
    if "lse" not in spec:  # a sink key is multiplied with the queries inside attention
        assert flops(model, tokens) - before == per_token


@pytest.mark.parametrize("spec", [None, HEADWISE, "output:elementwise,source=query", "dense:elementwise,rank=3"])
@pytest.mark.parametrize(("layers", "groups", "inner"), [(6, 1, 1), (5, 2, 1), (7, 3, 2)])
def test_albert_s_shared_layers_count_as_often_as_they_run(
    layers: int, groups: int, inner: int, spec: str | None
) -> None:
    config = transformers.AlbertConfig(
        vocab_size=61, embedding_size=13, hidden_size=44, intermediate_size=37, num_attention_heads=4, num_hidden_layers=layers,
        num_hidden_groups=groups, inner_group_num=inner,
    )  # fmt: skip
    model = transformers.AlbertForMaskedLM(config).eval()
    before = linear_flops(model)
    if spec is not None:
        attach(model, spec)
    found = count(model)
    assert found.flops == linear_flops(model)
    assert found.gate_flops == linear_flops(model) - before


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_all_linear_layers_count_as_torch_counts_them(family: str) -> None:
    model = attach(FAMILIES[family](), ELEMENTWISE).eval()
    assert count(model).flops == linear_flops(model)


def linear_flops(model: nn.Module) -> float:
    """Per token, without what attention multiplies."""
    ids_BT = torch.randint(3, 61, (2, 6))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids_BT)
    found = counter.get_flop_counts()["Global"]
    return sum(n for operation, n in found.items() if str(operation) in ("aten.mm", "aten.addmm")) / ids_BT.numel()


def test_counts_by_hand() -> None:
    D, H, E, layers = 44, 4, 10, 2
    for spec, weights in (("output:headwise", D * H), ("output:elementwise", D * H * E)):
        found = count(attach(llama(), spec))
        assert (found.gate_parameters, found.gate_flops) == (layers * weights, layers * 2 * weights)
        assert found.parameter_overhead == pytest.approx(100 * layers * weights / (found.parameters - layers * weights))
        assert f"+{found.parameter_overhead:.3g}%" in str(found)
    pairwise = count(attach(llama(), "weights:pairwise,rank=3"))
    assert pairwise.gate_flops == layers * 2 * 3 * E * (H + 2)
    native = count(qwen3_5())
    assert native.gate_parameters == 2 * 4 * 16 * 44
    own = count(ours())
    assert own.gate_parameters == 2 * D * H * E
