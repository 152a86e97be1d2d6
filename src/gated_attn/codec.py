"""How a record is checked, becomes JSON and is written, and how files and folders appear whole. The standard library only."""

from __future__ import annotations

import json
import math
import numbers
import os
import secrets
import shutil
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from gated_attn.errors import CheckpointError, RecordError

R = TypeVar("R", bound="Record")


class Checked:
    """Base of every record part: at construction each field is checked against its annotation and made plain.

    Lists become tuples, integers become floats where the field is a float, mappings become plain JSON objects; anything
    else is a `RecordError`. So a record equals itself after a round trip through JSON.
    """

    def __post_init__(self) -> None:
        for name, hint in _hints(self).items():
            object.__setattr__(self, name, _checked(getattr(self, name), hint, f"{type(self).__name__}.{name}"))
        if getattr(self, "diverged", None) is not None:
            self._drop_nonfinite()

    def _drop_nonfinite(self) -> None:
        """Make every NaN or infinity None, which only a run that is marked as diverged may hold."""
        for name in _hints(self):
            value = getattr(self, name)
            finite = _without_nonfinite(value)
            if finite == value:
                continue
            if not self.diverged:  # type: ignore[attr-defined]
                raise RecordError(
                    f"{type(self).__name__}.{name} holds NaN or infinity although diverged is false; "
                    f"set diverged=True (and the step) or give a finite number"
                )
            object.__setattr__(self, name, finite)


class Record(Checked):
    """A record with a file format of its own: `FORMAT` and `VERSION` are the first two keys of its JSON object."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]

    def to_json_object(self) -> dict[str, Any]:
        """The record as dicts, lists, strings, finite numbers, booleans and None."""
        return {"format": self.FORMAT, "version": self.VERSION, **_to_plain(self)}

    @classmethod
    def from_json_object(cls: type[R], data: Mapping[str, Any]) -> R:
        """Inverse of `to_json_object`; a `RecordError` says what does not fit."""
        if not isinstance(data, Mapping):
            raise RecordError(f"expected a JSON object of format {cls.FORMAT!r}, got {_describe(data)}")
        found, version = data.get("format"), data.get("version")
        if found != cls.FORMAT:
            raise RecordError(f"expected format {cls.FORMAT!r}, got {found!r}")
        if version != cls.VERSION or isinstance(version, bool):
            raise RecordError(
                f"{cls.FORMAT} version {version!r} cannot be read: this gated-attn reads version {cls.VERSION}; "
                f"run it again, or read it with the gated-attn that wrote it"
            )
        return _build(cls, {key: value for key, value in data.items() if key not in ("format", "version")}, cls.FORMAT)

    def to_json(self) -> str:
        """JSON text, one line per key of the record."""
        try:
            lines = (f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in self.to_json_object().items())
            return "{\n" + ",\n".join(lines) + "\n}\n"
        except ValueError as error:
            raise RecordError(f"{self.FORMAT}: a number that is not finite cannot be written: {error}") from error

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """Inverse of `to_json`."""
        try:
            data = json.loads(text, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            raise RecordError(f"not JSON, or cut short: {error}") from error
        return cls.from_json_object(data)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the record to `path`, replacing what was there only when all of it is written."""
        return write_text(path, self.to_json())

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read the record at `path`."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RecordError(f"cannot read a {cls.FORMAT} record from {path}: {error.strerror}") from error
        except (RecordError, UnicodeDecodeError) as error:
            raise RecordError(f"{path}: {error}") from error


@contextmanager
def drafted(target: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """A path beside `target` to write a file or a folder to; it becomes the target at the end, and is removed after an error.

    Nothing is made here, the parent folder neither. With `replace` a file may be there already, and is replaced by the rename;
    without it, whatever is there raises CheckpointError before anything is written.

    Example:
        >>> with drafted(folder) as draft:
        ...     draft.mkdir(parents=True)
        ...     (draft / "config.json").write_text(config)
    """
    final = Path(target)
    if not replace:
        refuse_existing(final)
    draft = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        os.replace(draft, final)
    except BaseException:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
        raise


def refuse_existing(target: str | os.PathLike[str]) -> None:
    """CheckpointError if something is there already; for asking before the work rather than after it."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists and is not overwritten: name another path, or remove it first")


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` as UTF-8 to `path` atomically, making its folder if need be; returns the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with drafted(target, replace=True) as draft, draft.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return target


def _hints(record: Any) -> dict[str, Any]:
    """Field name -> annotation of the record's class."""
    return _class_hints(typing.cast(Any, type(record)))  # mypy holds a class for unhashable


@cache
def _class_hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {part.name: hints[part.name] for part in fields(cls)}


def _checked(value: Any, hint: Any, where: str) -> Any:
    """`value` in the plain form of the annotation `hint`, or a `RecordError` that names `where`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        # What may be missing may also have diverged; `_drop_nonfinite` then makes it None, or refuses.
        if value is None or (isinstance(value, numbers.Real) and not math.isfinite(value)):
            return value if value is None else float(value)
        return _checked(value, arguments[0], where)
    if origin is tuple and isinstance(value, (list, tuple)):
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise RecordError(f"{where} needs {len(arguments)} values, got {len(value)}")
        kinds = (arguments[0],) * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(
            _checked(item, kind, f"{where}[{i}]") for i, (item, kind) in enumerate(zip(value, kinds, strict=True))
        )
    if origin is dict and isinstance(value, Mapping):
        if arguments[1] is Any:
            return _plain_mapping(value, where)
        return {_checked(k, str, where): _checked(v, arguments[1], f"{where}[{k!r}]") for k, v in value.items()}
    if is_dataclass(hint) and isinstance(value, Mapping):
        return _build(hint, value, where)
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        if not isinstance(value, bool) and isinstance(value, kind) and math.isfinite(value):
            return hint(value)
    elif origin is None and isinstance(value, hint):
        return value
    raise RecordError(f"{where} needs {_name(hint)}, got {_describe(value)}")


def _build(cls: Any, data: Mapping[str, Any], where: str) -> Any:
    names = [part.name for part in fields(cls)]
    unknown, missing = sorted(set(data) - set(names)), [name for name in names if name not in data]
    if unknown or missing:
        told = [f"unknown {', '.join(map(repr, unknown))}"] * bool(unknown)
        told += [f"missing {', '.join(map(repr, missing))}"] * bool(missing)
        raise RecordError(f"{where} has keys that do not fit {cls.__name__}: {'; '.join(told)}")
    return cls(**data)


def _plain_mapping(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A deep copy of `value` as JSON would give it back."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where} cannot be written as JSON: {error}") from error
    return plain


def _to_plain(value: Any) -> Any:
    if is_dataclass(value):
        return {part.name: _to_plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    return value


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return tuple(_without_nonfinite(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: _without_nonfinite(getattr(value, name)) for name in _hints(value)})
    return value


def _refuse_constant(name: str) -> float:
    raise RecordError(f"{name} is not JSON; a record writes null for a number that is not finite")


def _name(hint: Any) -> str:
    if hint is float:
        return "a finite number"
    return hint.__name__ if isinstance(hint, type) and typing.get_origin(hint) is None else str(hint)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
