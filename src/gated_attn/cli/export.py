"""`gated-attn export`: the model of a run, or of a folder with attached gates, for stock transformers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gated_attn.cli.models import copy_beside, load_folder
from gated_attn.errors import CheckpointError


def run(folder: Path, output: Path, target: str, *, as_json: bool) -> None:
    from gated_attn.codec import refuse_existing
    from gated_attn.hf.export import export

    refuse_existing(output)
    model, context = _load(folder)
    report = export(model, output, target, context=context)
    if context is None:
        copy_beside(folder, output)
    if as_json:
        print(json.dumps({**asdict(report), "folder": str(report.folder)}, indent=1))
        return
    print(f"{report.target}: {report.parameters:,} parameters in {report.folder}")
    print(
        f"reloaded with stock transformers: logits differ by {report.error:.2g}, {report.padded_error:.2g} with padding "
        f"({report.tolerance:.2g} is float32 rounding); {report.tokens} greedy tokens the same"
    )
    for note in report.notes:
        print(note)


def _load(folder: Path) -> tuple[Any, int | None]:
    """The model, and the context of a run's recipe; None where the model's own configuration says it."""
    from gated_attn.train.load import load_run

    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there, or no folder")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if "model_type" in config:
        return load_folder(folder), None
    if not config and not folder.name.startswith("checkpoint-"):
        raise CheckpointError(
            f"{folder} is neither what `gated-attn train` wrote nor a transformers model: it has no config.json that can be read"
        )
    model, recipe = load_run(folder)
    return model, recipe.model.context
