"""`GateTrainer`: transformers.Trainer with a parameter group for gates, a fixed data order and checkpoints that are whole.

Everything else (the loop, progress bar, resume, mixed precision, accumulation, several processes) is Trainer's own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerControl

from gated_attn.errors import RecipeError, TrainingError
from gated_attn.gate import Gate
from gated_attn.models.decoder import IGNORED, Decoder
from gated_attn.train.data import Item
from gated_attn.train.recipe import OptimizerTable, Recipe

PATIENCE = 20
"""A run whose loss is worse than guessing for this many batches in a row has diverged."""


class WholeTrainer(Trainer):
    """Trainer whose data come in their own order and whose checkpoints appear by one rename, whole; the last two stay.

    `weights` is the file of a checkpoint that holds what was trained.
    """

    weights = "model.safetensors"
    optimizer: torch.optim.Optimizer | None
    control: TrainerControl

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for callback in (PrinterCallback, *(() if sys.stderr.isatty() else (ProgressCallback,))):
            self.remove_callback(callback)

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        """In order: the data set itself is the random order, drawn from the seed."""
        return SequentialSampler(self.train_dataset)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint beside its place and rename it; keep the last two."""
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            staged = staging(self.args.output_dir)
            for folder in staged.iterdir():
                target = Path(self.args.output_dir) / folder.name
                shutil.rmtree(target, ignore_errors=True)
                os.replace(folder, target)
            staged.rmdir()
            for old in checkpoints(self.args.output_dir, self.weights)[:-2]:
                shutil.rmtree(old)

    def _get_output_dir(self, trial: Any) -> str:
        return str(staging(str(self.args.output_dir)))


class GateTrainer(WholeTrainer):
    """Trainer for a `Decoder` on data whose order is fixed; see `train` for the arguments it is given."""

    def __init__(
        self, model: Decoder, recipe: Recipe, data: Dataset[Item], held_out: list[Tensor], args: TrainingArguments
    ) -> None:
        super().__init__(model=model, args=args, train_dataset=data, eval_dataset=held_out)
        self.recipe, self.held_out = recipe, held_out
        self.worse = 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            table = self.recipe.optimizer
            groups = parameter_groups(self.model, table)
            self.optimizer = torch.optim.AdamW(groups, lr=table.lr, betas=(table.beta1, table.beta2))
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._check(float(loss) * self.args.gradient_accumulation_steps)
        return loss

    def _check(self, loss: float) -> None:
        step = self.state.global_step + 1
        if not math.isfinite(loss):
            raise TrainingError(
                step,
                f"the loss is {loss}; lower optimizer.lr (it is {self.recipe.optimizer.lr:g}) or lengthen "
                "the warm-up. Checkpoints up to the last whole one are kept",
            )
        guessing = math.log(self.model.decoder_config.vocab_size) + 1.0
        self.worse = self.worse + 1 if loss > guessing else 0
        if self.worse >= PATIENCE:
            raise TrainingError(
                step,
                f"the loss, {loss:.2f}, was worse than guessing ({guessing - 1:.2f}) by more than 1 nat for "
                f"{PATIENCE} batches in a row; lower optimizer.lr (it is {self.recipe.optimizer.lr:g})",
            )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Validation loss, nats per token over all held-out tokens."""
        metrics = {f"{metric_key_prefix}_loss": evaluate(self.model, self.held_out, self.args.device)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class LineLog(TrainerCallback):
    """One line per logged step, for people (unless quiet) and as JSON lines; no carriage returns."""

    def __init__(self, path: Path, label: str, quiet: bool) -> None:
        self.path, self.label, self.quiet = path, label, quiet

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        if not self.quiet:
            shown = "  ".join(
                f"{key} {value:.4g}" for key, value in logs.items() if key in ("loss", "eval_loss", "learning_rate")
            )
            print(f"{self.label}: step {state.global_step}/{state.max_steps}  {shown}", flush=True)


class StopAfter(TrainerCallback):
    """Stop, with a checkpoint, after this many steps: what an interruption leaves behind."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.steps:
            control.should_save = control.should_training_stop = True


def arguments(recipe: Recipe, output: Path, seed: int) -> TrainingArguments:
    """Trainer's arguments for a recipe; `batch` is shared between the processes that torchrun or accelerate started."""
    table, optimizer = recipe.training, recipe.optimizer
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if table.batch % (table.accumulation * processes):
        raise RecipeError(
            f"training.batch={table.batch} does not divide into accumulation={table.accumulation} parts on {processes} "
            f"processes; use a multiple of {table.accumulation * processes}"
        )
    args = TrainingArguments(
        output_dir=str(output),
        max_steps=table.steps,
        per_device_train_batch_size=table.batch // (table.accumulation * processes),
        gradient_accumulation_steps=table.accumulation,
        learning_rate=optimizer.lr,
        lr_scheduler_type=optimizer.schedule,
        warmup_steps=round(optimizer.warmup * table.steps),
        max_grad_norm=optimizer.clip,
        logging_steps=table.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=table.eval_every,
        save_strategy="steps",
        save_steps=table.eval_every,
        bf16=table.precision == "bf16",
        seed=seed,
        data_seed=seed,
        disable_tqdm=not sys.stderr.isatty(),
        report_to=[],
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    if args.n_gpu > 1:
        args._n_gpu = 1  # one process, one GPU: DataParallel would multiply the batch; torchrun shares it
    return args


def parameter_groups(model: nn.Module, table: OptimizerTable) -> list[dict[str, Any]]:
    """Disjoint groups that cover every trainable parameter once: matrices, vectors (not decayed), gate weights, gate vectors."""
    inside_gates = {id(p) for module in model.modules() if isinstance(module, Gate) for p in module.parameters()}
    gate_decay = table.weight_decay if table.gate_weight_decay is None else table.gate_weight_decay
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((id(parameter) in inside_gates, parameter.dim() > 1), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": table.lr * (table.gate_lr_mult if is_gate else 1.0),
            "weight_decay": (gate_decay if is_gate else table.weight_decay) if is_matrix else 0.0,
            "name": f"{'gate ' if is_gate else ''}{'weights' if is_matrix else 'vectors'}",
        }
        for (is_gate, is_matrix), parameters in sorted(groups.items())
    ]


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Tensor], device: Any = None) -> float:
    """Sum of the negative log-likelihoods over the count of predicted tokens, nats per token; whatever the batch size."""
    was_training, total, counted = model.training, 0.0, 0
    model.eval()
    try:
        for tokens_BT in batches:
            labels = tokens_BT.clone()
            labels[:, 0] = IGNORED
            predicted = labels.numel() - len(labels)
            total += float(model(tokens_BT.to(device), labels=labels.to(device), num_items_in_batch=1).loss)
            counted += predicted
    finally:
        model.train(was_training)
    return total / counted


def staging(output: str | None) -> Path:
    """Where a checkpoint is written before it is whole."""
    return Path(output or ".") / "unfinished"


def checkpoints(output: str | Path | None, weights: str = WholeTrainer.weights) -> list[Path]:
    """Whole checkpoints of a run, oldest first; damaged ones are left out."""
    found = [path for path in Path(output or ".").glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return [path for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2])) if _whole(path, weights)]


def _whole(checkpoint: Path, weights: str) -> bool:
    """Whether the files that resuming reads are all there and can be opened."""
    try:
        with safe_open(checkpoint / weights, "pt"):
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError):
        return False
    return all(zipfile.is_zipfile(checkpoint / name) for name in ("optimizer.pt", "scheduler.pt"))


def newest_checkpoint(output: Path, weights: str = WholeTrainer.weights) -> str | None:
    """Where to resume from; what an interrupted save left is removed."""
    shutil.rmtree(staging(str(output)), ignore_errors=True)
    return next(map(str, reversed(checkpoints(output, weights))), None)
