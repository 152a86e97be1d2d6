"""`compare`: the same model with several gates, on the same data and the same seeds, and what the gate changed."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gated_attn.errors import RecipeError, TrainingError
from gated_attn.records import CompareRecord, CompareRow, Paired, RunRecord, paired_interval
from gated_attn.spec import as_spec
from gated_attn.train.data import datasets, vocab_size
from gated_attn.train.initialise import initialise, plan
from gated_attn.train.recipe import Recipe
from gated_attn.train.run import RECORD, complete, diverged, slug, train
from gated_attn.train.trainer import newest_checkpoint, parameter_groups

METRICS = ("loss", "bits_per_byte")
TIMED_STEPS, TIMING_WARMUP = 21, 3


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    recipe: Recipe
    gate: str
    seed: int
    match: str
    folder: Path


def compare(
    recipe: Recipe,
    gates: Sequence[str],
    seeds: int = 3,
    output: str | Path = "runs/compare",
    *,
    match: str = "ffn",
    lr_sweep: Sequence[float] = (),
    jobs: int = 0,
    quiet: bool = False,
) -> CompareRecord:
    """Train every gate on every seed, then pair them with the first gate, seed by seed.

    Args:
        recipe: what to train; its seed is the first of `seeds` consecutive ones.
        gates: specs, presets or "none"; the first is the baseline.
        output: folder of the records. Runs that are complete in it are not repeated, interrupted ones go on.
        match: "ffn" narrows the feed-forward so that every variant has the ungated model's parameters within 0.5 %.
        lr_sweep: learning-rate multipliers; each gate's largest whose quarter-length run has not diverged is recorded.
        jobs: runs at a time, one thread each where there are as many as cores; 0 means one per core.

    Results do not depend on `jobs` beyond float rounding (it sets the threads of a run). Step times are measured afterwards, in
    one process on one thread.
    """
    specs = {str(as_spec(gate)) for gate in gates}
    if not gates or len(specs) != len(gates) or seeds < 1:
        raise RecipeError(
            f"compare needs different gates and at least one seed, got {', '.join(gates) or 'no gate'} and {seeds}"
        )
    if any(not (math.isfinite(multiplier) and multiplier > 0) for multiplier in lr_sweep):
        raise RecipeError(f"learning-rate multipliers {', '.join(map(str, lr_sweep))}: each must be above 0")
    for gate in gates:
        planned = plan(recipe, gate, match)
        if not quiet:
            print(
                f"{gate}: {planned.parameters:,} parameters; the gate alone adds {planned.added:.2%}, "
                f"difference after matching {planned.difference:+.2%} (feed-forward width {planned.config.ffn_dim})",
                flush=True,
            )
    folder = Path(output)
    first = recipe.training.seed
    work = [
        Job(recipe, gate, first + i, match, folder / f"{slug(gate)}-seed{first + i}")
        for i in range(seeds)
        for gate in gates
    ]
    runs = _run_all(work, jobs, quiet)
    stable = (
        {gate: _largest_stable_lr(recipe, gate, match, lr_sweep, folder, quiet) for gate in gates} if lr_sweep else {}
    )
    runs = [replace(run, largest_stable_lr=stable.get(run.gate)) for run in runs]
    record = CompareRecord(
        recipe=recipe.name, baseline=gates[0], rows=tuple(CompareRow.from_run(run) for run in runs),
        paired=tuple(pair(runs, gates)), timing=step_times(recipe, gates, match),
        runs=tuple(str((job.folder / RECORD).relative_to(folder)) for job in work),
    )  # fmt: skip
    record.save(folder / "compare.json")
    return record


def pair(runs: Sequence[RunRecord], gates: Sequence[str]) -> Iterable[Paired]:
    """Differences to the first gate on the same seed, with 95 % intervals; seeds that diverged in either are left out."""
    by_key = {(run.gate, run.seed): run for run in runs}
    for gate in gates[1:]:
        for metric in METRICS:
            differences = []
            for seed in sorted({run.seed for run in runs}):
                ours, base = (getattr(by_key[key], metric) for key in ((gate, seed), (gates[0], seed)))
                if ours is not None and base is not None:
                    differences.append(ours - base)
            if differences or metric == "loss":
                mean, low, high = paired_interval(differences)
                yield Paired(gate=gate, metric=metric, difference=mean, low=low, high=high, n=len(differences))


def step_times(recipe: Recipe, gates: Sequence[str], match: str = "ffn") -> dict[str, float]:
    """Median time of a training step relative to the first gate's: one process, one thread, the gates taking turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data, _ = datasets(
            replace(recipe, training=replace(recipe.training, steps=1, eval_batches=1)), recipe.training.seed
        )
        batch = [data[i] for i in range(recipe.training.batch)]
        inputs = {key: torch.stack([item[key] for item in batch]) for key in batch[0]}
        steps = [_step(recipe, gate, match, inputs) for gate in gates]
        times: list[list[float]] = [[] for _ in gates]
        for turn in range(TIMED_STEPS + TIMING_WARMUP):
            for own, step in zip(times, steps, strict=True):
                started = time.perf_counter()
                step()
                if turn >= TIMING_WARMUP:
                    own.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return {
        gate: statistics.median(a / b for a, b in zip(own, times[0], strict=True))
        for gate, own in zip(gates, times, strict=True)
    }


def _step(recipe: Recipe, gate: str, match: str, inputs: dict[str, torch.Tensor]) -> Any:
    from gated_attn.models.decoder import Decoder

    model = initialise(Decoder(plan(recipe, gate, match).config), recipe.training.seed, recipe.model.ffn_dim)
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.optimizer), lr=recipe.optimizer.lr)

    def step() -> None:
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    return step


def _run_all(work: Sequence[Job], jobs: int, quiet: bool) -> list[RunRecord]:
    """The records of all jobs in order; each run in a process of its own, so that none inherits another's state."""
    done = {job.folder: complete(job.folder, job.recipe, job.gate, job.seed, job.match) for job in work}
    open_jobs = [job for job in work if done[job.folder] is None]
    cores = os.cpu_count() or 1
    jobs = min(jobs or cores, len(open_jobs)) or 1
    threads = max(cores // jobs, 1)
    context = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_worker, initargs=(threads, os.getpid())) as pool:
        with _interrupts_held():
            futures = {pool.submit(_run, job): job for job in open_jobs}
        for number, future in enumerate(as_completed(futures), 1):
            job, run = futures[future], future.result()
            done[job.folder] = run
            if not quiet:
                result = f"diverged at step {run.diverged_step}" if run.diverged else f"validation loss {run.loss:.4f}"
                print(
                    f"{number}/{len(open_jobs)} {job.gate} seed {job.seed}: {result} ({time.perf_counter() - started:.0f} s)",
                    flush=True,
                )
    return [record for job in work if (record := done[job.folder]) is not None]


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits meanwhile, and in processes that are started meanwhile until they let it through."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _worker(threads: int, parent: int) -> None:
    """Set a worker process up: its threads, and an end without a word on Ctrl-C and when the parent is killed."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(threads)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(job: Job) -> RunRecord:
    try:
        resume = newest_checkpoint(job.folder) is not None
        run: RunRecord | None = train(
            job.recipe, job.gate, job.seed, job.folder, match=job.match, resume=resume, quiet=True
        )
    except TrainingError as error:
        run = diverged(job.recipe, job.gate, job.seed, job.match, error.step, job.folder)
    assert run is not None  # only a run that was told to stop early has no record
    return run


def _largest_stable_lr(
    recipe: Recipe, gate: str, match: str, multipliers: Sequence[float], folder: Path, quiet: bool
) -> float | None:
    """The largest swept rate below the first one that breaks training, in runs of a quarter of the steps; None if all do."""
    stable = None
    for multiplier in sorted(multipliers):
        rate = recipe.optimizer.lr * multiplier
        steps = max(recipe.training.steps // 4, 1)
        short = replace(
            recipe, optimizer=replace(recipe.optimizer, lr=rate), training=replace(recipe.training, steps=steps)
        )
        job = Job(short, gate, recipe.training.seed, match, folder / f"{slug(gate)}-lr{rate:g}")
        run = _run_all([job], 1, True)[0]
        broken = has_diverged(run, vocab_size(recipe))
        if not quiet:
            result = "stopped" if run.loss is None else f"validation loss {run.loss:.4f}"
            print(f"{gate} at learning rate {rate:g}: {result}{', diverged' if broken else ''}", flush=True)
        if broken:
            break
        stable = rate
    return stable


def has_diverged(run: RunRecord, vocabulary: int) -> bool:
    """Whether a run diverged: it had to stop, or ended no better than guessing, or its training loss 0.5 nats above its lowest."""
    if run.diverged or run.loss is None or run.loss > math.log(vocabulary) - 0.01:
        return True
    losses = [point.train_loss for point in run.history if point.train_loss is not None]
    return bool(losses) and losses[-1] > min(losses) + 0.5
