"""Simulated rounding: by hand on layers of a few numbers, as laws over families, and what it costs a real model with a sink."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from gated_attn import samples
from gated_attn.adapt.perplexity import cache_word, nll
from gated_attn.adapt.quantize import SCHEMES, RoundedCache, linear_layers, quantized
from gated_attn.adapt.shares import in_front
from gated_attn.adapt.sinks import absorb_sink
from gated_attn.errors import SpecError
from gated_attn.hf import gates
from gated_attn.hf.attach import attach
from gated_attn.measure.texts import python_help
from tests.hf import tiny
from tests.hf.tiny import spread, wake

IDS = torch.randint(6, 90, (3, 11), generator=torch.Generator().manual_seed(4))
CAUSAL = ["llama", "mistral", "qwen3", "gemma2", "gpt_oss", "gemma3", "olmo2", "cohere", "phi", "phi3", "gptj", "gpt2"]
CAUSAL += ["gpt_neox", "opt"]
EPS = torch.finfo(torch.float32).eps


def linear(weight_OI: list[list[float]], kind: str = "linear") -> Any:
    weight = torch.tensor(weight_OI)
    layer = nn.Linear(*weight.shape[::-1], bias=False) if kind == "linear" else Conv1D(*weight.shape)
    layer.weight.data.copy_(weight if kind == "linear" else weight.T)
    return nn.Sequential(layer)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_layer_by_hand(kind: str) -> None:
    """Rows have scales 0.01 and 0.1, so 0.256 -> 0.26 and 2.56 -> 2.6; inputs as the comments say."""
    model = linear([[1.27, 0.256, 0.0], [12.7, 0.0, 2.56]], kind)
    x_TI = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.506, 2.54]])

    def out(scheme: str, largest: float) -> list[list[float]]:
        with torch.no_grad(), quantized(model, scheme, calibration=[{"input": torch.tensor([[largest, 0.0, 0.0]])}]):
            return model(x_TI).tolist()

    def near(*rows: tuple[float, float]) -> list[Any]:
        return [pytest.approx(row, rel=4 * EPS, abs=0) for row in rows]

    # Range 2.54: a scale of 0.02, which takes 1.0 -> 1.0, 0.506 -> 0.5, 2.54 -> 2.54.
    assert out("w8a8-static", 2.54) == near((1.27, 12.7), (0.13, 6.604))
    # Range 1.27: a scale of 0.01, which takes 0.506 -> 0.51 and cuts 2.54 to 1.27.
    assert out("w8a8-static", -1.27) == near((1.27, 12.7), (0.1326, 3.302))
    # Each token's own range: 1.0 / 127 leaves 1.0, 2.54 / 127 takes 0.506 -> 0.5.
    assert out("w8a8-dynamic", 9.0) == near((1.27, 12.7), (0.13, 6.604))
    # Groups of 3 with 7 steps: 0.256 -> 1.27 / 7 and 2.56 -> 12.7 / 7; the input stays.
    assert out("w4a16", 9.0) == near((1.27, 12.7), (0.506 * 1.27 / 7, 2.54 * 12.7 / 7))
    assert out("none", 9.0) == model(x_TI).tolist()


@pytest.mark.parametrize("name", CAUSAL)
def test_the_control_is_the_plain_model_and_everything_comes_back_bit_for_bit(name: str) -> None:
    model = spread(tiny.build(name)).train()
    if name == "gptj":
        model = model.bfloat16()
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    before = {module: (type(module), module.training, set(module.__dict__)) for module in model.modules()}

    def logits() -> Tensor:
        with torch.no_grad():
            return model.eval()(IDS, use_cache=False).logits

    plain, found = logits(), {}
    model.train()
    for scheme in SCHEMES:
        with quantized(model, scheme, calibration=[{"input_ids": IDS, "use_cache": False}]):
            assert model.training, "calibration leaves the mode"
            found[scheme] = logits()
            model.train()
        with pytest.raises(KeyError, match="within"), quantized(model, scheme, calibration=[{"input_ids": IDS}]):
            raise KeyError("within")
    assert torch.equal(found.pop("none"), plain)
    assert all(not torch.equal(value, plain) for value in found.values())
    assert not torch.equal(found["w8a8-static"], found["w8a8-dynamic"])
    assert {module: (type(module), module.training, set(module.__dict__)) for module in model.modules()} == before
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def test_gates_and_the_output_head_are_in_full_precision() -> None:
    """What they are given and what they hold: only their input differs, as all of the model's does."""
    model = wake(attach(spread(tiny.build("llama", impl="sdpa")), "output:headwise:sigmoid"))
    inside = {one for gate in gates(model).values() for one in gate.modules()} | {model.get_output_embeddings()}
    held = {key: value.clone() for one in inside for key, value in one._parameters.items() if value is not None}
    assert held
    assert len(linear_layers(model)) == 2 * 7
    for scheme in SCHEMES[1:]:
        with quantized(model, scheme, calibration=[{"input_ids": IDS}]):
            assert not any(type(one).__name__.startswith("Rounded") for one in inside)
            now = {key: value for one in inside for key, value in one._parameters.items() if value is not None}
            assert all(torch.equal(now[key], value) for key, value in held.items())
            for layer in linear_layers(model):  # none is wider than a group of 64
                steps = layer.weight / layer.weight.abs().amax(1, keepdim=True) * (7 if scheme == "w4a16" else 127)
                torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)


def test_layers_that_share_a_weight_round_it_once() -> None:
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    model[1].weight = model[0].weight
    kept = model[0].weight.detach().clone()
    with quantized(model, "w4a16"):
        shared = model[0].weight.detach().clone()
    with quantized(model[0:1], "w4a16"):
        assert torch.equal(model[0].weight, shared)
    assert torch.equal(model[0].weight, kept)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        return self.spare(x) if spare else self.used(x)


def test_a_layer_that_no_calibration_batch_reached_is_refused_when_it_runs() -> None:
    """Its range would be 0, and all that it is given with it."""
    model, x = TwoLayers(), torch.ones(2, 3)
    with torch.no_grad(), quantized(model, "w8a8-static", calibration=[{"x": x}]):
        assert torch.isfinite(model(x)).all()
        with pytest.raises(SpecError, match="no calibration batch reached the linear layer 'spare'"):
            model(x, spare=True)
    # A layer that saw zeros alone was reached; an expert without tokens was not.
    with torch.no_grad(), quantized(model, "w8a8-static", calibration=[{"x": torch.zeros(2, 3)}, {"x": x[:0]}]):
        assert torch.equal(model(torch.zeros(2, 3)), model.used.bias.expand(2, 3))


def test_layers_whose_weight_cannot_be_rounded_in_place_are_refused() -> None:
    model = TwoLayers()
    with quantized(model, "w4a16"):
        rounded = model.used.weight.detach().clone()
        with pytest.raises(SpecError, match="'used' is rounded already"), quantized(model, "none"):
            pass
        assert torch.equal(model.used.weight, rounded), "the outer one goes on"
        assert torch.isfinite(model(torch.ones(2, 3))).all()
    nn.utils.parametrizations.weight_norm(model.used)
    with pytest.raises(SpecError, match="weight of 'used' is computed"), quantized(model, "w4a16"):
        pass
    model = TwoLayers()
    model.spare.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(SpecError, match=r"weight of 'spare' is torch\.int8"), quantized(model, "w4a16"):
        pass
    assert type(model.used) is nn.Linear


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_rounded_cache_in_generate(name: str) -> None:
    """Kept tokens are exact; rounded ones are those of one forward over the same text, wherever it was cut."""
    model = spread(tiny.build(name, impl="sdpa"))
    word, options = cache_word(model), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS, **options)
    assert torch.equal(model.generate(IDS, **options, **{word: RoundedCache(4, keep=99)}), plain)
    cache = RoundedCache(4, keep=2)
    text = model.generate(IDS, **options, **{word: cache})[:, :-1]
    whole, exact = RoundedCache(4, keep=2), DynamicCache()
    with torch.no_grad():
        for one in (whole, exact):
            model(text, use_cache=True, **{word: one})
    # The first layer's inputs are the tokens themselves, so its cache is not changed by what was rounded before.
    got, want, bare = (one.layers[0].keys for one in (cache, whole, exact))
    assert got.shape == want.shape == bare.shape
    torch.testing.assert_close(got[:, :, :2], bare[:, :, :2])
    steps = (got[:, :, 2:] / got[:, :, 2:].abs().amax(-1, keepdim=True)) * 7
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-5)
    assert (got - want).abs().max() <= bare.abs().max() / 7, "at most a step, where rounding was a tie"
    assert ((got - want).abs() > 1e-4).float().mean() < 0.01
    assert (got - bare).abs().max() > 0.01


def test_a_rounded_cache_of_too_few_bits_is_refused() -> None:
    for bits, keep in ((1, 0), (8, -1)):
        with pytest.raises(SpecError, match=f"got bits={bits}, keep={keep}"):
            RoundedCache(bits, keep)


@pytest.mark.slow
def test_what_rounding_costs_smollm2_with_its_sink_token_and_with_the_sink_absorbed() -> None:
    if samples.cached()["smollm2"] is None:
        pytest.skip("sample smollm2 is not cached: run python -m gated_attn.samples fetch smollm2")
    from gated_attn.hf.pretrained import load_sample, tokenizer

    model, words = load_sample("smollm2"), tokenizer("smollm2")
    ids = torch.tensor(words(python_help(), add_special_tokens=False, verbose=False)["input_ids"])
    rows = ids[: len(ids) // 256 * 256].view(-1, 256)
    ranges, held_out, bos = rows[:4], rows[-6:], words.bos_token_id
    found: dict[tuple[str, str], float] = {}
    for label, first in (("sink in front", bos), ("sink absorbed", None)):
        if first is None:
            absorb_sink(model, bos)
        for scheme in SCHEMES:
            with quantized(model, scheme, calibration=[in_front(ranges, first)]):
                found[label, scheme] = nll(model, held_out, first=first).perplexity
        print(f"\n{label}: " + ", ".join(f"{scheme} {found[label, scheme]:.3f}" for scheme in SCHEMES))
    for label in ("sink in front", "sink absorbed"):
        assert found[label, "w8a8-dynamic"] < 1.1 * found[label, "none"]
    assert found["sink absorbed", "none"] == pytest.approx(found["sink in front", "none"], rel=1e-4)
    assert found["sink in front", "w8a8-static"] > 1.5 * found["sink in front", "none"]
    cost = {label: found[label, "w8a8-static"] / found[label, "none"] for label in ("sink in front", "sink absorbed")}
    assert cost["sink absorbed"] < cost["sink in front"] - 0.3
