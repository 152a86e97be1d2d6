"""Every example runs, says what it shows, and is short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
SAYS = {
    "swap_into_torch_encoder.py": "identity gates changed the output by",
    "decode_with_cache.py": "24 tokens cached, largest difference",
}


def test_every_example_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len((FOLDER / name).read_text().splitlines()) <= 60
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert SAYS[name] in shown
    largest = float(shown.split(SAYS[name])[1].split()[0])
    assert largest < 1e-5
