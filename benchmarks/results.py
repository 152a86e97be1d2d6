"""Where benchmarks keep their results: one CSV file, one row per measurement, with the machine, the versions and the date."""

from __future__ import annotations

import csv
import datetime
import os
import platform
from pathlib import Path

import torch

from gated_attn import __version__

FILE = Path(__file__).parent / "results.csv"
COLUMNS = (
    "date",
    "benchmark",
    "case",
    "ours",
    "theirs",
    "unit",
    "ratio",
    "n",
    "threads",
    "machine",
    "torch",
    "gated_attn",
)


def append(benchmark: str, case: str, ours: float, theirs: float, unit: str, ratio: float, n: int) -> None:
    """Add one row; `ratio` is the median of the paired ratios, not the ratio of the medians."""
    new = not FILE.exists()
    with FILE.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(
            [
                datetime.datetime.now(datetime.UTC).date().isoformat(), benchmark, case, f"{ours:.4g}", f"{theirs:.4g}",
                unit, f"{ratio:.3f}", n, torch.get_num_threads(),
                f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
                torch.__version__, __version__,
            ]
        )  # fmt: skip
    print(f"{benchmark}, {case}: {ours:.4g} against {theirs:.4g} {unit}, ratio {ratio:.3f} (median of {n} pairs)")
