"""`gated-attn specs`: the words a gate spec is made of, and the presets with their names elsewhere."""

from __future__ import annotations

import json
from typing import Any

from gated_attn.presets import PRESETS
from gated_attn.spec import ACTIVATIONS, ALIASES, INITS, OPS, POSITIONS, SOURCES, WIDTHS, GateSpec

KEYS = {
    "source": " | ".join(SOURCES),
    "in": "read only the first n channels of the source",
    "rank": "factor the gate's weight through n dimensions",
    "op": " | ".join(OPS),
    "bias": "initial value of a learned bias, or none",
    "std": "standard deviation of the initial weights (0.02)",
    "init": " | ".join(INITS) + ": zero weights, gate at 1, 0.5, 0.95 or 0.05",
    "top_k": "keep the k largest heads (headwise) or channels per head, the rest exactly 0",
    "fill": "learn what a shut head gives: g*o + (1-g)*fill",
    "sink_key": "with source=lse, a learned sink key beside the number",
    "layers": "layers that get the gate, such as 0-3,7",
}


def run(*, as_json: bool) -> None:
    words: dict[str, Any] = {
        "positions": POSITIONS,
        "aliases": ALIASES,
        "widths": WIDTHS,
        "activations": ACTIVATIONS,
        "keys": KEYS,
    }
    presets = [
        {"name": name, "spec": str(GateSpec.parse(name)), "used_by": preset.used_by} for name, preset in PRESETS.items()
    ]
    if as_json:
        print(json.dumps({**words, "presets": presets}, indent=1))
        return
    print("position:width[:activation][,key=value...], or a preset name with ,key=value overrides\n")
    print(f"positions    {', '.join(POSITIONS)}  ({', '.join(f'{k} = {v}' for k, v in ALIASES.items())})")
    print(f"widths       {', '.join(WIDTHS)}")
    print(f"activations  {', '.join(ACTIVATIONS)}")
    for key, meaning in KEYS.items():
        print(f"  {key:<10} {meaning}")
    width = max(len(row["name"]) for row in presets)
    print("\npresets")
    for row in presets:
        print(f"  {row['name']:<{width}}  {row['spec']}\n  {'':<{width}}    {row['used_by']}")
