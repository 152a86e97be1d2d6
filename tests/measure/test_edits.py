"""Heads that are scaled or whose gates are set: in every family, exactly, and gone afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gated_attn import attach
from gated_attn.errors import SpecError, UnsupportedError
from gated_attn.hf.attach import gates
from gated_attn.measure.capture import attention_modules
from gated_attn.measure.edits import gated_to, out_of, scaled, width_of
from tests.hf import test_native, tiny
from tests.hf.tiny import TINY, spread, wake
from tests.measure.test_capture import batch

HERE = "model.layers.1.self_attn"
NATIVE = [name for name in test_native.CASES if name != "qwen4_exp"]


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(one for one in model(**inputs).to_tuple() if isinstance(one, Tensor))


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def every_head(model: nn.Module, names: Any, factor: float) -> dict[tuple[str, int], float]:
    rows = attention_modules(model)
    return {(name, head): factor for name in names for head in range(width_of(rows[name])[0])}


def projected(model: nn.Module, name: str, inputs: dict[str, Tensor]) -> tuple[nn.Module, list[Tensor]]:
    """The out projection of a module, and what it gives in each call."""
    found: list[Tensor] = []
    out = out_of(model, attention_modules(model)[name])
    hook = out.register_forward_hook(lambda _, args, y: found.append(y))
    outputs(model, inputs)
    hook.remove()
    return out, found


def check_laws(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """1 changes no bit, 0 leaves the bias, something between changes the output, and nothing stays."""
    want = outputs(model, inputs)
    names = list(attention_modules(model))
    with scaled(model, every_head(model, names, 1.0)):
        assert same(outputs(model, inputs), want)
    with scaled(model, {(names[0], 1): 0.5}):
        assert not same(outputs(model, inputs), want)
    for name in names:
        with scaled(model, every_head(model, [name], 0.0)):
            out, given = projected(model, name, inputs)
        bias = getattr(out, "bias", None)
        wanted = torch.zeros(()) if not isinstance(bias, Tensor) else bias
        assert given
        assert torch.equal(given[0], wanted.expand_as(given[0]))
    assert same(outputs(model, inputs), want)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", TINY)
def test_every_family(name: str) -> None:
    check_laws(spread(tiny.build(name)), batch(name))


@pytest.mark.parametrize("name", NATIVE)
def test_every_family_with_gates_of_its_own(name: str) -> None:
    check_laws(spread(test_native.build(name), only="o_proj"), {"input_ids": torch.arange(2 * 9).view(2, 9) + 3})


@pytest.mark.parametrize("spec", ["output:elementwise", "value:headwise", "dense:elementwise"])
def test_an_attached_gate_stays_in_force(spec: str) -> None:
    model, inputs = wake(attach(spread(tiny.build("llama")), spec)), batch("llama")
    want = outputs(model, inputs)
    with scaled(model, every_head(model, [HERE], 1.0)):
        assert same(outputs(model, inputs), want)
    with scaled(model, every_head(model, [HERE], 0.0)):
        _, given = projected(model, HERE, inputs)
    assert not given[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_factor_is_an_output_gate_of_that_value(dtype: torch.dtype) -> None:
    inputs = batch("llama")
    bare = spread(tiny.build("llama")).to(dtype)
    gated = attach(spread(tiny.build("llama")).to(dtype), "output:headwise:2sigmoid,init=identity")
    want = outputs(bare, inputs)
    assert same(outputs(gated, inputs), want)
    with scaled(bare, {(HERE, 2): 0.25}), gated_to(gated, {(HERE, 2): 0.25}):
        changed = outputs(bare, inputs)
        assert not same(changed, want)
        assert same(outputs(gated, inputs), changed)


@pytest.mark.parametrize("spec", ["output:headwise", "output:elementwise", "output:shared", "output:headwise,fill",
                                  "output:headwise,source=constant", "output:headwise,op=add", "weights:headwise"])  # fmt: skip
def test_a_gate_is_set(spec: str) -> None:
    model, inputs = wake(attach(spread(tiny.build("llama")), spec)), batch("llama")
    want, seen = outputs(model, inputs), []
    with gated_to(model, {(HERE, 3): 0.75}):
        hook = gates(model)[f"{HERE}.attn_gate"].register_forward_hook(lambda _, args, out: seen.append(out))
        assert not same(outputs(model, inputs), want)
        hook.remove()
    assert torch.equal(seen[0][:, :, 3], torch.full_like(seen[0][:, :, 3], 0.75))
    assert not (seen[0][:, :, 2] == 0.75).any()
    assert same(outputs(model, inputs), want)


def test_a_gate_set_to_zero_with_a_fill_leaves_the_fill() -> None:
    model, inputs = wake(attach(spread(tiny.build("llama")), "output:headwise,fill")), batch("llama")
    with gated_to(model, every_head(model, [HERE], 0.0)):
        out, given = projected(model, HERE, inputs)
    fill_HE = gates(model)[f"{HERE}.attn_gate"].fill_HE
    torch.testing.assert_close(given[0], out(fill_HE.flatten()).expand_as(given[0]))


def test_of_a_module_that_layers_share_one_call_is_changed() -> None:
    model, inputs = spread(tiny.build("albert")), batch("albert")
    (name,) = attention_modules(model)
    _, plain = projected(model, name, inputs)
    for call, changed in ((name, 0), (f"{name}#1", 1)):
        with scaled(model, {(call, 0): 0.0}):
            _, given = projected(model, name, inputs)
        assert [torch.equal(*pair) for pair in zip(given, plain, strict=True)] == [i < changed for i in range(2)]
    one_more = scaled(model, {(f"{name}#2", 0): 0.0})
    with pytest.raises(SpecError, match=r"is called 2 times in one pass, so the last is .*#1"), one_more:
        outputs(model, inputs)


def test_an_infinite_head_can_be_shut() -> None:
    model, inputs = spread(tiny.build("llama")), batch("llama")
    model.model.layers[0].self_attn.v_proj.weight.data[:10] = torch.inf  # key/value head 0: heads 0 and 1
    with scaled(model, {("model.layers.0.self_attn", 0): 0.0, ("model.layers.0.self_attn", 1): 0.0}):
        assert all(one.isfinite().all() for one in outputs(model, inputs)[:1])


def test_decoding_with_a_cache_is_changed_in_every_step() -> None:
    model, ids = spread(tiny.build("llama")), batch("llama")["input_ids"]
    with scaled(model, {(HERE, 1): 0.0}), torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :5], use_cache=True)
        word = "cache" if "cache" in first else "past_key_values"
        rest = model(ids[:, 5:], **{word: first[word]}).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole)


def test_what_is_not_there_is_named() -> None:
    model = spread(tiny.build("llama"))
    for factors, message in (
        ({("model.layers.1.self_atn", 0): 0.0}, r"no attention module .*did you mean 'model.layers.1.self_attn'"),
        ({(HERE, 4): 0.0}, "has heads 0 to 3, and no head 4"),
        ({(HERE, -1): 0.0}, "no head -1"),
        ({(HERE, 0): float("nan")}, "nan is no finite number"),
    ):
        with pytest.raises(SpecError, match=message), scaled(model, factors):
            pass
    for spec, reason in (
        (None, "has no attached gate; scale the head instead"),
        ("value:headwise", "is not on the heads' outputs"),
        ("output:headwise,source=lse,bias=1", "is read from the scores"),
    ):
        gated = spread(tiny.build("llama")) if spec is None else attach(spread(tiny.build("llama")), spec)
        with pytest.raises(UnsupportedError, match=reason), gated_to(gated, {(HERE, 0): 0.0}):
            pass
