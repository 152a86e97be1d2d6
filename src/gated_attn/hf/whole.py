"""A whole gated model on disk, by the stock means: `save_pretrained`, and the Auto classes where `gated_attn.hf` is imported.

    model.save_pretrained("gated")
    AutoModelForCausalLM.from_pretrained("gated")   with `import gated_attn.hf`; without it an error, never an ungated model

What holds a gate is saved so: the model that `attach` was given, and each transformers model inside it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _get_model_class

from gated_attn.codec import write_text
from gated_attn.errors import CheckpointError, SpecError, UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf import config as configs
from gated_attn.hf.attach import attach_each
from gated_attn.hf.config import GatedConfig
from gated_attn.hf.store import few, placed, save_gates
from gated_attn.hf.swap import Swapped, swapped
from gated_attn.hf.wiring import GATE

CONFIG = "config.json"
KINDS = ("missing", "mismatched", "unexpected")


class GatedPretrained(Swapped):
    """A transformers model with gates. It keeps its class's name, and `save_pretrained` writes what stock classes refuse."""

    gated_prefix = ""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """As the stock method, and `config.json` names the gates; beside a lone adapter, `save_gates` into the same folder."""
        there = placed(self)  # type: ignore[arg-type]
        save: Callable[..., Any] = super().save_pretrained  # type: ignore[misc]
        if not there:
            return save(save_directory, *args, **kwargs)
        main = kwargs.get("is_main_process", args[0] if args else True)
        if getattr(self, "_hf_peft_config_loaded", False):  # only the adapter is written, which is without the gates
            result = save(save_directory, *args, **kwargs)
            if main:
                save_gates(self, save_directory)  # type: ignore[arg-type]
            return result
        config: Any = self.config  # type: ignore[attr-defined]
        specs = {name: one.saved.spec for name, one in there.items()}
        with _writing(config, specs):
            result = save(save_directory, *args, **kwargs)
        path = Path(save_directory) / CONFIG
        if main and path.is_file() and configs.read(path.read_text(encoding="utf-8")) is None:
            write_text(path, configs.text(config, specs))
        return result

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
        """A model of the same class with the gates of the folder; a checkpoint without gates gives the stock class."""
        config = kwargs.pop("config", None) or _auto_config(path, kwargs)
        if isinstance(config, GatedConfig):
            return load_as(cls.gated_base, config, path, *args, **kwargs)
        return cls.gated_base.from_pretrained(path, *args, config=config, **kwargs)  # type: ignore[attr-defined]


@contextmanager
def _writing(config: Any, specs: Mapping[str, str]) -> Iterator[None]:
    """Let the configuration write itself with the gates, from the first byte: a save that is killed leaves no stock one."""

    def to_json_file(path: str | os.PathLike[str], use_diff: bool = True) -> None:
        held = config.__dict__.pop("to_json_file")  # the configuration writes all that is in its __dict__
        try:
            write_text(path, configs.text(config, specs))
        finally:
            config.__dict__["to_json_file"] = held

    config.__dict__["to_json_file"] = to_json_file
    try:
        yield
    finally:
        config.__dict__.pop("to_json_file", None)


def _auto_config(path: Any, kwargs: Mapping[str, Any]) -> Any:
    names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "attn_implementation")
    return AutoConfig.from_pretrained(path, **{name: kwargs[name] for name in names if name in kwargs})


def load_pretrained(path: str | os.PathLike[str], auto: Any = AutoModelForCausalLM, **kwargs: Any) -> PreTrainedModel:
    """The gated model that `save_pretrained` wrote, as the Auto class gives it; CheckpointError if the folder has no gates.

    Keywords are those of `from_pretrained`: dtype, device_map, attn_implementation, ...
    """
    config = _auto_config(path, kwargs)
    if not isinstance(config, GatedConfig):
        raise CheckpointError(
            f"{path}: a model of type {config.model_type!r} without gates; load it with {auto.__name__}, then attach some"
        )
    return auto.from_pretrained(path, **kwargs)


def load_as(base: type[PreTrainedModel], config: GatedConfig, path: Any, *args: Any, **kwargs: Any) -> Any:
    """`base.from_pretrained`, of a model whose gates are attached at the end of its `__init__`: they load as all else does.

    CheckpointError for a gate that the checkpoint lacks, or that has no place in the model.
    """
    info_too = kwargs.pop("output_loading_info", False)
    packed = kwargs.get("quantization_config") or getattr(config.base, "quantization_config", None)
    cls = _born_gated(base, config.gates, packed=packed is not None)
    model, info = cls.from_pretrained(path, *args, config=config.base, output_loading_info=True, **kwargs)
    if packed is not None and model.config.dtype == torch.float16:  # what is not quantised came in float32
        for one in placed(model).values():
            one.gate.to(torch.float16)
    found = {kind: sorted(key if isinstance(key, str) else key[0] for key in info[f"{kind}_keys"]) for kind in KINDS}
    prefix = f"{base.base_model_prefix}."
    left = {name.removeprefix(prefix) for name in config.gates if not _goes_to(model, name)}
    ignored = base._keys_to_ignore_on_load_unexpected or []
    for name in left:  # a part that the model is without leaves the module's own weights over, too
        over = (f"{name}." in key for key in found["unexpected"] if not _of_gate(key))
        if not any(over) and not any(re.search(pattern, f"{name}.weight") for pattern in ignored):
            raise CheckpointError(f"{path}: the gate of {name!r} in {CONFIG} has no place in {base.__name__}")
    parts = {name.split(".")[0] for name in left}
    for kind, keys in found.items():
        wrong = [
            key
            for key in keys
            if _of_gate(key) and not (kind == "unexpected" and key.removeprefix(prefix).split(".")[0] in parts)
        ]
        if wrong:
            raise CheckpointError(
                f"{path}: {len(wrong)} {kind} gate tensors ({few(wrong)}) for the {len(config.gates)} gates in {CONFIG}; the "
                "folder is not whole: save the model again"
            )
    return (model, info) if info_too else model


def _of_gate(key: str) -> bool:
    return f".{GATE}." in f".{key}"


def _born_gated(base: type[PreTrainedModel], specs: Mapping[str, str], packed: bool = False) -> type[PreTrainedModel]:
    """The class whose instances are made with gates, and are of the class that `attach` gives; `packed`: to be quantised."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        self.__class__ = base
        places = {place: spec for name, spec in specs.items() if (place := _goes_to(self, name))}
        if not places:
            raise SpecError(f"none of the modules with gates is in {base.__name__}: {few(specs)}")
        attach_each(self, places)
        if packed:  # quantisers leave alone what must stay in float32
            self._keep_in_fp32_modules = {*(self._keep_in_fp32_modules or ()), rf".*\.{GATE}"}

    space = {
        "__init__": __init__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), space)


def _goes_to(model: PreTrainedModel, name: str) -> str | None:
    """The name that a saved model's module has in this one: with or without the prefix of a head's base model.

    None for one in a part that this model is without, as an encoder is without its decoder.
    """
    prefix = f"{model.base_model_prefix}."
    bare = name.removeprefix(prefix)
    modules = dict(model.named_modules())
    for place in (name, bare, prefix + name):
        if place in modules:
            return place
    part = bare.split(".")[0]
    return name if part in modules or prefix + part in modules else None


@functools.cache
def register_loaders() -> None:
    """Let each Auto class of models load gated ones: the class it would take for the base, with gates."""
    classes: list[Any] = [one for one in vars(modeling_auto).values() if isinstance(one, type)]
    for auto in classes:
        if issubclass(auto, _BaseAutoModelClass) and auto._model_mapping is not None:
            space = {"config_class": GatedConfig, "auto": auto}
            auto.register(GatedConfig, type(f"Gated{auto.__name__}", (_Loader,), space), exist_ok=True)


class _Loader:
    """What an Auto class finds for a `GatedConfig`."""

    auto: ClassVar[Any]

    @classmethod
    def _base(cls, config: GatedConfig) -> type[PreTrainedModel]:
        if type(config.base) not in cls.auto._model_mapping:
            raise UnsupportedError(
                f"{cls.auto.__name__} has no model for the base of this gated model, {type(config.base).__name__}"
            )
        return _get_model_class(config.base, cls.auto._model_mapping)

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, config: GatedConfig, **kwargs: Any) -> Any:
        return load_as(cls._base(config), config, path, *args, **kwargs)

    @classmethod
    def _from_config(cls, config: GatedConfig, **kwargs: Any) -> Any:
        return _born_gated(cls._base(config), config.gates)._from_config(config.base, **kwargs)


def swap_pretrained(model: nn.Module) -> None:
    """Make every transformers model that holds a gate one that saves it."""
    for module in model.modules():
        stock = isinstance(module, PreTrainedModel) and not isinstance(module, Swapped)
        if stock and any(isinstance(inner, Gate) for inner in module.modules()):
            module.__class__ = swapped(GatedPretrained, type(module))
