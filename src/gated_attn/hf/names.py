"""How config.json says that its weights are not a stock model's: the words, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "gated_attn (pip install 'gated-attn[hf]', import gated_attn.hf, and load it with an Auto class)"
"""Both a type and the message that stock transformers prints: what to install to load the gates."""

KEY = "gated_attn"
"""Key of config.json under which gates, or a checkpoint's layout and width, are recorded."""

VERSION = 1


def refused(base: Mapping[str, Any], note: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` that stock classes refuse, from that of its base; the note comes under `KEY`, and the base in it."""
    kept = {key: base[key] for key in ("architectures", "transformers_version") if key in base}
    # Not at the top: `LlamaConfig.from_pretrained` would take a `base_config` there that says llama, and be silent.
    inner = {"version": VERSION, **note, "base_config": dict(base)}
    return {"model_type": MODEL_TYPE, "transformers_weights": MODEL_TYPE, **kept, KEY: inner}
