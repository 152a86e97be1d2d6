"""MODEL on the command line: a sample's name, a folder of a transformers model with or without gates, or a name on the hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from gated_attn.errors import CheckpointError, GatedAttnError, SampleError

ALIASES = {"dinov2-s": "dinov2", "whisper-tiny-en": "whisper"}
"""Names that samples also go by."""

TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*processor_config.json", "*.jinja", "spiece*", "*.spm",
)  # fmt: skip


class Loaded(NamedTuple):
    """A model in evaluation mode, its tokenizer if it has one, and what it is called."""

    model: Any
    tokenizer: Any
    label: str


def load(name: str, *, dtype: str = "auto", attn_implementation: str | None = None) -> Loaded:
    """The model that a name on the command line means. A folder comes before a sample, a sample before a hub's name.

    Raises CheckpointError for a folder that is not whole or a name that nobody knows, SampleError for a sample that cannot be had.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    known = getattr(torch, dtype, None)
    if dtype != "auto" and not isinstance(known, torch.dtype):
        raise CheckpointError(
            f"unknown dtype {dtype!r}; float32, bfloat16, float16, or auto for the one that was saved"
        )
    sample = _sample(name)
    if not Path(name).exists() and sample is not None:
        from gated_attn.hf.pretrained import PRETRAINED, load_sample, tokenizer

        model = load_sample(sample, known or torch.float32)
        tokens = tokenizer(sample) if "tokenizer" in PRETRAINED[sample].reads else None
        loaded = Loaded(model, tokens, sample)
    else:
        options = {} if dtype == "auto" else {"dtype": known}
        loaded = Loaded(load_folder(name, **options), _tokenizer(name), str(name))
    if attn_implementation is not None:
        try:
            loaded.model.set_attn_implementation(attn_implementation)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"--attn {attn_implementation}: {error}") from error
    return loaded


def place(name: str | Path) -> Path:
    """Where a model is that transformers loads: the folder of a sample, unless there is a folder of that name; else as it is."""
    sample = None if Path(name).exists() else _sample(str(name))
    if sample is None:
        return Path(name)
    import transformers

    from gated_attn.hf import pretrained

    transformers.utils.logging.disable_progress_bar()
    return pretrained.folder(sample)


def load_folder(place: str | Path, **options: Any) -> Any:
    """The model at a place, as the class that its config names, with gates if it has some; options of `from_pretrained`."""
    import transformers

    from gated_attn.hf.config import GatedConfig
    from gated_attn.hf.whole import load_as

    folder = Path(place)
    if folder.exists() and not (folder / "config.json").is_file():
        raise CheckpointError(f"{place} has no config.json; name the folder of a transformers model")
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(place)
        base: Any = config.base if isinstance(config, GatedConfig) else config
        named = (base.architectures or ["none"])[0]
        cls = getattr(transformers, named, None)
        if cls is None:
            raise CheckpointError(
                f"{place}: its config names the architecture {named!r}, which transformers {transformers.__version__} lacks"
            )
        if isinstance(config, GatedConfig):
            model, info = load_as(cls, config, place, output_loading_info=True, **options)
        else:
            model, info = cls.from_pretrained(place, output_loading_info=True, **options)
    except GatedAttnError:
        raise
    except Exception as error:  # transformers and safetensors raise all kinds for a folder that is not as it should be
        raise CheckpointError(_unloaded(place, error)) from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{place} lacks {len(missing)} tensors of {named}, which would be random: {', '.join(missing[:5])}"
        )
    return model.eval()


def copy_beside(source: Path, target: Path) -> None:
    """Tokenizer and processor files, which belong to the model whatever its gates."""
    for pattern in TOKENIZER:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copy2(file, target / file.name)


def _sample(name: str) -> str | None:
    from gated_attn import samples

    found = ALIASES.get(name, name)
    sample = samples.SAMPLES.get(found)
    if sample is None:
        return None
    if sample.kind != "model":
        models = ", ".join(one.name for one in samples.SAMPLES.values() if one.kind == "model")
        raise SampleError(f"sample {name!r} is a {sample.kind}, no model; the models are {models}")
    return found


def _tokenizer(place: str) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, KeyError, AttributeError):  # each kind of folder without one has its own
        return None


def _unloaded(place: str | Path, error: Exception) -> str:
    if Path(place).exists():
        return f"{place} could not be loaded: {type(error).__name__}: {error}"
    from gated_attn import samples

    models = ", ".join(one.name for one in samples.SAMPLES.values() if one.kind == "model")
    return f"{place} is no folder, no sample ({models}), and could not be loaded from the hub: {type(error).__name__}: {error}"
