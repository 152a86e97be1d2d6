"""Tokens per second of the training entry (transformers.Trainer) against a plain loop over the same model and data.

The two take turns step by step in one process on one thread, so that both meet the same machine. Evaluation and checkpoints,
which the plain loop has none of, are left out; logging is in.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import results
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from gated_attn.models import Decoder
from gated_attn.train.data import datasets
from gated_attn.train.initialise import initialise, plan
from gated_attn.train.recipe import Recipe
from gated_attn.train.trainer import GateTrainer, LineLog, arguments, parameter_groups

STEPS, WARMUP = 60, 6
GATES = ("none", "paper")


def plain_loop(recipe: Recipe, gate: str) -> Iterator[None]:
    """The loop one would write by hand: one training step per `next`."""
    seed, table = recipe.training.seed, recipe.optimizer
    model = initialise(Decoder(plan(recipe, gate).config), seed, recipe.model.ffn_dim)
    optimizer = torch.optim.AdamW(parameter_groups(model, table), lr=table.lr, betas=(table.beta1, table.beta2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.training.steps)
    for step, batch in enumerate(DataLoader(datasets(recipe, seed)[0], batch_size=recipe.training.batch)):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), table.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % recipe.training.log_every == 0:
            loss.item()
        yield


class TakeTurns(TrainerCallback):
    """After each of Trainer's steps, time it and one step of the other loop."""

    def __init__(self, other: Iterator[None]) -> None:
        self.other = other
        self.pairs: list[tuple[float, float]] = []
        self.resumed = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        paused = time.perf_counter()
        next(self.other)
        done = time.perf_counter()
        self.pairs.append((paused - self.resumed, done - paused))
        self.resumed = time.perf_counter()


def main() -> None:
    torch.set_num_threads(1)
    recipe = Recipe.load("shakespeare")
    table = recipe.training
    recipe = replace(recipe, training=replace(table, steps=STEPS, eval_every=STEPS, eval_batches=1))
    for gate in GATES:
        with tempfile.TemporaryDirectory() as folder:
            data, held_out = datasets(recipe, table.seed)
            model = initialise(Decoder(plan(recipe, gate).config), table.seed, recipe.model.ffn_dim)
            trainer = GateTrainer(model, recipe, data, held_out, arguments(recipe, Path(folder), table.seed))
            turns = TakeTurns(plain_loop(recipe, gate))
            trainer.add_callback(LineLog(Path(folder) / "log.jsonl", gate, quiet=True))
            trainer.add_callback(turns)
            trainer.train()
        pairs = turns.pairs[WARMUP:]
        tokens = table.batch * recipe.model.context
        ours, theirs = (tokens / statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(plain / trainer for trainer, plain in pairs)
        results.append("train", f"shakespeare, {gate}", ours, theirs, "tokens/s", ratio, len(pairs))


if __name__ == "__main__":
    main()
