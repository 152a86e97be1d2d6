"""Recipes: one TOML file per experiment, read into frozen dataclasses. No torch.

A recipe has the tables `model`, `data`, `optimizer` and `training`; what it leaves out takes the defaults below. A run saves
the resolved recipe, every value included, so a record says what it was trained with.
"""

from __future__ import annotations

import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gated_attn.errors import RecipeError, suggestion

TASKS = ("text", "backcopy")
PRECISIONS = ("fp32", "bf16")
TRIGGER_SHARE = 0.04
"""How often each trigger of backcopy follows another token."""
SCHEDULES = ("cosine", "linear", "constant_with_warmup")


@dataclass(frozen=True)
class ModelTable:
    """Sizes of the decoder; the gate is not part of a recipe, so that one recipe serves every gate."""

    layers: int = 4
    heads: int = 4
    dim: int = 128
    ffn_dim: int = 344
    context: int = 128
    kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False
    rope_theta: float = 10000.0
    dropout: float = 0.0
    tie_embeddings: bool = True


@dataclass(frozen=True)
class DataTable:
    """`text`: bytes of a sample, the last `validation` share held out. `backcopy`: generated, see `train.data`."""

    task: str = "text"
    sample: str = "shakespeare"
    validation: float = 0.1
    vocab_size: int = 48
    triggers: int = 3


@dataclass(frozen=True)
class OptimizerTable:
    """AdamW. Gates have a group of their own: `lr * gate_lr_mult`, decayed by `gate_weight_decay` (None: as the rest)."""

    lr: float = 3e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    warmup: float = 0.05
    schedule: str = "cosine"
    gate_lr_mult: float = 1.0
    gate_weight_decay: float | None = None


@dataclass(frozen=True)
class TrainingTable:
    """`batch` sequences per optimizer step, in `accumulation` equal parts."""

    steps: int = 2000
    batch: int = 12
    accumulation: int = 1
    log_every: int = 20
    eval_every: int = 200
    eval_batches: int = 20
    seed: int = 1
    precision: str = "fp32"


@dataclass(frozen=True)
class Recipe:
    """One experiment, without its gate. `Recipe.load("shakespeare")` or `Recipe.load("my/recipe.toml")`.

    Raises RecipeError for an unknown key, a wrong type or a value out of range; the message names the key.
    """

    name: str
    model: ModelTable = field(default_factory=ModelTable)
    data: DataTable = field(default_factory=DataTable)
    optimizer: OptimizerTable = field(default_factory=OptimizerTable)
    training: TrainingTable = field(default_factory=TrainingTable)

    def __post_init__(self) -> None:
        for where, ok, wanted in (
            ("data.task", self.data.task in TASKS, " or ".join(TASKS)),
            ("training.precision", self.training.precision in PRECISIONS, " or ".join(PRECISIONS)),
            ("optimizer.schedule", self.optimizer.schedule in SCHEDULES, " or ".join(SCHEDULES)),
            ("data.validation", 0 < self.data.validation < 1, "a share between 0 and 1"),
            (
                "data.triggers",
                0 < self.data.triggers < min(self.data.vocab_size - 1, 1 / TRIGGER_SHARE),
                f"at least 1, fewer than the tokens, and under {1 / TRIGGER_SHARE:g}, for each follows {TRIGGER_SHARE:.0%} of them",
            ),
            ("optimizer.lr", 0 < self.optimizer.lr < math.inf, "above 0 and finite"),
            ("model.rope_theta", 0 < self.model.rope_theta < math.inf, "above 0 and finite"),
            ("training.seed", 0 <= self.training.seed < 2**32, f"from 0 to {2**32 - 1}"),
            ("optimizer.warmup", 0 <= self.optimizer.warmup <= 1, "a share of the steps, between 0 and 1"),
            *((f"model.{name}", getattr(self.model, name) >= 1, "at least 1") for name in _SIZES),
            *(
                (f"model.{name}", (getattr(self.model, name) or 1) >= 1, "at least 1")
                for name in ("kv_heads", "head_dim")
            ),
            *(
                (f"optimizer.{name}", 0 <= getattr(self.optimizer, name) < 1, "in [0, 1)")
                for name in ("beta1", "beta2")
            ),
            ("optimizer.clip", self.optimizer.clip > 0, "above 0"),
            ("optimizer.weight_decay", self.optimizer.weight_decay >= 0, "0 or more"),
            ("optimizer.gate_lr_mult", self.optimizer.gate_lr_mult >= 0, "0 or more"),
            ("model.context", self.model.context >= 2, "at least 2 tokens"),
            ("model.dropout", 0 <= self.model.dropout < 1, "a probability below 1"),
            *((f"training.{name}", getattr(self.training, name) >= 1, "at least 1") for name in _POSITIVE),
            (
                "training.batch",
                self.training.batch % max(self.training.accumulation, 1) == 0,
                f"a multiple of accumulation={self.training.accumulation}",
            ),
        ):
            if not ok:
                table, key = where.split(".")
                raise RecipeError(
                    f"{where}={getattr(getattr(self, table), key)!r} in recipe {self.name!r}: must be {wanted}"
                )

    @classmethod
    def load(cls, name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Read a recipe file, or a recipe of this package by name; overrides are `table.key=value`, value as in TOML."""
        path = find(name)
        try:
            values = _toml(path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path} is not UTF-8 text: {error}") from None
        for override in overrides:
            where, equals, value = override.partition("=")
            table, dot, key = where.strip().partition(".")
            if not equals or not dot:
                raise RecipeError(
                    f"override {override!r} is not of the form table.key=value, such as optimizer.lr=0.001"
                )
            if not isinstance(values.setdefault(table, {}), dict):
                raise RecipeError(f"override {override!r}: {table}={values[table]!r} in {path} is not a table")
            if re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value not in ("true", "false", "inf", "nan"):
                value = f'"{value}"'  # a bare word is a string, as shells take the quotes away
            values[table][key] = _toml(f"value = {value}", f"override {override!r}")["value"]
        return cls.from_dict({"name": path.stem, **values})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe of a nested mapping, as `resolved` gives it."""
        return _read(cls, values, "")

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults included, as a nested dict."""
        return asdict(self)


_SIZES = ("layers", "heads", "dim", "ffn_dim")
_POSITIVE = ("steps", "batch", "accumulation", "log_every", "eval_every", "eval_batches")


def find(name: str | Path) -> Path:
    """The file of a recipe: a path, or a name looked up in ./recipes and among this package's recipes."""
    given = Path(name)
    if given.suffix == ".toml":
        if given.is_file():
            return given
        raise RecipeError(f"no recipe file {given}; recipes of this package: {', '.join(names())}")
    for folder in _folders():
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    raise RecipeError(
        f"unknown recipe {str(name)!r}; pass a .toml file or one of: {', '.join(names())}{suggestion(name, names())}"
    )


def names() -> list[str]:
    """Names of the recipes that `find` knows without a path."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.toml")})


def _folders() -> list[Path]:
    """./recipes, the checkout's recipes, and those inside an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return [Path("recipes"), package.parents[1] / "recipes", package / "recipes"]


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is not TOML: {error}") from None


def _read(cls: Any, values: Any, where: str) -> Any:
    """The dataclass of a table; unknown keys and wrong types are errors that name their place."""
    if not isinstance(values, Mapping):
        raise RecipeError(
            f"{where or 'a recipe'} must be a table of {', '.join(f.name for f in fields(cls))}, got {values!r}"
        )
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise RecipeError(
            f"unknown key {where + unknown[0]!r}; legal: {', '.join(hints)}{suggestion(unknown[0], hints)}"
        )
    if "name" in hints and "name" not in values:
        raise RecipeError("a recipe needs a name")
    return cls(**{key: _value(hints[key], value, f"{where}{key}") for key, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if hasattr(hint, "__dataclass_fields__"):
        return _read(hint, value, f"{where}.")
    legal = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(value) in legal:
        return value
    if float in legal and type(value) is int:
        return float(value)
    raise RecipeError(f"{where}={value!r}: must be {' or '.join(getattr(t, '__name__', str(t)) for t in legal)}")
