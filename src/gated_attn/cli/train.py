"""`gated-attn train`: one run of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

from gated_attn.train.recipe import Recipe


def run(
    recipe: str, gate: str, seed: int | None, output: Path | None, overrides: list[str], *, resume: bool, as_json: bool
) -> None:
    from gated_attn.train.run import RECORD, slug, train

    loaded = Recipe.load(recipe, overrides)
    seed = loaded.training.seed if seed is None else seed
    folder = output or Path("runs") / f"{loaded.name}-{slug(gate)}-seed{seed}"
    record = train(loaded, gate, seed, folder, resume=resume, quiet=as_json)
    assert record is not None
    if as_json:
        print(json.dumps(record.to_json_object(), indent=1))
        return
    unit = f", {record.bits_per_byte:.4f} bits per byte" if record.bits_per_byte is not None else ""
    print(f"\n{record.gate}: validation loss {record.loss:.4f} nats per token{unit}, {record.parameters:,} parameters")
    if record.first_token_share is not None:
        print(f"attention on the first token {record.first_token_share:.1%}, largest activation {record.max_abs:.1f}")
    if record.gate_mean is not None:
        print(f"gates: mean {record.gate_mean:.3f}, {record.gate_below:.1%} below 0.1")
    for name, value in record.measures.items():
        print(f"{name.replace('_', ' ')}: {value:.3f}")
    print(f"record: {folder / RECORD}")
