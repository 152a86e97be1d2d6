"""`GateSpec`: what a gate is, as one line of text and as one frozen value.

Text form: ``position:width[:activation][,key=value...]``, or a preset name with ``,key=value`` overrides::

    output:elementwise:sigmoid              the gate of arXiv:2505.06708 ("G1"), preset `paper`
    output:headwise:2sigmoid,init=identity  one number per head, exactly 1 at the start
    G2:headwise,bias=-2,layers=0-3,7        value gate in five layers only

`str(GateSpec.parse(text))` is the canonical text, and `GateSpec.parse(str(spec)) == spec` for every legal spec.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from gated_attn.errors import SpecError, suggestion
from gated_attn.presets import PRESETS

POSITIONS = ("output", "value", "key", "query", "dense", "weights")
ALIASES = {"G1": "output", "G2": "value", "G3": "key", "G4": "query", "G5": "dense"}
WIDTHS = ("headwise", "elementwise", "shared", "pairwise")
ACTIVATIONS = ("sigmoid", "2sigmoid", "nssigmoid", "hardsigmoid", "silu", "tanh", "softplus", "linear")
SOURCES = ("hidden", "query", "query_key", "latent", "constant", "lse")
OPS = ("mul", "add")
INITS = ("identity", "half", "open", "closed")

PAPER = PRESETS["paper"].text
"""The gate that modules have unless they are told otherwise."""

DEFAULT_STD = 0.02
"""Standard deviation of gate weights where neither `std` nor `init` is given (initializer_range of the paper's code)."""

MAX_LAYERS = 10_000

TARGETS = {"half": 0.5, "open": 0.95, "closed": 0.05}
"""The gate value that each `init` preset starts from; `identity` is exactly 1 (or adds exactly 0)."""

NON_NEGATIVE = ("sigmoid", "2sigmoid", "nssigmoid", "hardsigmoid", "softplus")
"""Activations that are never negative, so that a pairwise gate has a logarithm to add to the scores."""


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def _silu_inverse(p: float) -> float:
    low, high = 0.0, 4.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / (1 + math.exp(-middle)) < p else (low, middle)
    return (low + high) / 2


_INVERSES: dict[str, Callable[[float], float | None]] = {
    "sigmoid": _logit,
    "2sigmoid": lambda p: _logit(p / 2),
    "nssigmoid": lambda p: _logit(2 * p - 1) if p > 0.5 else None,
    "hardsigmoid": lambda p: 6 * p - 3,
    "silu": _silu_inverse,
    "tanh": math.atanh,
    "softplus": lambda p: math.log(math.expm1(p)),
    "linear": lambda p: p,
}
# Logits at which the activation is exactly the neutral element and still has a gradient.
_IDENTITY = {
    ("mul", "2sigmoid"): 0.0,
    ("mul", "linear"): 1.0,
    ("add", "silu"): 0.0,
    ("add", "tanh"): 0.0,
    ("add", "linear"): 0.0,
}


@dataclass(frozen=True)
class GateSpec:
    """What a gate is: where it multiplies, how wide it is, what it reads and how it starts.

    Fields:
        position: `output` (after SDPA, before the out projection), `value`, `key`, `query`, `dense` (after the out
            projection) or `weights` (on the softmax weights).
        width: `headwise` (one number per head), `elementwise` (one per head channel), `shared` (one per channel, the same
            for all heads) or `pairwise` (one per query-key pair, position `weights` only).
        activation: what turns logits into gate values.
        source: what the gate is computed from; `query_key` is the pairwise gate's, and its default.
        in_features: read only the first n channels of the source (text key `in`).
        rank: factor the gate's weight through this many dimensions (two linear maps, nothing in between).
        op: `mul`, or `add` (the gate value is added instead).
        bias: initial value of a learned bias; None means no bias, unless `init` or `source` needs one.
        std: standard deviation of the initial weights; None means 0 under `init` and 0.02 otherwise.
        init: start with zero weights and the gate at exactly 1 (`identity`), or near 0.5, 0.95 or 0.05.
        top_k: per token keep the k largest heads (headwise) or channels per head (otherwise); the rest are exactly 0.
        fill: learn a vector c per head, out = g*o + (1-g)*c.
        sink_key: with `source=lse`, learn a sink key k0 per head beside the number b.
        layers: the layers that get a gate; None means all.

    Raises SpecError for an unknown word or options that exclude each other; the message names the bad token.
    """

    position: str
    width: str
    activation: str = "sigmoid"
    source: str | None = None
    in_features: int | None = None
    rank: int | None = None
    op: str = "mul"
    bias: float | None = None
    std: float | None = None
    init: str | None = None
    top_k: int | None = None
    fill: bool = False
    sink_key: bool = False
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - the frozen dataclass idiom
        put("position", ALIASES.get(self.position, self.position))
        if self.source is None:
            put("source", "query_key" if self.width == "pairwise" else "hidden")
        for name in ("bias", "std"):
            if getattr(self, name) is not None:
                put(name, _finite(name, getattr(self, name)) + 0.0)  # + 0.0 turns -0.0 into 0.0
        if self.std is not None and self.std == (0.0 if self.init else DEFAULT_STD):
            put("std", None)
        for name in ("fill", "sink_key"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"'{name}={getattr(self, name)!r}': must be True or False")
        if self.layers is not None:
            if isinstance(self.layers, (int, str)):
                raise SpecError(f"'layers={self.layers!r}': pass a tuple of layers, such as ({self.layers},)")
            put("layers", tuple(sorted(set(self.layers))))
        _check(self)

    @classmethod
    def parse(cls, text: str | GateSpec) -> GateSpec:
        """Read `position:width[:activation][,key=value...]` or a preset name; raise SpecError naming the bad token."""
        if isinstance(text, GateSpec):
            return text
        if not isinstance(text, str) or not text.strip():
            raise SpecError(f"a gate spec is one line of text such as 'output:headwise:sigmoid', not {text!r}")
        head, _, rest = text.strip().partition(",")
        options = (
            _options(PRESETS[head].text) | _options(rest, head=False) if head in PRESETS else _options(text.strip())
        )
        bias_free = options.get("bias") == "none"
        spec = cls(**{**options, "bias": None if bias_free else options.get("bias")})
        if bias_free and spec.has_bias:
            raise SpecError(f"'bias=none' in {text!r}: this init or source needs a bias; drop one of the two")
        return spec

    def __str__(self) -> str:
        parts = [f"{self.position}:{self.width}:{self.activation}"]
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            default = (
                ("query_key" if self.width == "pairwise" else "hidden") if field.name == "source" else field.default
            )
            if value == default and type(value) is type(default):
                continue
            key = "in" if field.name == "in_features" else field.name
            parts.append(key if value is True else f"{key}={_format(value)}")
        return ",".join(parts)

    def applies_to(self, layer: int) -> bool:
        """Whether this layer (counted from 0) gets a gate."""
        return self.layers is None or layer in self.layers

    @property
    def start(self) -> float:
        """Initial value of the bias: `bias`, or the logit at which `init` holds, or 0."""
        offset = _offset(self)
        return self.bias if self.bias is not None else (offset or 0.0)

    @property
    def has_bias(self) -> bool:
        """Whether the gate owns a bias: asked for, needed by `init`, or all there is (`constant`, `lse`)."""
        return self.bias is not None or self.source in ("constant", "lse") or bool(_offset(self))

    @property
    def weight_std(self) -> float:
        """Standard deviation of the initial weights."""
        return self.std if self.std is not None else (0.0 if self.init else DEFAULT_STD)

    def gate_shape(
        self, dim: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None
    ) -> tuple[int, int]:
        """(H, G), the last two axes of the gate: heads or kv_heads or 1, by 1 or a head's channels."""
        groups, channels = self.grouping(dim, heads, kv_heads, head_dim)
        return (1 if self.width == "shared" else groups), (1 if self.width in ("headwise", "pairwise") else channels)

    def grouping(
        self, dim: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None
    ) -> tuple[int, int]:
        """(number of heads, channels per head) of the tensor that the gate multiplies; dense is one head of width dim."""
        head_dim = head_dim or dim // heads
        if self.position == "dense":
            return 1, dim
        return (kv_heads or heads) if self.position in ("value", "key") else heads, head_dim

    def linear_shape(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        latent_dim: int | None = None,
    ) -> tuple[int, int]:
        """(in, out) of the gate's linear map; in is 0 for gates that read no vector."""
        groups, width = self.gate_shape(dim, heads, kv_heads, head_dim)
        head_dim = head_dim or dim // heads
        if self.source == "latent" and latent_dim is None:
            raise SpecError(f"{str(self)!r} reads the latent query: pass latent_dim, the width of the compressed query")
        n_in = {"hidden": dim, "query": head_dim, "query_key": head_dim, "latent": latent_dim}.get(
            self.source or "", 0
        ) or 0
        if self.in_features is not None and self.in_features > n_in:
            raise SpecError(f"'in={self.in_features}' asks for more channels than {self.source} has ({n_in})")
        n_in = self.in_features or n_in
        return n_in, {"query": width, "query_key": n_in}.get(self.source or "", groups * width)

    def parameters(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        latent_dim: int | None = None,
    ) -> int:
        """How many numbers one gate learns: n*m, or rank*(n+m); plus its bias, its sink keys and its fill."""
        n_in, n_out = self.linear_shape(dim, heads, kv_heads, head_dim, latent_dim)
        groups, channels = self.grouping(dim, heads, kv_heads, head_dim)
        rank = (self.rank or channels) if self.width == "pairwise" else self.rank
        weights = rank * (n_in + n_out) if rank else n_in * n_out
        biases = (1 if self.width == "pairwise" else n_out) if self.has_bias else 0
        return weights + biases + groups * channels * (int(self.fill) + int(self.sink_key))


def as_spec(gate: GateSpec | str | None) -> GateSpec | None:
    """A GateSpec from a spec, its text, or None; the word `none` is no gate."""
    return None if gate is None or gate == "none" else GateSpec.parse(gate)


def _offset(spec: GateSpec) -> float | None:
    """The logit at which `init` holds with zero weights; None without an init or where there is none."""
    if spec.init is None:
        return None
    if spec.init == "identity":
        return _IDENTITY.get((spec.op, spec.activation))
    return _INVERSES[spec.activation](TARGETS[spec.init])


def _check(spec: GateSpec) -> None:
    for name, legal in (
        ("position", POSITIONS), ("width", WIDTHS), ("activation", ACTIVATIONS), ("source", SOURCES), ("op", OPS)
    ):  # fmt: skip
        _known(name, getattr(spec, name), legal)
    if spec.init is not None:
        _known("init", spec.init, INITS)
    for name in ("in_features", "rank", "top_k"):
        value = getattr(spec, name)
        if value is not None and (type(value) is not int or value < 1):
            raise SpecError(
                f"'{'in' if name == 'in_features' else name}={value}': must be a whole number of at least 1"
            )
    if spec.std is not None and spec.std < 0:
        raise SpecError(f"'std={spec.std:g}': a standard deviation is not negative")
    if spec.layers is not None and (not spec.layers or any(type(n) is not int or n < 0 for n in spec.layers)):
        raise SpecError(f"'layers={spec.layers}': name at least one layer, counted from 0, such as layers=0-3,7")
    for refused, token, why in _exclusions(spec):
        if refused:
            raise SpecError(f"{token!r} in {str(spec)!r}: {why}")


def _exclusions(s: GateSpec) -> list[tuple[bool, str, str]]:
    """(is it the case, bad token, why not and what to do): every combination that has no meaning, once."""
    pairwise, lse, constant = s.width == "pairwise", s.source == "lse", s.source == "constant"
    vectorless = constant or lse
    offset = _offset(s)
    reachable = (
        sorted(a for o, a in _IDENTITY if o == s.op)
        if s.init == "identity"
        else [a for a in ACTIVATIONS if a != "nssigmoid"]
    )
    return [
        (pairwise and s.position != "weights", s.width, "only the position weights has query-key pairs; use weights:pairwise"),
        (s.position == "weights" and s.width not in ("headwise", "pairwise"), s.width, "a gate on the softmax weights is headwise or pairwise"),
        (s.position == "dense" and s.width == "shared", s.width, "after the out projection there are no heads to share between; use dense:elementwise"),
        (pairwise != (s.source == "query_key"), f"source={s.source}", "source=query_key and width pairwise go together"),
        (pairwise and s.activation not in NON_NEGATIVE, s.activation, f"a pairwise gate is added to the scores as log g, so it is never negative; use {_words(NON_NEGATIVE)}"),
        (pairwise and s.top_k is not None, f"top_k={s.top_k}", "a pairwise gate has no heads or channels to choose from"),
        ((s.position, s.width) == ("dense", "headwise") and s.top_k is not None, f"top_k={s.top_k}", "there is one gate after the out projection; use dense:elementwise"),
        (pairwise and s.fill, "fill", "a pairwise gate leaves no single share 1-g for a fill"),
        (s.source == "query" and s.position not in ("output", "query", "weights"), "source=query", "only output, query and weights gates have one query per gate"),
        (s.source == "query" and s.width == "shared", "source=query", "each head's own query gives each head its own gate; use headwise or elementwise"),
        (lse and (s.position, s.width, s.activation) != ("output", "headwise", "sigmoid"), "source=lse", "the sink as a gate is output:headwise:sigmoid"),
        (lse and s.init is not None, f"init={s.init}", "a gate read from the log-sum-exp has no weights to start from; set bias, the sink's logit"),
        (lse and s.top_k is not None, f"top_k={s.top_k}", "a gate read from the log-sum-exp is known only after attention; top_k needs it before"),
        (s.sink_key and not lse, "sink_key", "only source=lse has a sink key"),
        (vectorless and s.in_features is not None, f"in={s.in_features}", f"source={s.source} reads no channels"),
        (vectorless and s.rank is not None, f"rank={s.rank}", f"source={s.source} has no weight to factor"),
        (constant and s.std is not None, f"std={s.std}", "source=constant has no weights; set bias or init"),
        (lse and s.std is not None and not s.sink_key, f"std={s.std}", "source=lse has weights only with sink_key"),
        (s.op == "add" and s.position == "weights", "op=add", "a gate on the softmax weights multiplies them; use output:headwise,op=add"),
        (s.op == "add" and lse, "op=add", "the sink as a gate multiplies"),
        (s.op == "add" and s.fill, "fill", "a fill is what a multiplied output falls back to; use op=mul"),
        (s.op == "add" and s.top_k is not None, f"top_k={s.top_k}", "an added gate of 0 does not shut anything; use op=mul"),
        (s.op == "add" and s.init in TARGETS, f"init={s.init}", "an added gate is not open or shut; use init=identity or bias"),
        (s.init is not None and offset is None and not lse, f"init={s.init}", f"{s.activation} with op={s.op} cannot start there; use {_words(reachable)}"),
        (s.init is not None and s.std is not None, f"std={s.std}", "init starts from zero weights; drop std or init"),
        (s.init is not None and s.bias is not None and offset is not None and abs(s.bias - offset) > 1e-6, f"bias={s.bias}", f"init={s.init} needs bias {offset or 0:g}; drop one of the two"),
        (s.init == "identity" and s.top_k is not None, "init=identity", "top_k sets gates to 0, so the start is not the identity"),
    ]  # fmt: skip


def _known(what: str, word: Any, legal: tuple[str, ...]) -> None:
    if word not in legal:
        extra = f" (aliases {_words(ALIASES)})" if what == "position" else ""
        raise SpecError(f"unknown {what} {word!r}; legal: {_words(legal)}{extra}{suggestion(word, legal)}")


def _words(words: Any) -> str:
    return ", ".join(words)


def _options(text: str, *, head: bool = True) -> dict[str, Any]:
    """The fields that the text sets: position:width[:activation] first where `head` is True, then key=value tokens."""
    tokens = _split(text)
    options: dict[str, Any] = {}
    if head:
        parts = tokens.pop(0).split(":")
        if not 2 <= len(parts) <= 3:
            raise SpecError(
                f"{':'.join(parts)!r} is neither position:width[:activation] nor a preset; positions: {_words(POSITIONS)}; "
                f"widths: {_words(WIDTHS)}; presets: {_words(PRESETS)}{suggestion(parts[0], PRESETS)}"
            )
        options = dict(zip(("position", "width", "activation"), parts, strict=False))
    for token in tokens:
        name, value = _parse_option(token, text)
        if name in options:
            raise SpecError(f"{token!r} in {text!r}: this key is given twice; keep one")
        options[name] = value
    return options


def _split(text: str) -> list[str]:
    """Split at commas; a bare number or range continues a `layers=` list."""
    tokens: list[str] = []
    for token in (part.strip() for part in text.split(",") if text):
        if tokens and tokens[-1].startswith("layers=") and re.fullmatch(r"\d+(-\d+)?", token):
            tokens[-1] += "," + token
        else:
            tokens.append(token)
    return tokens


def _parse_option(token: str, text: str) -> tuple[str, Any]:
    key, equals, value = token.partition("=")
    if key in ("fill", "sink_key") and not equals:
        return key, True
    if key not in _READERS or not equals:
        raise SpecError(
            f"unknown key {token!r} in {text!r}; legal: {', '.join(f'{k}=' for k in _READERS)}, fill, sink_key"
            + suggestion(key, [*_READERS, "fill", "sink_key"])
        )
    try:
        return ("in_features" if key == "in" else key), _READERS[key](value)
    except ValueError as error:
        raise SpecError(f"{token!r} in {text!r}: {error}") from None


def _whole(value: str) -> int:
    if not re.fullmatch(r"\d+", value):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def _finite(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise SpecError(f"'{name}={str(value)[:40]}': must be a finite number")
    return number


def _read_layers(value: str) -> tuple[int, ...]:
    layers: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            raise ValueError(f"{part!r} is not a layer or a range such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part!r} runs backwards")
        if last >= MAX_LAYERS:
            raise ValueError(f"layer {last} is beyond the {MAX_LAYERS} that a spec can name")
        layers.extend(range(first, last + 1))
    return tuple(layers)


_READERS: dict[str, Callable[[str], Any]] = {
    "source": str, "in": _whole, "rank": _whole, "op": str, "bias": lambda v: v if v == "none" else _number(v),
    "std": _number, "init": str, "top_k": _whole, "layers": _read_layers,
}  # fmt: skip


def _format(value: Any) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if not isinstance(value, tuple):
        return str(value)
    runs: list[list[int]] = []
    for layer in value:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
