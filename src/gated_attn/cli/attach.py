"""`gated-attn attach` and `gated-attn verify`: gates into a saved transformers model, and the proof that they are wired."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

from gated_attn.errors import CheckpointError, GatedAttnError, VerificationError

TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*processor_config.json", "*.jinja", "spiece*", "*.spm",
)  # fmt: skip


def run_attach(
    model: Path, spec: str, output: Path, cross: str | None, layers: str | None, names: list[str], *, as_json: bool
) -> None:
    from gated_attn.hf.attach import attach, gates
    from gated_attn.hf.inputs import example_inputs
    from gated_attn.hf.verify import verify
    from gated_attn.spec import GateSpec

    if output.exists():
        raise CheckpointError(f"{output} is there already; name a new folder")
    loaded = _load(model)
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
    draft = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        loaded.save_pretrained(draft)
        _copy_beside(model, draft)
        draft.rename(output)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
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


def run_verify(model: Path, *, as_json: bool) -> None:
    from gated_attn.hf.inputs import example_inputs
    from gated_attn.hf.verify import verify

    loaded = _load(model)
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


def _load(folder: Path) -> Any:
    """The model in a folder, as the class that its config names, with gates if it has some."""
    import transformers

    from gated_attn.hf.config import GatedConfig
    from gated_attn.hf.whole import load_as

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; name the folder of a transformers model")
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        base: Any = config.base if isinstance(config, GatedConfig) else config
        named = (base.architectures or ["none"])[0]
        cls = getattr(transformers, named, None)
        if cls is None:
            raise CheckpointError(
                f"{folder}: its config names the architecture {named!r}, which transformers {transformers.__version__} lacks"
            )
        if isinstance(config, GatedConfig):
            model, info = load_as(cls, config, folder, output_loading_info=True)
        else:
            model, info = cls.from_pretrained(folder, output_loading_info=True)
    except GatedAttnError:
        raise
    except Exception as error:  # transformers and safetensors raise all kinds for a folder that is not as it should be
        raise CheckpointError(f"{folder} could not be loaded: {type(error).__name__}: {error}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors of {named}, which would be random: {', '.join(missing[:5])}"
        )
    return model.eval()


def _copy_beside(source: Path, target: Path) -> None:
    """Tokenizer and processor files, which belong to the model whatever its gates."""
    for pattern in TOKENIZER:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copy2(file, target / file.name)
