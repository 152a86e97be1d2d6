"""`gated-attn attach`: gates into a saved transformers model, verified before it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gated_attn.codec import drafted, refuse_existing
from gated_attn.errors import VerificationError


def run(
    model: Path, spec: str, output: Path, cross: str | None, layers: str | None, names: list[str], *, as_json: bool
) -> None:
    from gated_attn.cli.models import copy_beside, load_folder, place
    from gated_attn.hf.attach import attach, gates
    from gated_attn.hf.inputs import example_inputs
    from gated_attn.hf.verify import verify
    from gated_attn.spec import GateSpec

    refuse_existing(output)
    source = place(model)
    loaded = load_folder(source)
    numbers = None if layers is None else GateSpec.parse(f"paper,layers={layers}").layers
    specs: Any = spec if cross is None else {"self": spec, "cross": cross}
    attach(loaded, specs, layers=numbers, names=names or None)
    shown = (
        None
        if any(gate.spec.op == "add" for gate in gates(loaded).values())
        else verify(loaded, example_inputs(loaded))
    )
    if shown is not None and not shown.ok:
        raise VerificationError(f"the gates of {model} are not all wired, so nothing was written:\n{shown}")
    with drafted(output) as draft:
        loaded.save_pretrained(draft)
        copy_beside(source, draft)
    own = {name: str(gate.spec) for name, gate in gates(loaded).items()}
    added = sum(p.numel() for gate in gates(loaded).values() for p in gate.parameters())
    total = sum(p.numel() for p in loaded.parameters())
    if as_json:
        print(
            json.dumps({"folder": str(output), "gates": own, "added_parameters": added, "parameters": total}, indent=1)
        )
        return
    print(f"{len(own)} gates, {added:,} parameters ({added / (total - added):.2%} of the model without them)")
    print(shown if shown is not None else "gates that add cannot be verified by shutting them")
    print(f"saved: {output}")
