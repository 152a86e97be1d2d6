"""The command line: light to start, one JSON object on request, one sentence and exit code 1 when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gated_attn.cli.app import app
from gated_attn.cli.compare import split_gates
from gated_attn.errors import GatedAttnError
from gated_attn.spec import ACTIVATIONS, POSITIONS

TINY = """
[model]
layers = 1
heads = 2
dim = 8
ffn_dim = 12
context = 8
[data]
task = "backcopy"
vocab_size = 11
triggers = 2
[training]
steps = 4
batch = 2
log_every = 2
eval_every = 2
eval_batches = 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def command(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from gated_attn.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    return done


def test_help_names_every_command_and_never_imports_torch() -> None:
    code = (
        "import sys; sys.argv = ['gated-attn', '--help']\n"
        "from gated_attn.cli import main\n"
        "try: main()\n"
        "finally: print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("[]")
    for name in ("compare", "train", "specs", "doctor"):
        assert name in done.stdout


def test_the_version_and_whole_summaries() -> None:
    assert invoke("--version").stdout == f"gated-attn {version('gated-attn')}\n"
    assert "..." not in invoke("--help").stdout.replace("COMMAND [ARGS]...", "")


def test_specs_lists_every_word_and_preset() -> None:
    text = invoke("specs").stdout
    for word in (*POSITIONS, *ACTIVATIONS, "nanogpt", "use_head_wise_attn_gate", "w_g", "attention_output_gate"):
        assert word in text
    found = json.loads(invoke("specs", "--json").stdout)
    assert {"name": "lfm3", "spec": "output:headwise:sigmoid", "used_by": "LFM3, use_attention_gate, g_proj"} in found[
        "presets"
    ]


def test_doctor_says_what_this_machine_can_do() -> None:
    found = json.loads(invoke("doctor", "--json").stdout)
    assert set(found) == {"versions", "devices", "attention", "threads", "samples"}
    assert found["versions"]["torch"].startswith("2.")
    assert "no backward pass on the CPU" in found["attention"]["flex"]
    assert "cpu" in found["devices"]
    assert "folder" in found["samples"]
    assert "sdpa" in invoke("doctor").stdout


def test_train_writes_a_record_and_resumes(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = json.loads(invoke("train", recipe, "--gate", "paper-headwise", "-o", folder, "--json").stdout)
    assert result == json.loads((folder / "run.json").read_text())
    text = invoke(
        "train", recipe, "--gate", "paper", "--seed", 5, "--set", "optimizer.lr=0.001", "-o", tmp_path / "other"
    ).stdout
    assert "validation loss" in text
    assert "gate on triggers" in text
    with pytest.raises(GatedAttnError, match="resume it"):
        invoke("train", recipe, "--gate", "paper-headwise", "-o", folder)
    invoke("train", recipe, "--gate", "paper-headwise", "-o", folder, "--resume")


def test_compare_prints_a_table_and_writes_the_report(recipe: Path, tmp_path: Path) -> None:
    arguments = (
        "compare",
        recipe,
        "--gates",
        "none,paper-headwise",
        "--seeds",
        2,
        "--match",
        "none",
        "-o",
        tmp_path / "out",
    )
    text = invoke(*arguments).stdout
    assert "paper-headwise" in text
    assert "2 seeds" in text
    report = (tmp_path / "out" / "report.html").read_text()
    assert "<html" in report
    assert "http://" not in report.replace("http://www.w3.org", "")
    found = json.loads(invoke(*arguments, "--json").stdout)
    assert {(row["gate"], row["seed"]) for row in found["rows"]} == {
        ("none", 1),
        ("none", 2),
        ("paper-headwise", 1),
        ("paper-headwise", 2),
    }
    needed = {
        "gate",
        "seed",
        "parameters",
        "loss",
        "bits_per_byte",
        "seconds_per_step",
        "first_token_share",
        "gate_mean",
        "max_abs",
    }
    assert all(needed <= set(row) for row in found["rows"])
    assert {"gate", "difference", "low", "high", "n"} <= set(found["paired"][0])
    assert found["paired"][0]["n"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("train", "shakespear"),
            ["unknown recipe 'shakespear'", "backcopy, demo, shakespeare", "did you mean 'shakespeare'?"],
        ),
        (("train", "RECIPE", "--gate", "papr"), ["'papr'", "presets: paper", "did you mean 'paper'?"]),
        (("train", "RECIPE", "--gate", "output:headwize"), ["unknown width 'headwize'", "did you mean 'headwise'?"]),
        (("train", "RECIPE", "--set", "optimizer.rate=1"), ["unknown key 'optimizer.rate'", "lr"]),
        (("train", "RECIPE", "--set", "model.head=4"), ["did you mean 'heads'?"]),
        (("train", "RECIPE", "--set", "name.lr=1"), ["name={'lr': 1}", "must be str"]),
        (("train", "RECIPE", "--set", "optimizer.lr=inf"), ["optimizer.lr=inf", "finite"]),
        (("train", "RECIPE", "--seed", "-1"), ["seed=-1", "from 0 to 4294967295"]),
        (("compare", "RECIPE", "--gates", ""), ["name the baseline and at least one gate"]),
        (("compare", "RECIPE", "--gates", "paper"), ["name the baseline and at least one gate"]),
        (("train", "RECIPE", "--set", "lr"), ["table.key=value"]),
        (("train", "RECIPE", "--resume"), ["nothing to resume"]),
        (("compare", "RECIPE", "--gates", "paper,paper"), ["different gates"]),
        (("compare", "RECIPE", "--gates", "none,paper,layers=0"), ["'layers=0' belongs to a spec", "';'"]),
        (("compare", "RECIPE", "--lr-sweep", "1,x"), ["--lr-sweep '1,x'", "such as 1,2,4,8"]),
        (("compare", "RECIPE", "--match", "heads"), ["unknown match 'heads'", "ffn, none"]),
    ],
)
def test_mistakes_are_one_message_and_exit_code_1(
    recipe: Path, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    shown = [str(recipe) if a == "RECIPE" else a for a in arguments]
    done = command(*shown, "-o", tmp_path / "out", code=1)
    assert done.stderr.startswith("gated-attn: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_folder_that_cannot_be_made_is_one_message(recipe: Path) -> None:
    done = command("train", recipe, "-o", "/dev/null/run", code=1)
    assert done.stderr.startswith("gated-attn: ")
    assert "/dev/null" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
@pytest.mark.parametrize("seconds", [0.0, 6.0])
def test_an_interrupt_ends_a_comparison_with_one_message(recipe: Path, tmp_path: Path, seconds: float) -> None:
    code = "from gated_attn.cli import main; main()"
    arguments = ["compare", str(recipe), "--gates", "none,paper", "--match", "none", "-o", str(tmp_path / "out")]
    running = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--set", "training.steps=100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert running.stdout is not None
    for _ in range(2):  # what each gate has is printed just before the processes start
        running.stdout.readline()
    time.sleep(seconds)
    os.killpg(running.pid, signal.SIGINT)
    _, shown = running.communicate(timeout=60)
    assert running.returncode == 130
    assert shown.startswith("gated-attn: stopped")
    assert "Traceback" not in shown


def test_a_loss_that_is_not_finite_ends_with_an_exit_code(recipe: Path, tmp_path: Path) -> None:
    done = command(
        "train", recipe, "--set", "optimizer.lr=1e30", "--set", "optimizer.clip=1e30", "-o", tmp_path / "run", code=1
    )
    assert "gated-attn: step " in done.stderr
    assert "the loss is nan" in done.stderr
    assert not (tmp_path / "run" / "run.json").exists()


def test_gates_with_commas_are_separated_by_semicolons() -> None:
    assert split_gates("none,paper") == ["none", "paper"]
    assert split_gates("none; output:headwise,in=12 ;blog") == ["none", "output:headwise,in=12", "blog"]
