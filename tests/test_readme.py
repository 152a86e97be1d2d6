"""The README is true: its code prints what it says, its commands exist, its specs parse."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gated_attn.cli.app import app
from gated_attn.presets import PRESETS
from gated_attn.spec import GateSpec

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL)


def test_every_python_block_has_its_printout() -> None:
    assert len(BLOCKS) == README.count("```python") >= 1


@pytest.mark.parametrize(("code", "printed"), BLOCKS)
def test_code_prints_what_the_readme_says(code: str, printed: str) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, "README.md", "exec"), {})
    assert shown.getvalue() == printed


def test_the_first_40_lines_hold_the_essentials() -> None:
    top = "\n".join(README.splitlines()[:40])
    for essential in ("make demo", "make test", "```python", "```text", "2505.06708"):
        assert essential in top
    assert top.count("```") == 4, "code and printout end by line 40"


def test_make_targets_and_commands_exist() -> None:
    targets = re.findall(r"^    make ([\w-]+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    for command in set(re.findall(r"`gated-attn (\w+)", README)):
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_every_spec_in_the_tables_parses() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| `([^`]+)` \|", README, re.MULTILINE)
    assert len(rows) >= 7
    for preset, spec in rows:
        assert str(GateSpec.parse(preset)) == spec
        assert preset in PRESETS
