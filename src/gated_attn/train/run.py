"""`train`: the one training entry. Recipe, gate and seed in; checkpoints, a log and a `RunRecord` out."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_attn.codec import write_text
from gated_attn.errors import GatedAttnError, MissingExtraError, RecipeError
from gated_attn.measure.decoder import measure_decoder, sample_gates
from gated_attn.measure.environment import environment
from gated_attn.models.decoder import Decoder
from gated_attn.records import HistoryPoint, RunRecord
from gated_attn.spec import as_spec
from gated_attn.train.data import datasets, task_measures, token_texts
from gated_attn.train.initialise import Plan, initialise, plan
from gated_attn.train.recipe import Recipe

RECORD = "run.json"
LOG = "log.jsonl"
SAMPLE_TOKENS = 96
"""How many validation tokens the record keeps gates for, so that the report can draw them over the text."""


def train(
    recipe: Recipe,
    gate: str = "none",
    seed: int | None = None,
    output: str | Path = "runs/run",
    *,
    match: str = "none",
    resume: bool = False,
    stop_after: int | None = None,
    quiet: bool = False,
) -> RunRecord | None:
    """Train one decoder and measure it on the held-out data.

    Args:
        recipe: what to train, on what, for how long.
        gate: a gate spec or preset, or "none".
        seed: initialisation, data order and dropout; default the recipe's. Parameters that two gates share start alike.
        output: folder for checkpoints, `log.jsonl` and `run.json`.
        match: "ffn" narrows the feed-forward so that parameters match the ungated model's; "none" leaves it.
        resume: go on from the newest whole checkpoint in the folder; the losses are those of a run never interrupted. A run
            that is complete is not repeated: its record is returned.
        stop_after: stop with a checkpoint after this many steps, as an interruption would, and return None.

    Raises:
        RecipeError: the folder holds another run, or `resume` finds no checkpoint of this one.
        TrainingError: the loss is not finite, or worse than guessing for 20 batches; the message names the step.
    """
    trainer_module = _trainer()
    output = Path(output)
    seed = recipe.training.seed if seed is None else seed
    if not 0 <= seed < 2**32:
        raise RecipeError(f"seed={seed}: pass a whole number from 0 to {2**32 - 1}")
    planned = plan(recipe, gate, match)
    done = complete(output, recipe, gate, seed, match)
    if resume and done is not None:
        return done
    _claim(output, recipe, gate, seed, match, resume, done is not None)
    data, held_out = datasets(recipe, seed)
    torch.manual_seed(seed)
    model = initialise(Decoder(planned.config), seed, recipe.model.ffn_dim)
    trainer = trainer_module.GateTrainer(model, recipe, data, held_out, trainer_module.arguments(recipe, output, seed))
    trainer.add_callback(trainer_module.LineLog(output / LOG, f"{gate} seed {seed}", quiet))
    if stop_after is not None and stop_after < recipe.training.steps:
        trainer.add_callback(trainer_module.StopAfter(stop_after))
    checkpoint = trainer_module.newest_checkpoint(output) if resume else None
    first = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
    _forget_after(output / LOG, first)
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    trained = trainer.state.global_step - first
    seconds = (time.perf_counter() - started) / trained if trained else None
    if trainer.state.global_step < recipe.training.steps:
        return None
    record = _record(
        recipe, gate, seed, match, planned, trainer.model.cpu(), held_out, trainer.state.log_history, seconds
    )
    if trainer.args.should_save:
        record.save(output / RECORD)
    return record


def complete(output: Path, recipe: Recipe, gate: str, seed: int, match: str) -> RunRecord | None:
    """The record in the folder if it is whole and of this run; None otherwise, so that a damaged one is made anew."""
    try:
        run = RunRecord.load(output / RECORD)
        same = (run.recipe, as_spec(run.gate), run.seed) == (configuration(recipe, match), as_spec(gate), seed)
    except (GatedAttnError, OSError):
        return None
    return replace(run, gate=gate) if same else None


def configuration(recipe: Recipe, match: str) -> dict[str, Any]:
    """What a record says a run was trained with."""
    return {**recipe.resolved(), "match": match}


def diverged(recipe: Recipe, gate: str, seed: int, match: str, step: int, output: Path) -> RunRecord:
    """Save and return the record of a run that had to stop at this step; its history is what the folder's log holds."""
    planned = plan(recipe, gate, match)
    record = RunRecord(
        name=recipe.name, gate=gate, seed=seed, recipe=configuration(recipe, match), parameters=planned.parameters,
        added_parameters=planned.added, steps=step, tokens=_tokens(recipe, step), loss=None, bits_per_byte=None,
        seconds_per_step=None, first_token_share=None, gate_mean=None, gate_below=None, max_abs=None, diverged=True,
        diverged_step=step, history=_history(read_log(output / LOG)), environment=environment(),
    )  # fmt: skip
    record.save(output / RECORD)
    return record


def slug(gate: str) -> str:
    """A gate's text as part of a folder's name."""
    return "".join(c if c.isalnum() or c in ".-,=" else "-" for c in gate)


def _claim(output: Path, recipe: Recipe, gate: str, seed: int, match: str, resume: bool, done: bool) -> None:
    """Make the folder this run's: its resolved configuration lies in it, and another run's is refused."""
    checkpoints = _trainer().checkpoints
    if output.exists() and not output.is_dir():
        raise RecipeError(f"{output} is a file; name a folder for the run's checkpoints and record")
    mine = _dump({**configuration(recipe, match), "gate": str(as_spec(gate) or "none"), "seed": seed})
    path = output / "config.json"
    if path.exists() and (other := path.read_text(encoding="utf-8", errors="replace")) != mine:
        raise RecipeError(
            f"{output} holds a run with another recipe, gate or seed ({_difference(other, mine)}); use another output folder"
        )
    if resume and not checkpoints(output):
        raise RecipeError(f"nothing to resume: {output} has no whole checkpoint; start without resume")
    if not resume and (done or checkpoints(output)):
        raise RecipeError(
            f"{output} holds {'this run, complete' if done else 'checkpoints of this run'}; resume it, or use another output folder"
        )
    output.mkdir(parents=True, exist_ok=True)
    write_text(path, mine)


def _difference(theirs: str, mine: str) -> str:
    """`gate: 'paper' there, 'none' here`, for the first values in which two configurations differ."""
    try:
        there, here = (_flat(json.loads(text)) for text in (theirs, mine))
    except (json.JSONDecodeError, AttributeError):
        return "its config.json is damaged"
    keys = [key for key in {**here, **there} if there.get(key) != here.get(key)]
    told = [f"{key}: {there.get(key)!r} there, {here.get(key)!r} here" for key in keys[:3]]
    return "; ".join(told + (["..."] if len(keys) > 3 else []))


def _flat(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{where}{key}.") if isinstance(value, dict) else {where + key: value}
    return flat


def _dump(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def _record(
    recipe: Recipe,
    gate: str,
    seed: int,
    match: str,
    planned: Plan,
    model: Decoder,
    held_out: list[Tensor],
    log: list[dict[str, float]],
    seconds_per_step: float | None,
) -> RunRecord:
    span = gate_range(gate)
    measures = measure_decoder(model, held_out, histogram_range=span)
    loss = _trainer().evaluate(model, held_out)
    tokens = held_out[0][0, :SAMPLE_TOKENS]
    return RunRecord(
        name=recipe.name, gate=gate, seed=seed, recipe=configuration(recipe, match), parameters=planned.parameters,
        added_parameters=planned.added, steps=recipe.training.steps, tokens=_tokens(recipe, recipe.training.steps), loss=loss,
        bits_per_byte=loss / math.log(2) if recipe.data.task == "text" else None, seconds_per_step=seconds_per_step,
        first_token_share=measures.first_token_share, gate_mean=measures.gate_mean, gate_below=measures.gate_below,
        max_abs=measures.max_abs, history=_history(log), gates=measures.gates, histogram_range=span,
        sample=sample_gates(model, tokens, token_texts(recipe, tokens)), measures=task_measures(recipe, model, held_out),
        environment=environment(),
    )  # fmt: skip


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's log, without a last one that a kill cut off; none without a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    rows = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _forget_after(path: Path, step: int) -> None:
    """Drop what an interrupted run logged after the checkpoint that it goes on from."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in read_log(path) if row["step"] <= step))


def gate_range(gate: str) -> tuple[float, float]:
    """The values that a histogram of this gate spans; what unbounded activations exceed lands in the last bins."""
    spec = as_spec(gate)
    spans = {
        "2sigmoid": (0.0, 2.0),
        "softplus": (0.0, 2.0),
        "tanh": (-1.0, 1.0),
        "silu": (-1.0, 2.0),
        "linear": (-2.0, 2.0),
    }
    return (0.0, 1.0) if spec is None else spans.get(spec.activation, (0.0, 1.0))


def _history(log: list[dict[str, float]]) -> tuple[HistoryPoint, ...]:
    points: dict[int, dict[str, float]] = {}
    for row in log:
        point = points.setdefault(int(row["step"]), {})
        if "loss" in row:
            point["train_loss"] = row["loss"]
        if "eval_loss" in row:
            point["eval_loss"] = row["eval_loss"]
    return tuple(HistoryPoint(step=step, **point) for step, point in sorted(points.items()) if point)


def _tokens(recipe: Recipe, steps: int) -> int:
    return steps * recipe.training.batch * recipe.model.context


def _trainer() -> Any:
    try:
        from gated_attn.train import trainer
    except ImportError as error:
        raise MissingExtraError(str(error.name), "lab", "training") from None
    return trainer
