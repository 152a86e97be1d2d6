"""Measuring a decoder: what is reported is what a second computation by hand gives, and the model is left as it was."""

from __future__ import annotations

import math

import pytest
import torch

from gated_attn.measure.decoder import measure_decoder, sample_gates
from gated_attn.models import Decoder, DecoderConfig

SIZES = {
    "vocab_size": 29,
    "layers": 2,
    "heads": 6,
    "kv_heads": 3,
    "head_dim": 10,
    "dim": 23,
    "ffn_dim": 31,
}


def make(gate: str) -> Decoder:
    torch.manual_seed(7)
    model = Decoder(DecoderConfig(**SIZES, gate=gate))  # type: ignore[arg-type]
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)
    return model


def batches() -> list[torch.Tensor]:
    return list(torch.randint(29, (5, 11), generator=torch.Generator().manual_seed(3)).split([3, 2]))


@torch.no_grad()
def by_hand(model: Decoder) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """Per layer: softmax weights and gate values, from matrix products; and the residual stream's largest value."""
    weights, gates, largest = [], [], 0.0
    x = model.embed(torch.cat(batches()))
    for layer in model.layers:
        attn = layer.attn
        largest = max(largest, float(x.abs().max()))
        h = layer.attn_norm(x)
        positions = torch.arange(11)[None]
        q = attn.rope.rotate(attn.q_proj(h).unflatten(-1, (6, 10)), positions)
        k = attn.rope.rotate(attn.k_proj(h).unflatten(-1, (3, 10)), positions).repeat_interleave(2, 2)
        scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(10)
        scores = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -math.inf)
        weights.append(scores.softmax(-1))
        if attn.attn_gate is not None:
            gates.append(torch.sigmoid(h @ attn.attn_gate.proj.weight.T).unflatten(-1, (6, -1)))
        x = layer(x)
        largest = max(largest, float(x.abs().max()))
    return weights, gates, largest


@pytest.mark.parametrize("gate", ["none", "paper", "paper-headwise"])
def test_every_number_by_hand(gate: str) -> None:
    model = make(gate)
    measured = measure_decoder(model, batches())
    weights, gates, largest = by_hand(model)
    share = torch.stack([w[:, :, 1:, 0].mean((0, 2)) for w in weights])
    assert torch.tensor(measured.first_token_share_by_head) == pytest.approx(share, abs=1e-6)
    assert measured.first_token_share == pytest.approx(float(share.mean()), abs=1e-6)
    assert measured.max_abs == pytest.approx(largest, rel=1e-5)
    if gate == "none":
        assert (measured.gate_mean, measured.gate_below, measured.gates) == (None, None, ())
        return
    values = torch.cat([g.flatten() for g in gates])
    assert measured.gate_mean == pytest.approx(float(values.mean()), abs=1e-5)
    assert measured.gate_below == pytest.approx(float((values < 0.1).double().mean()), abs=1e-3)
    stat = {(s.layer, s.head): s for s in measured.gates}[1, 4]
    assert stat.mean == pytest.approx(float(gates[1][:, :, 4].mean()), abs=1e-5)
    assert sum(stat.histogram) == gates[1][:, :, 4].numel()


@pytest.mark.parametrize(
    "gate",
    ["sink,sink_key", "value:headwise", "dense:elementwise", "output:shared,source=constant", "weights:headwise"],
)
def test_other_gates_are_measured_too(gate: str) -> None:
    measured = measure_decoder(make(gate), batches())
    assert measured.gate_mean is not None
    assert 0 < measured.gate_mean < 1


@pytest.mark.parametrize(
    "gate",
    [
        "query:elementwise,source=query",
        "query:headwise",
        "key:headwise",
        "value:elementwise",
        "output:headwise,source=query",
    ],
)
def test_what_is_measured_is_what_the_model_multiplied_by(gate: str) -> None:
    model, applied = make(gate), []
    handles = [
        layer.attn.attn_gate.register_forward_hook(lambda module, args, value: applied.append(value))
        for layer in model.layers
    ]
    with torch.no_grad():
        model(torch.cat(batches()))
    for handle in handles:
        handle.remove()
    measured = measure_decoder(model, [torch.cat(batches())])
    assert measured.gate_mean == pytest.approx(float(torch.stack([value.mean() for value in applied]).mean()), abs=1e-6)
    sample = sample_gates(model, batches()[0][0], [str(i) for i in range(11)])
    assert sample is not None
    assert torch.tensor(sample.values[0]) == pytest.approx(applied[0][0].mean(-1).T, abs=1e-6)


def test_a_pairwise_gate_has_no_single_value() -> None:
    assert measure_decoder(make("weights:pairwise"), batches()).gate_mean is None
    assert sample_gates(make("weights:pairwise"), torch.arange(5), list("abcde")) is None


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_it_was(training: bool) -> None:
    model = make("paper").train(training)
    ids = batches()[0]
    before = model(ids).logits
    measure_decoder(model, batches())
    sample_gates(model, torch.arange(5), list("abcde"))
    assert model.training is training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(ids).logits, before)
    assert all(p.grad is None for p in model.parameters())


def test_a_sample_holds_the_gate_of_every_token() -> None:
    model = make("paper,layers=1")
    sample = sample_gates(model, torch.arange(5), list("abcde"))
    assert sample is not None
    assert sample.layers == (1,)
    assert sample.tokens == tuple("abcde")
    assert (len(sample.values), len(sample.values[0]), len(sample.values[0][0])) == (1, 6, 5)
    assert sample_gates(make("none"), torch.arange(5), list("abcde")) is None
