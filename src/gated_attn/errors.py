"""The errors that gated-attn raises on purpose. Every message says what was wrong, with the numbers, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def suggestion(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'paper'?` where a known word is close to this one, and nothing otherwise."""
    close = difflib.get_close_matches(str(word), list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


class GatedAttnError(Exception):
    """Base of every error this package raises on purpose."""


class SpecError(GatedAttnError, ValueError):
    """A gate specification that names something unknown or combines options that exclude each other."""


class ShapeError(GatedAttnError, ValueError):
    """Tensors whose shapes, dtypes or devices do not fit each other."""


class RecordError(GatedAttnError, ValueError):
    """A record on disk that this version cannot read, or a value that a record cannot hold."""


class CheckpointError(GatedAttnError, RuntimeError):
    """A folder of weights with missing, unexpected or duplicate tensors, or one that cannot be read or written."""


class SampleError(GatedAttnError, RuntimeError):
    """A real model or data set that could not be fetched or whose bytes are not the expected ones."""


class RecipeError(GatedAttnError, ValueError):
    """A training recipe with an unknown key, a wrong type or values that exclude each other."""


class TrainingError(GatedAttnError, RuntimeError):
    """A training run that had to stop at `step`, such as one whose loss is no longer finite."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(f"step {step}: {message}")
        self.step, self.message = step, message

    def __reduce__(self) -> tuple[type[TrainingError], tuple[int, str]]:
        return type(self), (self.step, self.message)


class VerificationError(GatedAttnError, RuntimeError):
    """A result that was checked and is not what it must be; nothing of it is kept."""


class MissingExtraError(GatedAttnError, ImportError):
    """An optional dependency that is needed here and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.parts = (package, extra, purpose)
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'gated-attn[{extra}]'")

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        return type(self), self.parts


class UnsupportedError(GatedAttnError, NotImplementedError):
    """A request that no implementation, or not the one asked for, can serve.

    ``reasons`` maps each candidate to the sentence that says why it cannot.
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons = dict(reasons or {})
        lines = "".join(f"\n  {name}: {reason}" for name, reason in self.reasons.items())
        super().__init__(message + lines)

    def __reduce__(self) -> tuple[type[UnsupportedError], tuple[str, dict[str, str]]]:
        return type(self), (str(self).split("\n  ", 1)[0], self.reasons)
