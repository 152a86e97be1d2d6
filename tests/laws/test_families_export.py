"""Law 1, exported: programs of `torch.export` are gated for every family whose stock model exports, at sizes of the stock one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gated_attn.hf.attach import attach
from tests.hf.tiny import TINY, wake
from tests.laws.test_families import DECODERS, EAGER_ONLY, SEQUENCE, batch, build, run

SPECS = ["output:elementwise:sigmoid,fill", "dense:elementwise:sigmoid"]
AXES = {"input_ids": (0, 1), "attention_mask": (0, 1), "decoder_input_ids": (0, 1), "input_values": (0, 1)}
"""Axes that may vary: batch, and length where a model takes several; of other inputs the batch alone."""
SHORTER = {"input_ids": 7, "attention_mask": 7, "decoder_input_ids": 3, "input_values": 371}
KINDS: dict[str, tuple[int, ...]] = {"batch and length": (0, 1), "length": (1,), "batch": (0,), "no axis": ()}


def made(name: str) -> Any:
    """The model of the laws; in float32 where attention is, whose float64 masks are infinite there."""
    model = build(name)
    if name == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # the others ask for the values of the router
    return model.float() if name in EAGER_ONLY else model


def extra(name: str) -> dict[str, bool]:
    return {"use_cache": False} if name in (*DECODERS, *SEQUENCE, "whisper") else {}


def export(model: Any, name: str, free: tuple[int, ...]) -> Any:
    """The exported program with these axes free, or an error if one of them is not."""
    inputs = batch(name, "left" if name in DECODERS else "right")
    shapes = {
        key: {axis: torch.export.Dim.DYNAMIC for axis in AXES.get(key, (0,)) if axis in free} for key in inputs
    } | dict.fromkeys(extra(name))
    return torch.export.export(model, (), inputs | extra(name), dynamic_shapes=shapes, strict=False).module()


def other(name: str, free: tuple[int, ...]) -> dict[str, Tensor]:
    """Other values than those that were exported with, and three rows and fewer columns where that is free."""
    inputs = {key: value.flip(0) for key, value in batch(name, "left" if name in DECODERS else "right").items()}
    for key, value in inputs.items():
        rows = torch.cat([value, value.flip(-1)[:1]]) if 0 in free else value
        inputs[key] = rows[:, -SHORTER[key] :] if 1 in free and key in SHORTER else rows
    return inputs


def off(program: Any, model: Any, name: str, free: tuple[int, ...]) -> tuple[float, float]:
    """(largest difference from eager, largest number), over all outputs, at the other inputs."""
    inputs = other(name, free) | extra(name)
    got = [t for t in program(**inputs).to_tuple() if isinstance(t, Tensor)]
    want = run(model, inputs)
    assert [t.shape for t in got] == [t.shape for t in want]
    assert all(bool(torch.isfinite(t).all()) for t in got)
    return (
        max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)),
        max(float(t.abs().max()) for t in want),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_programs_of_every_family_are_gated(name: str) -> None:
    stock, reasons = made(name), []
    for kind, free in KINDS.items():
        try:
            error, _ = off(export(stock, name, free), stock, name, free)
            break
        except Exception as found:  # what does not export fails in many ways
            reasons.append(f"{kind}: {type(found).__name__} {str(found)[:200]}")
    else:
        pytest.skip(f"the stock model does not export: {'; '.join(reasons)}")
    plain = run(stock, other(name, free) | extra(name))
    for spec in SPECS:
        model = wake(attach(made(name), spec))
        assert any(
            not torch.equal(a, b) for a, b in zip(run(model, other(name, free) | extra(name)), plain, strict=True)
        )
        gated, size = off(export(model, name, free), model, name, free)
        assert gated <= 2 * error + torch.finfo(stock.dtype).eps * size, (spec, kind)
