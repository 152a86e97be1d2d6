"""`gated-attn convert`: a checkpoint from one gate layout to another."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from gated_attn.hf.convert import convert_checkpoint


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
