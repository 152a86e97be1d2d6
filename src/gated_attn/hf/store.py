"""Gates on disk beside a base model, as small as an adapter: `gates.json` and `gates.safetensors`.

save_gates(model, "gates")
load_gates(AutoModelForCausalLM.from_pretrained(base), "gates")
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gated_attn.codec import Checked, Record, drafted
from gated_attn.errors import RecordError, SpecError, UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf import families, plain
from gated_attn.hf.attach import active_gate, attach_each, detach
from gated_attn.hf.families import Found
from gated_attn.hf.wiring import GATE
from gated_attn.spec import GateSpec

JSON, TENSORS = "gates.json", "gates.safetensors"

SAMPLE = 64
"""How many values of each base parameter `base_hash` reads."""


@dataclass(frozen=True, kw_only=True)
class SavedGate(Checked):
    """One gate: the text of its spec, and the sizes of the attention module that it was trained in."""

    spec: str
    dim: int
    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            object.__setattr__(self, "spec", str(GateSpec.parse(self.spec)))
        except SpecError as error:
            raise RecordError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class SavedGates(Record):
    """`gates.json`: the base model's name, `base_hash` of it (None: not known), and attention module -> gate."""

    FORMAT: ClassVar[str] = "gated-attn.gates"
    VERSION: ClassVar[int] = 1

    base: str
    base_hash: str | None
    gates: dict[str, SavedGate]


class Placed(NamedTuple):
    """A gate where it is: its attention module, its own name in the model, and what is saved of it."""

    row: Found
    name: str
    gate: Gate
    saved: SavedGate


def placed(model: nn.Module) -> dict[str, Placed]:
    """The gates by the name of the attention module that each belongs to. Names are those without an adapter's wrappers.

    Of a gate that PEFT keeps copies of (`modules_to_save`), the active copy. UnsupportedError for a gate elsewhere.
    """
    names = {module: name for name, module in model.named_modules()}
    there = {}
    for row in families.find(model):
        held = row.module._modules.get(GATE)
        if held is not None:
            gate: Any = active_gate(held)
            there[_plain(row.name)] = Placed(row, _plain(f"{row.name}.{GATE}"), gate, _saved(row, gate))
    others = {_plain(names[module]) for module in names if isinstance(module, Gate)} - {
        one.name for one in there.values()
    }
    if others:
        raise UnsupportedError(
            f"gates that are in no attention module of a known family cannot be saved: {', '.join(sorted(others))}"
        )
    return there


def save_gates(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write the model's gates to `gates.json` and `gates.safetensors` in the folder, and nothing else; returns the folder.

    `gates.json` names each attention module with its spec and sizes, the base model, and `base_hash` of it. Names and base
    are those of the model inside PEFT, DDP or `torch.compile` wrappers. Each file appears by one rename, when all of it is
    written. Raises SpecError for a model without gates.
    """
    target, model = Path(folder), unwrapped(model)
    there = placed(model)
    if not there:
        raise SpecError("this model has no gates to save; attach some first")
    record = SavedGates(
        base=_base_name(model), base_hash=base_hash(model), gates={name: one.saved for name, one in there.items()}
    )
    tensors = {name: _whole(value).contiguous() for name, value in _tensors(there.values()).items()}
    if adapted := [name for name in tensors if "lora_" in name or ".base_layer." in name]:
        raise SpecError(
            f"the gates have an adapter of their own ({adapted[0]}); merge it into them first, as merge_and_unload does, or "
            "save the gates before get_peft_model and the adapter beside them"
        )
    if empty := [name for name, value in tensors.items() if value.device.type == "meta"]:
        raise UnsupportedError(
            f"{few(empty)}: on the meta device, without values to save; load the model's weights first"
        )
    target.mkdir(parents=True, exist_ok=True)
    with drafted(target / TENSORS, replace=True) as draft:
        save_file({name: value.cpu() for name, value in tensors.items()}, draft, metadata={"format": "pt"})
    record.save(target / JSON)
    return target


def load_gates(model: nn.Module, folder: str | os.PathLike[str], *, base: str = "same") -> nn.Module:
    """Attach the gates that `save_gates` wrote, with their values, and return the model.

    Where the gates are attached already, with the same specs, only their values are read. Values take the dtype that the
    gate has in the model, as with `from_pretrained(dtype=...)`; in the dtype that they were saved in they are the same bits.

    Args:
        base: `same` refuses a base model whose `base_hash` is another; `any` takes one that was fine-tuned, quantised or
            resized since. The attention modules and their sizes must be those of `gates.json` in either case.

    Raises RecordError (which names the file) for files that are damaged, of another model or of other gates, and
    UnsupportedError for a model that is sharded or on the meta device; the model is then as it was.
    """
    if base not in ("same", "any"):
        raise SpecError(f"unknown base {base!r}; legal: same, any")
    path, outer, model = Path(folder), model, unwrapped(model)
    record = SavedGates.load(path / JSON)
    tensors = _read_tensors(path / TENSORS)
    if base == "same":
        _check_base(model, record, path / JSON)
    there = placed(model)
    new = not there
    if new:
        _check_sizes(model, record, path / JSON)
        attach_each(model, {_actual(model, name): one.spec for name, one in record.gates.items()})
        there = placed(model)
    try:
        _check_same({name: one.saved for name, one in there.items()}, record, path / JSON)
        values = _tensors(there.values())
        for name, value in values.items():
            if hasattr(value, "full_tensor") or value.device.type == "meta":
                raise UnsupportedError(
                    f"{path / TENSORS}: {name} of this model is sharded or on the meta device; load its gates after its "
                    "weights and before fully_shard"
                )
        _check_tensors(tensors, values, path / TENSORS)
    except (RecordError, UnsupportedError):
        if new:
            detach(model)
        raise
    with torch.no_grad():
        for name, value in values.items():
            value.copy_(tensors[name])
    return outer


def base_hash(model: nn.Module) -> str | None:
    """SHA-256 of the base model, the same on every device and with or without gates or adapters; None if weights are on meta.

    It reads one line per parameter, in the order of their names, a tied one under its first: its name without an adapter's
    wrappers, its shape, and up to 64 of its values, those at (n - 1) * i // 63 for i = 0 ... 63, rounded to bfloat16. So a
    base loaded in bfloat16 has the hash that it has in float32, and a base that was trained further has another.
    """
    lines = []
    for name, parameter in sorted(_base_parameters(unwrapped(model), "", set()), key=lambda pair: pair[0]):
        if parameter.device.type == "meta":
            return None
        flat = _whole(parameter.detach()).reshape(-1)
        last = flat.numel() - 1
        where = sorted({last * i // (SAMPLE - 1) for i in range(SAMPLE)} if last >= 0 else ())
        values = flat[torch.tensor(where, device=flat.device, dtype=torch.long)].to("cpu", torch.bfloat16)
        lines.append(f"{name} {list(parameter.shape)} {values.view(torch.int16).tolist()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, DDP and PEFT wrappers."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            model = model.get_base_model()  # type: ignore[operator]
        else:
            return model


def _base_parameters(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) of the model under gates and adapters; PEFT's layers keep the original as one of two children."""
    for inside in ("base_layer", "original_module"):
        if inside in module._modules and hasattr(module, "active_adapters"):
            yield from _base_parameters(module._modules[inside], prefix, seen)  # type: ignore[arg-type]
            return
    if isinstance(module, Gate):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _base_parameters(child, f"{prefix}{name}.", seen)


def _plain(name: str) -> str:
    parts, keep, skip = name.split("."), [], False
    for part in parts:
        if not skip and part not in ("base_layer", "original_module", "modules_to_save"):
            keep.append(part)
        skip = part == "modules_to_save"
    return ".".join(keep)


def _actual(model: nn.Module, name: str) -> str:
    """The attention module's name in this model, from its name without wrappers."""
    return next((row.name for row in families.find(model) if _plain(row.name) == name), name)


def _saved(row: Found, gate: Gate) -> SavedGate:
    return _sized(row, str(gate.spec))


def _sized(row: Found, spec: str) -> SavedGate:
    if row.family in plain.ROWS:
        dim = plain.width(row, "output")
    else:
        dim = families.in_features(families.read(row.module, row.family.q.child))
    return SavedGate(spec=spec, dim=dim, **asdict(families.sizes(row.module, row.family)))


def _tensors(there: Iterable[Placed]) -> dict[str, Tensor]:
    """Each gate parameter by its name in the model."""
    return {f"{one.name}.{name}": value.data for one in there for name, value in one.gate.named_parameters()}


def _whole(value: Tensor) -> Tensor:
    """All of a parameter that `torch.distributed` keeps in pieces; every rank must ask."""
    whole = getattr(value, "full_tensor", None)
    return value if whole is None else whole()


def _base_name(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise RecordError(f"{path}: cannot be read, or cut short: {error}; save the gates again") from error


def _check_base(model: nn.Module, record: SavedGates, path: Path) -> None:
    found = base_hash(model)
    if found is None or record.base_hash is None:
        which = "this model has" if found is None else "the gates were saved with"
        raise RecordError(
            f"{path}: {which} weights that are not in memory, so the base cannot be compared; load_gates(..., base='any') "
            "takes it on trust"
        )
    if found != record.base_hash:
        raise RecordError(
            f"{path}: saved for the base {record.base!r} with hash {record.base_hash[:12]}, and this model "
            f"({_base_name(model)!r}) has {found[:12]}: other weights, names or shapes. Load the base that the gates were "
            "trained on, or accept this one with load_gates(..., base='any')"
        )


def _check_sizes(model: nn.Module, record: SavedGates, path: Path) -> None:
    there = {_plain(row.name): row for row in families.find(model)}
    for name in record.gates:
        if name not in there:
            raise RecordError(
                f"{path}: no attention module is named {name!r} in this {type(model).__name__}; it has {few(there)}"
            )
    _check_same({name: _sized(there[name], one.spec) for name, one in record.gates.items()}, record, path)


def _check_same(there: Mapping[str, SavedGate], record: SavedGates, path: Path) -> None:
    """RecordError unless the gates of the model are those of the record."""
    more, less = sorted(set(there) - set(record.gates)), sorted(set(record.gates) - set(there))
    if more or less:
        raise RecordError(
            f"{path}: holds gates of {len(record.gates)} modules, and the model has gates in {len(there)}: only in the "
            f"file {few(less)}; only in the model {few(more)}. detach(model) first, or load the file that fits"
        )
    for name, one in there.items():
        kept = record.gates[name]
        if one != kept:
            raise RecordError(
                f"{path}: the gate of {name} is {_told(kept)}, and the model has {_told(one)}; detach(model) first, or use the "
                "model that the gates were trained in"
            )


def _told(one: SavedGate) -> str:
    return f"{one.spec!r} with D={one.dim}, H={one.heads}, K={one.kv_heads}, E={one.head_dim}"


def _check_tensors(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor], path: Path) -> None:
    missing, unexpected = sorted(set(values) - set(tensors)), sorted(set(tensors) - set(values))
    if missing or unexpected:
        raise RecordError(
            f"{path}: {len(missing)} missing tensors ({few(missing)}) and {len(unexpected)} unexpected ones ({few(unexpected)}); "
            f"it is not the file that was saved with {JSON}"
        )
    for name, value in values.items():
        if value.shape != tensors[name].shape:
            raise RecordError(
                f"{path}: {name} has shape {tuple(tensors[name].shape)}, and the model's gate {tuple(value.shape)}"
            )


def few(names: Iterable[str]) -> str:
    """The first four of the names, and how many more there are."""
    listed = list(names)
    return (", ".join(listed[:4]) or "none") + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
