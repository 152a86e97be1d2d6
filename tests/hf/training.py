"""Training runs that last seconds, for the tests of callbacks: data, a gated model, a Trainer, and one without Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from gated_attn.hf.attach import attach
from gated_attn.hf.groups import gate_parameters, param_groups
from tests.hf import tiny

AWAKE = "output:headwise,bias=0.3,std=0.9"
VOCAB = 61
ROOT = Path(__file__).parents[2]


class Chain(Dataset[dict[str, Tensor]]):
    """The next token follows from the current one alone, so that attention's context is useless."""

    def __init__(self, padding: int = 0) -> None:
        self.padding = padding

    def __len__(self) -> int:
        return 640

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = [i % 53 + 3]
        for _ in range(10):
            tokens.append((7 * tokens[-1] + 3) % 58 + 3)
        ids = torch.tensor(tokens)
        if not self.padding:
            return {"input_ids": ids, "labels": ids}
        mask = torch.ones(11, dtype=torch.long)
        mask[: self.padding] = 0
        return {"input_ids": ids, "labels": ids.where(mask.bool(), -100), "attention_mask": mask}


def llama(spec: str = AWAKE, **changes: Any) -> nn.Module:
    """A gated model, as it is when made, whose sizes are other than those of the other tests."""
    sizes = {"hidden_size": 44, "intermediate_size": 37, "vocab_size": VOCAB}
    return attach(tiny.build("llama", seed=5, **sizes | changes).train(), spec)


def trainer(
    model: nn.Module, folder: Path, steps: int, *callbacks: TrainerCallback, data: Any = None, **changes: Any
) -> Trainer:
    groups = {key: changes.pop(key) for key in ("gate_lr_mult", "weight_decay", "gate_weight_decay") if key in changes}
    settings: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant", "logging_steps": 1000,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    settings |= changes
    optimizer = torch.optim.AdamW(param_groups(model, settings["learning_rate"], **groups))
    made = Trainer(
        model, TrainingArguments(str(folder), **settings), train_dataset=data or Chain(), callbacks=list(callbacks),
        optimizers=(optimizer, None),
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def measured(run: Trainer) -> dict[int, dict[str, float]]:
    """Step -> what the monitor logged, without the prefix of the names."""
    rows = [row for row in run.state.log_history if any(key.startswith("gate/") for key in row)]
    return {
        row["step"]: {k.removeprefix("gate/model.layers."): v for k, v in row.items() if k.startswith("gate/")}
        for row in rows
    }


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the monitor warned of."""
    return [record.getMessage() for record in caplog.records if record.name == "gated_attn.hf.monitor"]


def no_further_off(got: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> None:
    """Law 5: at most twice as far from what float64 gives as `plain`, the plain way in float32, and one rounding."""
    size = max(float(one.abs().max()) for one in exact)
    error = max(float((one - other).abs().max()) for one, other in zip(plain, exact, strict=True))
    for one, other in zip(got, exact, strict=True):
        assert (one - other).abs().max() <= 2 * error + torch.finfo(torch.float32).eps * size


def by_kind(logs: Iterable[dict[str, float]]) -> dict[str, Tensor]:
    """`mean`, `change`, ... -> what the monitor logged of all gates in all steps."""
    found: dict[str, list[float]] = {}
    for row in logs:
        for key, value in row.items():
            if key != "step":
                found.setdefault(key.rpartition("/")[2], []).append(value)
    return {kind: torch.tensor(values, dtype=torch.float64) for kind, values in found.items()}


def same_numbers(
    got: Iterable[dict[str, float]], plain: Iterable[dict[str, float]], exact: Iterable[dict[str, float]]
) -> None:
    """`no_further_off` for what the monitor logged, each kind of number in units of its largest."""
    wanted = by_kind(exact)
    units = {kind: values.abs().max() if values.any() else torch.tensor(1.0) for kind, values in wanted.items()}
    no_further_off(*([by[kind] / units[kind] for kind in units] for by in (by_kind(got), by_kind(plain), wanted)))


class Spy(TrainerCallback):
    """Whether the gates' gradients are there when the optimizer steps, and their values after every step."""

    def __init__(self) -> None:
        self.none: list[bool] = []
        self.values: list[Tensor] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.none.append(all(p.grad is None for p in gate_parameters(model).values()))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.values.append(torch.cat([p.detach().flatten().clone() for p in gate_parameters(model).values()]))


def batches() -> list[Tensor]:
    return [torch.stack([Chain()[8 * step + i]["input_ids"] for i in range(8)]) for step in range(3)]


class State:
    """What callbacks read of a TrainerState."""

    def __init__(self) -> None:
        self.global_step, self.is_world_process_zero = 0, True
        self.stateful_callbacks: dict[str, Any] = {}
        self.log_history: list[dict[str, float]] = []


def steps(wrapped: nn.Module, model: nn.Module, rows: list[Tensor], *callbacks: Any) -> list[dict[str, float]]:
    """AdamW steps with the calls that Trainer makes."""
    optimizer = torch.optim.AdamW(param_groups(model, 1e-2, weight_decay=0.1, gate_lr_mult=3, gate_weight_decay=0.2))
    state = State()
    for callback in callbacks:
        callback.on_train_begin(None, state, None, model=model)
    for tokens in rows:
        for callback in callbacks:
            callback.on_step_begin(None, state, None, model=model)
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        for callback in callbacks:
            callback.on_pre_optimizer_step(None, state, None, model=model)
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        for callback in callbacks:
            callback.on_step_end(None, state, None, model=model)
    return state.log_history


# torch 2.13 aborts now and then while the interpreter shuts down after gloo ("terminate called without an active exception"), with
# a bare fully_shard as well; so a process that has come to its end leaves without that.
LEAVE = """
import os
torch.distributed.barrier()
os._exit(0)
"""


def launch(folder: Path, code: str, processes: int, *words: str) -> None:
    """Run the code in several processes; it finds the tests as `tests` and the words from `sys.argv[1]` on."""
    script = folder / "script.py"
    script.write_text(code + LEAVE)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", str(script), *words,
    ]  # fmt: skip
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
