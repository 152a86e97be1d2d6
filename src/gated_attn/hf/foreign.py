"""Weights in the files of other runtimes, as named tensors: CTranslate2's binary and ONNX's initialisers."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_attn.errors import MissingExtraError, SampleError

__all__ = ["ctranslate2_tensors", "needed", "onnx_tensors"]

CTRANSLATE2_VERSION = 6
_CTRANSLATE2_DTYPES = {
    0: torch.float32,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.float16,
    5: torch.bfloat16,
}


def needed(package: str, purpose: str) -> Any:
    """The optional `package`, imported; `MissingExtraError` if it is not installed."""
    try:
        return import_module(package)
    except ImportError:
        raise MissingExtraError(package, "samples", purpose) from None


def ctranslate2_tensors(file: Path) -> dict[str, Tensor]:
    """Name -> tensor of a CTranslate2 `model.bin`; settings are tensors of rank 0, an alias is the tensor it names.

    Little-endian: u32 version, text spec, u32 revision; u32 count, then for each tensor: text name, u8 rank, u32 per
    dimension, u8 dtype, u32 bytes, data; u32 count, then for each alias: text name, text target. A text is its u16
    length and that many bytes, the last one 0.
    """
    raw = bytearray(file.read_bytes())  # writable, so that torch may share it
    try:
        return _ctranslate2(raw, _Reader(raw))
    except (struct.error, ValueError) as error:
        raise SampleError(
            f"{file} is not a whole CTranslate2 model of version {CTRANSLATE2_VERSION} ({len(raw)} bytes): {error}; "
            f"delete it and fetch it again"
        ) from error


class _Reader:
    """Numbers and texts from little-endian bytes, one after the other."""

    def __init__(self, raw: bytearray) -> None:
        self.raw, self.at = raw, 0

    def number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f"<{kind}", self.raw, self.at)
        self.at += struct.calcsize(kind)
        return int(value)

    def text(self) -> str:
        size = self.number("H")
        self.at += size
        if self.at > len(self.raw):
            raise ValueError(f"a text of {size} bytes runs past the end")
        return self.raw[self.at - size : self.at].rstrip(b"\0").decode()


def _ctranslate2(raw: bytearray, reader: _Reader) -> dict[str, Tensor]:
    if (version := reader.number("I")) != CTRANSLATE2_VERSION:
        raise ValueError(f"its version is {version}")
    reader.text(), reader.number("I")  # the name of the model's kind and its revision
    tensors = {}
    for _ in range(reader.number("I")):
        name = reader.text()
        shape = [reader.number("I") for _ in range(reader.number("B"))]
        code, size = reader.number("B"), reader.number("I")
        if code not in _CTRANSLATE2_DTYPES:
            raise ValueError(f"tensor {name} has the unknown dtype {code}")
        dtype = _CTRANSLATE2_DTYPES[code]
        if size != math.prod(shape) * dtype.itemsize or reader.at + size > len(raw):
            raise ValueError(
                f"tensor {name} of shape {shape} and {dtype} has {size} bytes, {len(raw) - reader.at} left"
            )
        # A copy: data may start at any byte, and a tensor may not.
        tensors[name] = torch.frombuffer(raw[reader.at : reader.at + size], dtype=dtype).reshape(shape)
        reader.at += size
    for _ in range(reader.number("I")):
        alias, target = reader.text(), reader.text()
        if target not in tensors:
            raise ValueError(f"{alias} stands for {target}, which it does not hold")
        tensors[alias] = tensors[target]
    if reader.at != len(raw):
        raise ValueError(f"{len(raw) - reader.at} bytes follow its end")
    return tensors


def onnx_tensors(file: Path) -> dict[str, Tensor]:
    """Name -> tensor of the initialisers of an ONNX file that torch exported.

    The exporter loses a weight's name where it folds something into it, and writes `onnx::MatMul_7`. Such a tensor gets
    its name from the node that reads it: a matrix in `/encoder/key/MatMul` is `encoder.key.weight`, transposed back;
    what `/encoder/Concat_6` reads is `encoder.Concat_6`.
    """
    onnx = needed("onnx", f"reading {file.name}")
    graph = onnx.load(file).graph
    stored = {raw.name: torch.from_numpy(onnx.numpy_helper.to_array(raw).copy()) for raw in graph.initializer}
    named = {name: tensor for name, tensor in stored.items() if not name.startswith("onnx::")}
    for name, tensor in _named_by_readers(graph, stored):
        if name in named and named[name] is not tensor:
            raise SampleError(f"{file.name}: two initialisers are both called {name}")
        named[name] = tensor
    return named


def _named_by_readers(graph: Any, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for node in graph.node:
        for place, given in enumerate(node.input):
            if given not in stored or not given.startswith("onnx::"):
                continue
            path = node.name.strip("/").replace("/", ".")
            is_weight = node.op_type == "MatMul" and place == 1
            if is_weight:
                yield f"{path.rpartition('.')[0]}.weight", stored[given].T.contiguous()
            else:
                yield path, stored[given]
