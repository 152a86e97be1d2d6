"""How much memory a piece of work took at its peak."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

INTERVAL = 0.005
"""Seconds between two looks at this process's memory."""


class PeakMemory:
    """The largest growth of memory inside the context, over all times that it is entered, in `bytes`.

    On CUDA what the allocator held at its peak; elsewhere the resident memory of this process, looked at every 5 ms, which Linux
    tells (`known` is False where nobody does). Memory that an earlier use has left to the allocator is not seen again.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.known = torch.cuda.is_available() or _resident() is not None
        self._stop = threading.Event()

    def __enter__(self) -> PeakMemory:
        self._before = _used()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._top = self._before
        self._stop.clear()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        top = max(self._top, _used())
        if torch.cuda.is_available():
            top = torch.cuda.max_memory_allocated()
        self.bytes = max(self.bytes, top - self._before)

    def _look(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._top = max(self._top, _used())


def _used() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else _resident() or 0


def _resident() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
