"""A read-only view of the gates that models of transformers and timm are born with, one `NativeFamily` per layout.

Shapes: B batch, T tokens, D width of the gate's source, H heads, E head width, G gate width (1 or E).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gated_attn.attention.activations import activate, widen
from gated_attn.errors import ShapeError, UnsupportedError
from gated_attn.hf import layouts
from gated_attn.hf.families import in_features, read
from gated_attn.hf.layouts import LAYOUTS, Sizes
from gated_attn.spec import GateSpec


@dataclass(frozen=True)
class NativeFamily:
    """Attention classes with a gate of one layout; sizes are paths of attributes from the attention module.

    Fields:
        classes: class names in `package`; subclasses of theirs match too.
        layer: the projection that the gate is computed with; None there means that this model has no gate.
        layout: how the gate's rows lie in it, as in `layouts`: `separate` (all of them, head by head) or `per_head` (for
            each head its queries, then its gate).
        model_types: what config.json calls those of its models whose checkpoints `convert` reads.
        per_head: an attribute that says whether the gate is headwise where the width depends on the model; `width` if not.
        headwise_if: the key of the configuration that this attribute follows, and its values that make it true, the default
            first.
        written: the layout that its checkpoints are in, where transformers renames the gate on the way to disk.
        head_bias: a parameter (H,) that is added to the logits of all channels of a head.
        float32: the model multiplies by the gate in float32, before it rounds.
    """

    name: str
    classes: tuple[str, ...]
    layer: str
    width: str = "elementwise"
    activation: str = "sigmoid"
    layout: str = "separate"
    heads: str = "config.num_attention_heads"
    head_dim: str = "head_dim"
    per_head: str = ""
    headwise_if: tuple[str, tuple[object, ...]] = ("", ())
    written: str = ""
    head_bias: str = ""
    float32: bool = False
    model_types: tuple[str, ...] = ()
    package: str = "transformers"

    @property
    def stored(self) -> str:
        """The one of `layouts.LAYOUTS` that the module's own names are."""
        if self.layout != "separate":
            return self.layout
        return next(layout.name for layout in LAYOUTS.values() if layout.names.get("gate") == self.layer)

    @property
    def reads(self) -> tuple[str, ...]:
        """The layouts in which transformers reads a checkpoint; it writes the first."""
        return (self.written, self.stored) if self.written else (self.stored,)

    def width_in(self, config: Mapping[str, Any]) -> str:
        """The gate's width in a model of this configuration."""
        key, values = self.headwise_if
        return "headwise" if key and config.get(key, values[0]) in values else self.width


def _names(text: str) -> tuple[str, ...]:
    return tuple(f"{word}Attention" for word in text.split())


ROWS = (
    NativeFamily(
        "qwen3_next", _names("Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4ExpText"), "q_proj", layout="per_head",
        model_types=("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"),
    ),
    NativeFamily("afmoe", _names("Afmoe HrmText MuseGlimmerText MuseSparkText"), "gate_proj", model_types=("afmoe", "hrm_text")),
    NativeFamily("beam", _names("Beam"), "gate_proj", head_bias="gate_bias"),
    NativeFamily("neomme", _names("NeoMME"), "output_projection.gate_proj"),
    NativeFamily("inkling2", _names("Inkling2Sliding Inkling2Full Inkling2LoopSliding Inkling2LoopFull"), "o_proj.gate_proj",
                 heads="num_heads", float32=True),
    NativeFamily("hy_v4", _names("HYV4 HYV4VL"), "gate_proj", heads="num_heads", head_dim="v_head_dim"),
    NativeFamily("lfm3", _names("Lfm3"), "g_proj", "headwise", written="gate_proj", model_types=("lfm3",)),
    NativeFamily("step", _names("Step3p7"), "g_proj", "headwise", heads="num_heads", model_types=("step3p5", "step3p7")),
    NativeFamily("laguna", _names("Laguna"), "g_proj", "elementwise", "softplus", heads="num_heads", per_head="gate_per_head",
                 headwise_if=("gating", (True, "per-head")), model_types=("laguna",)),
    NativeFamily("dots3_note", _names("Dots3NoteText BailingHybrid"), "g_proj", "headwise", heads="num_heads",
                 head_dim="v_head_dim"),
    NativeFamily("timm", ("Attention", "AttentionRope", "EvaAttention"), "gate", heads="num_heads", package="timm"),
)  # fmt: skip
"""Every family whose gate reads the attention module's input."""

_BY_TYPE = {model_type: row for row in ROWS for model_type in row.model_types}
READ_AS = {model_type: row.reads for model_type, row in _BY_TYPE.items()}
"""model_type -> the layouts in which transformers reads it; it writes the first."""


def in_config(config: Mapping[str, Any]) -> tuple[str, NativeFamily, str] | None:
    """(model_type, row, width of the gates) of a config.json whose gates `convert` knows, or None."""
    for part in (config, config.get("text_config") or {}):
        model_type = str(part.get("model_type"))
        if row := _BY_TYPE.get(model_type):
            return model_type, row, row.width_in(config.get("text_config") or config)
    return None


@dataclass(frozen=True, eq=False)
class NativeGate:
    """A gate that a model has of its own, g = act(W x + b), seen as `Gate` shows its own; nothing is copied or kept.

    `module` is the attention module, `layer` the projection that holds the gate's rows. Calling it is `values`.
    """

    module: nn.Module
    row: NativeFamily

    @property
    def layer(self) -> nn.Module:
        """The projection that holds the gate."""
        return read(self.module, self.row.layer)

    @property
    def spec(self) -> GateSpec:
        """What the gate is; `bias=0` where it has a learned bias."""
        bias = 0.0 if self._has_bias else None
        return GateSpec("output", self._width, self.row.activation, bias=bias)

    @property
    def shape_HG(self) -> tuple[int, int]:
        """Heads, and gate values per head."""
        heads, channels = int(read(self.module, self.row.heads)), int(read(self.module, self.row.head_dim))
        return heads, (1 if self._width == "headwise" else channels)

    @property
    def n_in(self) -> int:
        """Width of what the gate reads."""
        return in_features(self.layer)

    @property
    def weight_HGD(self) -> Tensor:
        """The gate's rows, as a view of the model's own weight; UnsupportedError where that is quantised."""
        weight = self.layer.weight
        if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
            raise UnsupportedError(
                f"the gate's weight is stored as {getattr(weight, 'dtype', type(weight).__name__)}, which has no rows to show; "
                "logits() and values() work"
            )
        return self._rows(weight)

    @property
    def bias_HG(self) -> Tensor | None:
        """The gate's bias as a view, or None."""
        bias = getattr(self.layer, "bias", None)
        if isinstance(bias, Tensor):
            return self._rows(bias)
        return read(self.module, self.row.head_bias)[:, None].expand(self.shape_HG) if self.row.head_bias else None

    def logits(self, hidden_states: Tensor) -> Tensor:
        """What the activation is applied to, (B, T, H, G), for the attention module's input (B, T, D)."""
        if hidden_states.shape[-1] != self.n_in:
            raise ShapeError(f"this gate reads {self.n_in} channels, and got shape {tuple(hidden_states.shape)}")
        # Contiguous as the models have it, so that the activation is theirs to the bit.
        logits = self._rows(self.layer(hidden_states), axis=-1).contiguous()
        return logits + read(self.module, self.row.head_bias)[:, None] if self.row.head_bias else logits

    def values(self, hidden_states: Tensor) -> Tensor:
        """What the attention output is multiplied by, (B, T, H, G), in the logits' dtype, or float32 where the model does so."""
        logits = self.logits(hidden_states)
        return activate(widen(logits) if self.row.float32 else logits, self.row.activation)

    __call__ = values

    @property
    def _width(self) -> str:
        return "headwise" if self.row.per_head and getattr(self.module, self.row.per_head) else self.row.width

    @property
    def _has_bias(self) -> bool:
        return bool(self.row.head_bias) or getattr(self.layer, "bias", None) is not None

    def _rows(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """The gate's rows of an axis of the layer's output, as two axes (H, G), without a copy."""
        (H, G), axis = self.shape_HG, axis % tensor.dim()
        # Neither layout has keys beside the gate, so any number of KV heads is right.
        sizes = Sizes(H, H, int(read(self.module, self.row.head_dim)))
        rows = layouts.view(tensor, "gate", sizes, self.row.layout, width=self._width, axis=axis)
        return rows.view(*tensor.shape[:axis], H, G, *tensor.shape[axis + 1 :])

    def __repr__(self) -> str:
        return f"NativeGate({str(self.spec)!r}, {self.row.layer} of {type(self.module).__name__})"


def native_gates(model: nn.Module) -> dict[str, NativeGate]:
    """Every gate that the model was born with, by the name of the projection that holds it; a shared module once.

    Example:
        >>> for name, gate in native_gates(AutoModelForCausalLM.from_pretrained(path)).items():
        ...     print(name, gate.spec)  # model.layers.3.self_attn.q_proj output:elementwise:sigmoid
    """
    rows = ((name, module, row_of(module)) for name, module in model.named_modules())
    return {f"{name}.{row.layer}".lstrip("."): NativeGate(module, row) for name, module, row in rows if row is not None}


def row_of(module: nn.Module) -> NativeFamily | None:
    """The row of an attention module with a gate of its own, or None."""
    classes = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(module).__mro__}
    for row in ROWS:
        if any((row.package, name) in classes for name in row.classes):
            there: Any = module
            for word in row.layer.split("."):
                there = getattr(there, word, None)
            return None if there is None else row
    return None
