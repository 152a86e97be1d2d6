"""The package's front door: few names, nothing heavy, types shipped."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gated_attn


def test_the_public_nouns_are_pinned() -> None:
    assert sorted(gated_attn.__all__) == [
        "Gate", "GateSpec", "GatedAttention", "GatedAttnError", "GatedMultiheadAttention", "attach", "detach", "explain",
        "gated_attention", "verify",
    ]  # fmt: skip
    assert len(gated_attn.__all__) <= 10
    for name in gated_attn.__all__:
        assert getattr(gated_attn, name).__name__ == name
        assert name in dir(gated_attn)


def test_the_names_for_other_peoples_models() -> None:
    import gated_attn.hf as hf

    assert sorted(hf.__all__) == [
        "GateDecay", "GateMonitor", "GateWarmup", "count", "gates", "load_gates", "load_pretrained", "lora_targets", "native_gates",
        "param_groups", "roles", "save_gates", "sharding_plan",
    ]  # fmt: skip
    for name in hf.__all__:
        assert getattr(hf, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'gatez'; it has GateDecay"):
        _ = hf.gatez  # type: ignore[attr-defined]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Gates'; it has Gate, GateSpec"):
        _ = gated_attn.Gates  # type: ignore[attr-defined]


def test_the_version_is_the_distributions() -> None:
    assert gated_attn.__version__ == importlib.metadata.version("gated-attn")


def test_types_are_shipped() -> None:
    assert (Path(gated_attn.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("blocked", ["transformers", "accelerate", "typer", "rich", "jinja2", "yaml"])
def test_the_core_works_without_the_optional_packages(blocked: str) -> None:
    code = (
        f"import sys; sys.modules[{blocked!r}] = None\n"
        "import torch, gated_attn, gated_attn.models, gated_attn.measure.decoder, gated_attn.records, gated_attn.samples\n"
        "print(tuple(gated_attn.GatedAttention(8, 2, gate='paper')(torch.ones(1, 3, 8)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1, 3, 8)"
