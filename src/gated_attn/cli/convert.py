"""`gated-attn convert`: a checkpoint from one gate layout to another."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from gated_attn.hf.convert import convert_checkpoint
from gated_attn.hf.layouts import LAYOUTS
from gated_attn.hf.native import ROWS


def run(
    source: Path,
    target: Path,
    from_layout: str | None,
    to_layout: str,
    width: str | None,
    modules: str,
    *,
    as_json: bool,
) -> None:
    done = convert_checkpoint(source, target, from_layout, to_layout, width=width, modules=modules)
    if as_json:
        print(json.dumps(asdict(done), indent=1))
        return
    print(f"{done.source} -> {done.target}, {done.width}: {done.modules} attention modules")
    print(f"{done.tensors} tensors in {done.shards} files; 0 missing, 0 unexpected, 0 duplicate")
    for note in done.notes:
        print(f"note: {note}")
    print(f"checkpoint: {target}")


def layouts() -> dict[str, str]:
    """Layout -> its tensors, the order of their rows, and who stores gates so: one line each."""
    return {name: f"{layout}   {', '.join(_users(name, layout.by))}" for name, layout in LAYOUTS.items()}


def _users(name: str, other: str) -> list[str]:
    own = [row.name for row in ROWS if row.model_types and name in row.reads]
    return [*own, *([other] if other else [])]
