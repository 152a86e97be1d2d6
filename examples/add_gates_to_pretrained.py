"""Put gates into a pretrained model, prove that they are wired, save them as an adapter, and take them out again.

python examples/add_gates_to_pretrained.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from gated_attn import attach, detach, verify
from gated_attn.hf import gates, load_gates, save_gates
from gated_attn.hf.pretrained import load_sample, tokenizer


@torch.no_grad()
def main() -> None:
    model = load_sample("rxnmapper")  # an ALBERT of chemical reactions; any AutoModel works the same
    batch = tokenizer("rxnmapper")(["CC(=O)OCC", "c1ccccc1C(=O)O"], padding=True, return_tensors="pt")
    before = model(**batch).logits

    attach(model, "output:headwise:2sigmoid,init=identity")
    print(f"identity gates changed the logits by {(model(**batch).logits - before).abs().max():.0e}")
    print(verify(model, batch))

    for gate in gates(model).values():  # as training would
        gate.proj.weight.normal_(std=0.05)
    gated = model(**batch).logits
    with tempfile.TemporaryDirectory() as folder:
        save_gates(model, folder)
        print({path.name: f"{path.stat().st_size:,} bytes" for path in sorted(Path(folder).iterdir())})
        other = load_gates(load_sample("rxnmapper"), folder)
    print(f"loaded into a fresh model: the same logits, {torch.equal(other(**batch).logits, gated)}")
    print(f"detached: the first model again, {torch.equal(detach(model)(**batch).logits, before)}")


if __name__ == "__main__":
    main()
