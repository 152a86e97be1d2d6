"""`gated-attn doctor`: what this machine and installation can do, with the reason for each no."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gated_attn import samples

PACKAGES = ("gated-attn", "torch", "transformers", "accelerate", "safetensors", "triton")


def run(*, as_json: bool) -> None:
    found = examine()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for part, rows in found.items():
        print(part)
        for name, value in rows.items():
            print(f"  {name:<14} {value}")


def examine() -> dict[str, dict[str, Any]]:
    """Versions, devices, threads, implementations (with the reason where one cannot serve) and samples."""
    import torch

    devices = {"cpu": f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"}
    devices |= {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple GPU"
    threads = {"torch": torch.get_num_threads(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set")}
    cached = {name: str(where) if where else "not cached" for name, where in samples.cached().items()}
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "devices": devices,
        "threads": threads,
        "attention": _impls("cuda" if torch.cuda.is_available() else "cpu"),
        "samples": {"folder": str(samples.cache_folder()), **cached},
    }


def _impls(device: str) -> dict[str, str]:
    """What each impl says to three common calls on this device."""
    import torch

    from gated_attn.attention import IMPLS, explain

    q = torch.zeros(1, 8, 4, 16, device=device)
    trained = q.clone().requires_grad_()
    lines = {}
    for name in IMPLS:
        answers = {
            "inference": explain(q, q, q, causal=True, impl=name),
            "training": explain(trained, q, q, causal=True, impl=name),
            "log-sum-exp": explain(q, q, q, causal=True, impl=name, return_lse=True),
        }
        lines[name] = "; ".join(f"{what}: {'yes' if a.impl else a.reasons[name]}" for what, a in answers.items())
    lines["auto"] = str(explain(trained, q, q, causal=True).impl) + " for training on this device"
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
