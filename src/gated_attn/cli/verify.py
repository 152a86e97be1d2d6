"""`gated-attn verify`: the proof that a saved model's gates are wired."""

from __future__ import annotations

import json
from pathlib import Path


def run(model: Path, *, as_json: bool) -> None:
    from gated_attn.cli.models import load_folder, place
    from gated_attn.hf.inputs import example_inputs
    from gated_attn.hf.verify import verify

    loaded = load_folder(place(model))
    shown = verify(loaded, example_inputs(loaded))
    if as_json:
        rows = [
            {"name": r.name, "spec": r.spec, "expected": r.expected, "deviation": r.deviation, "ok": r.ok}
            for r in shown.rows
        ]
        print(json.dumps({"ok": shown.ok, "rows": rows}, indent=1))
    else:
        print(shown)
    if not shown.ok:
        raise SystemExit(1)
