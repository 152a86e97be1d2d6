"""`gated-attn export`: a run's model for stock transformers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path


def run(folder: Path, output: Path, target: str, *, as_json: bool) -> None:
    from gated_attn.hf.export import export
    from gated_attn.train.load import load_run

    model, recipe = load_run(folder)
    report = export(model, output, target, context=recipe.model.context)
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
