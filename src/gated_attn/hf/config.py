"""The configuration of a saved gated model: transformers reads it where `gated_attn.hf` is imported, and refuses it elsewhere.

`config.json` of a gated model keeps the model's own configuration where no stock class looks for it::

    {"model_type": "gated_attn (pip install ...)",    the Auto classes print it as the type that they do not know
     "transformers_weights": "gated_attn (...)",      a class called by its name finds no weights, and prints it
     "architectures": [...], "transformers_version": ...,
     "gated_attn": {"version": 1, "gates": {attention module: spec}, "base_config": {...}}}

`gated-attn convert` writes the same, with `layout` and `width`, where the weights are in a layout that no model reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from gated_attn.errors import RecordError, SpecError
from gated_attn.hf.names import KEY, MODEL_TYPE, VERSION, refused
from gated_attn.spec import GateSpec


class GatedConfig(PreTrainedConfig):
    """A model's own configuration, `base`, and its gates: the attention module's name -> the spec's text.

    Only the Auto classes see it; a loaded model's `config` is `base`. What this one has not is read from `base`.
    """

    model_type = MODEL_TYPE

    def __init__(self, base: PreTrainedConfig | None = None, gates: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.base: Any = base
        self.gates = dict(gates or {})
        self.architectures = getattr(base, "architectures", None)

    def __getattr__(self, name: str) -> Any:
        base = self.__dict__.get("base")
        if base is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(base, name)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read what `wrapped` wrote; further keywords go to the base configuration. RecordError for another version."""
        # The Auto classes ask next which model belongs to this configuration.
        from gated_attn.hf.whole import register_loaders

        register_loaders()
        gated = config_dict.get(KEY)
        gated = gated if isinstance(gated, Mapping) else {}
        version = gated.get("version")
        if version != VERSION or isinstance(version, bool):
            raise RecordError(
                f"config.json holds {KEY} version {version!r}, and this gated-attn reads version {VERSION}; "
                "save the model again, or load it with the gated-attn that wrote it"
            )
        known, gates = gated.get("base_config"), gated.get("gates")
        layout = gated.get("layout", "separate")
        if layout not in (own := _own_layouts(known, gates)):
            raise RecordError(
                f"these weights are in gate layout {layout!r}, which no model here reads; first run gated-attn convert FOLDER NEW "
                f"--to {own[0]}"
            )
        if not isinstance(known, Mapping) or not isinstance(gates, Mapping):
            raise RecordError(
                f"config.json: {KEY} needs a base_config and gates, each a JSON object; save the model again"
            )
        try:
            gates = {name: str(GateSpec.parse(spec)) for name, spec in gates.items()}
        except SpecError as error:
            raise RecordError(f"config.json: {error}") from error
        kind = known.get("model_type")
        if kind not in CONFIG_MAPPING:
            raise RecordError(
                f"config.json holds gates for a model of type {kind!r}, which this transformers does not know; "
                "install the release that it was saved with, or register the type with AutoConfig"
            )
        unused_too = kwargs.pop("return_unused_kwargs", False)
        base, unused = CONFIG_MAPPING[kind].from_dict(dict(known), return_unused_kwargs=True, **kwargs)
        made = cls(base, gates)
        return (made, unused) if unused_too else made

    def to_dict(self) -> dict[str, Any]:
        return (
            wrapped(self.base.to_dict(), self.gates) if isinstance(self.base, PreTrainedConfig) else super().to_dict()
        )

    def to_diff_dict(self) -> dict[str, Any]:
        return wrapped(self.base.to_diff_dict(), self.gates) if isinstance(self.base, PreTrainedConfig) else {}


def _own_layouts(base: Any, gates: Any) -> tuple[str, ...]:
    """The layouts that the model reads: attached gates' own, or those of the family which has gates without them."""
    from gated_attn.hf.native import in_config

    found = in_config(base) if gates is None and isinstance(base, Mapping) else None
    return found[1].reads if found else ("separate",)


def wrapped(base: Mapping[str, Any], gates: Mapping[str, str]) -> dict[str, Any]:
    """The content of a gated model's `config.json`, from that of its base and its gates."""
    return refused(base, {"gates": dict(gates)})


def text(base: PreTrainedConfig, gates: Mapping[str, str]) -> str:
    """`wrapped`, as the text of the file."""
    return GatedConfig(base, gates).to_json_string()


def read(content: str) -> dict[str, Any] | None:
    """The `gated_attn` part of a `config.json`, or None where it is that of a model without gates."""
    found = json.loads(content)
    return found.get(KEY) if isinstance(found, dict) and found.get("model_type") == MODEL_TYPE else None


AutoConfig.register(MODEL_TYPE, GatedConfig, exist_ok=True)
