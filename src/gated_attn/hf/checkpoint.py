"""A folder of safetensors: what its headers say, its tensors one shard at a time, and what lies beside them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gated_attn.codec import write_text
from gated_attn.errors import CheckpointError

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WEIGHT_FILES = (".safetensors", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


@dataclass(frozen=True)
class Stored:
    """A tensor as a header describes it: file name, shape and dtype."""

    shard: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def inventory(folder: Path) -> dict[str, Stored]:
    """Name -> what the headers of a folder's safetensors say; CheckpointError where they and the index disagree."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    index = read_json(folder / INDEX).get("weight_map", {}) if (folder / INDEX).exists() else None
    if index is None and len(files) != 1:
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files and no {INDEX}: one file, or an index, is needed"
        )
    found: dict[str, Stored] = {}
    places: dict[str, list[str]] = {}
    for file in files:
        with opened(folder / file) as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                part = handle.get_slice(name)
                shape = tuple(part.get_shape())
                found[name] = Stored(file, shape, part[:0].dtype if shape else handle.get_tensor(name).dtype)
                places.setdefault(name, []).append(file)
    problems = [("duplicate", f"{name} in {' and '.join(where)}") for name, where in places.items() if len(where) > 1]
    for name, file in (index or {}).items():
        if file not in places.get(name, []):
            problems.append(("missing", f"{name}, in {file} according to {INDEX}"))
    if index is not None:
        problems += [("unexpected", f"{name}, not in {INDEX}") for name in found if name not in index]
    refuse(folder, problems)
    return found


class Reader(ExitStack):
    """Tensors by name, from files that are opened when first asked for and closed with the reader."""

    def __init__(self, source: Path, stored: Mapping[str, Stored]) -> None:
        super().__init__()
        self.source, self.stored = source, stored
        self.handles: dict[str, Any] = {}

    def handle(self, file: str) -> Any:
        if file not in self.handles:
            self.handles[file] = self.enter_context(opened(self.source / file))
        return self.handles[file]

    def read(self, name: str) -> Tensor:
        return self.handle(self.stored[name].shard).get_tensor(name)


def write_file(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None) -> None:
    """One shard; CheckpointError where safetensors cannot write it."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata or {"format": "pt"}))
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} could not be written to {path.parent.parent}: {error}") from error


def write_index(source: Path, folder: Path, stored: Mapping[str, Stored]) -> None:
    """The index of a folder of these tensors, where the source has one, with the source's other metadata."""
    if (source / INDEX).exists():
        size = sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in stored.values())
        metadata = {**read_json(source / INDEX).get("metadata", {}), "total_size": size}
        weight_map = {name: one.shard for name, one in sorted(stored.items())}
        write_text(folder / INDEX, json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n")


def copy_files(source: Path, target: Path) -> list[str]:
    """Everything but weights, hidden files and what is rewritten; the other files of weights, by name."""
    skipped = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if not path.is_file() or any(part.startswith(".") for part in name.parts) or str(name) in (CONFIG, INDEX):
            continue
        if path.name.endswith(WEIGHT_FILES):
            skipped += [] if path.suffix == ".safetensors" and path.parent == source else [str(name)]
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
    return skipped


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file's handle; CheckpointError where it is no safetensors file, or cut short."""
    try:
        handle = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    with handle as inside:
        yield inside


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; CheckpointError where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not a JSON object")
    return data


def refuse(where: object, problems: list[tuple[str, str]], advice: str = "") -> None:
    """CheckpointError with the problems (kind, tensor) counted by kind, if there are any."""
    if not problems:
        return
    counts = Counter(kind for kind, _ in problems)
    lines = [f"\n  {kind}: {what}" for kind, what in problems[:20]]
    more = [f"\n  and {len(problems) - 20} more"] if len(problems) > 20 else []
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    raise CheckpointError(f"{where} has {total} tensors{advice}:" + "".join(lines + more))
