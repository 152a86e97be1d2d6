"""Where a measurement was made."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Versions, machine, threads and date."""
    packages = ("gated-attn", "torch", "transformers", "accelerate")
    return {
        **{package: version(package) for package in packages},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
