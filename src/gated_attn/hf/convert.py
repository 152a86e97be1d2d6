"""A checkpoint in one gate layout -> the same checkpoint in another, shard by shard: the work of `gated-attn convert`.

Three steps. Plan: the headers alone say which tensors there are, and the conversion runs once on tensors without storage, so
that whatever does not fit is found before a byte is written. Write: one shard at a time, into a folder beside the target. Check:
the written headers are compared with the plan, and the folder is renamed into place.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gated_attn.codec import drafted, write_text
from gated_attn.errors import CheckpointError, GatedAttnError, SpecError, UnsupportedError
from gated_attn.hf import layouts
from gated_attn.hf.checkpoint import (
    CONFIG,
    Reader,
    Stored,
    copy_files,
    inventory,
    read_json,
    refuse,
    write_file,
    write_index,
)
from gated_attn.hf.layouts import LAYOUTS, Layout, Sizes
from gated_attn.hf.names import KEY, refused
from gated_attn.hf.native import in_config
from gated_attn.spec import GateSpec

# Submodules that only an attention module of some layout has; below a module of another layout they are a contradiction.
KNOWN = tuple(sorted({name for layout in LAYOUTS.values() for name in layout.names.values()} | {"attn_gate"}))


@dataclass(frozen=True)
class Converted:
    """What `convert_checkpoint` did: how many attention modules, tensors and shards it wrote, and notes for people."""

    source: str
    target: str
    width: str
    modules: int
    tensors: int
    shards: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """From which layout to which, and at which width.

    Fields:
        spec: of the gates where it is recorded; it says which layers have one.
        config: the model's own configuration.
        note: what config.json records about gates under `KEY`: layout, width and (optional) spec.
        native: the model_type, of `native.READ_AS`, whose gates transformers reads itself, and the layouts that it reads; or None.
    """

    before: Layout
    after: Layout
    width: str
    spec: GateSpec | None
    config: Mapping[str, Any]
    note: Mapping[str, Any]
    native: tuple[str, tuple[str, ...]] | None


@dataclass(frozen=True)
class Job:
    """The weights, or the biases, of one attention module: key -> name, before and after."""

    sizes: Sizes
    width: str
    source: Mapping[str, str]
    target: Mapping[str, str]


@dataclass
class Conversion:
    """Per output shard the jobs and the copies (old name -> new name); and every tensor that must come out of it."""

    before: Layout
    after: Layout
    jobs: dict[str, list[Job]] = field(default_factory=dict)
    copies: dict[str, dict[str, str]] = field(default_factory=dict)
    made: list[tuple[str, Stored]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    problems: list[tuple[str, str]] = field(default_factory=list)
    modules: int = 0

    def copy(self, name: str, one: Stored, new: str) -> None:
        self.copies.setdefault(one.shard, {})[name] = new
        self.made.append((new, one))
        self.used.add(name)


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    from_layout: str | None,
    to_layout: str,
    *,
    width: str | None = None,
    modules: str = "",
) -> Converted:
    """Convert every gated attention module of a folder of safetensors; `target` appears whole or not at all.

    Args:
        source, target: folders; the target must not exist. Sizes come from the source's config.json.
        from_layout, to_layout: names in `layouts.LAYOUTS`; from_layout may be None where config.json records it, or
            `native.ROWS` has a row for its model_type.
        width: headwise or elementwise; may be None there too, or where a spec is recorded.
        modules: regular expression, searched in the modules' paths; other modules are copied as they are.

    A model with gates of its own in a layout that transformers does not read gets a config.json that stock classes refuse; back
    in the layout that it reads, it gets its own again.

    Raises CheckpointError naming missing, unexpected and duplicate tensors, ShapeError for rows that do not fit, SpecError for a
    layout or width that config.json contradicts, UnsupportedError for gates that a layout cannot hold.
    """
    source, target = Path(source), Path(target)
    with drafted(target) as draft:
        if target.resolve().is_relative_to(source.resolve()):
            raise CheckpointError(f"{target} lies inside {source}: choose a folder beside it")
        if not source.is_dir():
            raise CheckpointError(f"{source} is not there, or no folder; name one with {CONFIG} and safetensors")
        config = read_json(source / CONFIG)
        stored = inventory(source)
        asked = _asked(source, config, stored, from_layout, to_layout, width)
        plan = make_plan(stored, asked, modules)
        draft.mkdir(parents=True)
        skipped = copy_files(source, draft)
        write_text(draft / CONFIG, json.dumps(_described(config, asked), indent=2, ensure_ascii=False) + "\n")
        shards = _write_shards(source, draft, stored, plan)
        _check(draft, plan)
    notes = [f"not copied, since weights in it would be in the old layout: {', '.join(skipped)}"] if skipped else []
    if asked.native and asked.after.name not in asked.native[1]:
        kind, own = asked.native[0], asked.native[1][0]
        notes.append(
            f"transformers reads model_type {kind!r} as {own}, so it refuses {target}; gated-attn convert {target} NEW --to {own} "
            "makes it loadable again"
        )
    return Converted(
        asked.before.name, asked.after.name, asked.width, plan.modules, len(plan.made), shards, tuple(notes)
    )


def _asked(
    source: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, Stored],
    from_layout: str | None,
    to_layout: str,
    width: str | None,
) -> Asked:
    """What the arguments say and config.json records, where they do not contradict each other."""
    note = config.get(KEY) or {}
    if not isinstance(note, dict):
        raise CheckpointError(f"{source / CONFIG}: {KEY!r} is {note!r}; it holds an object with layout and width")
    described = note.get("base_config", config)  # what a stock class would read
    if "gates" in note:  # what save_pretrained of a model with attached gates wrote
        note = {"layout": "separate", **note}
    spec = _spec(note.get("spec") or _attached(note.get("gates")))
    recorded, own_width, native = note.get("layout"), None, None
    if found := in_config(described):
        kind, row, own_width = found
        native = (kind, row.reads)
        if not recorded and from_layout not in (None, *row.reads):
            raise SpecError(
                f"transformers reads model_type {kind!r} as {row.reads[0]}, which contradicts layout {from_layout}; if the weights "
                f'are {from_layout} all the same, record it in {source / CONFIG}: "{KEY}": {{"layout": "{from_layout}"}}'
            )
        recorded = recorded or from_layout or _named_so(stored, row.reads)
    before = layouts.named(_settled("layout", from_layout, recorded, "--from"))
    after = layouts.named(to_layout)
    written = note.get("width") or (spec.width if spec else None)
    if not written and own_width and width not in (None, own_width):
        raise SpecError(f"the gates of model_type {kind!r} are {own_width}, which contradicts --width {width}")
    width = _settled("width", width, written or own_width, "--width")
    return Asked(before, after, width, spec, described, note, native)


def _named_so(stored: Mapping[str, Stored], among: tuple[str, ...]) -> str:
    """The first of some layouts whose gates are there by name, or else the first."""
    for name in among if len(among) > 1 else ():
        gate = LAYOUTS[name].names.get("gate")
        if any(f"{parent}{gate}.weight" in stored for parent in _attention_modules(stored, LAYOUTS[name], "")):
            return name
    return among[0]


def _described(config: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """The config.json of what is written."""
    note = {**asked.note, "layout": asked.after.name, "width": asked.width}
    if asked.native is None or "gates" in note:
        return {**config, KEY: note}
    if asked.after.name not in asked.native[1]:
        return refused(asked.config, note)
    own = asked.config.get(KEY)
    return {**asked.config, KEY: {**own, "layout": asked.after.name}} if own and "layout" in own else dict(asked.config)


def make_plan(stored: Mapping[str, Stored], asked: Asked, modules: str = "") -> Conversion:
    """Which tensors become which: every stored tensor is used once and every planned one has one origin."""
    before, spec = asked.before, asked.spec
    plan = Conversion(before, asked.after)
    found = _attention_modules(stored, before, modules)
    if not found:
        raise CheckpointError(
            f"no attention module of layout {before.name} among {len(stored)} tensors: no path"
            + (f" that matches {modules!r}" if modules else "")
            + f" has {' and '.join(before.names[key] for key in before.tensors if key != 'gate')}; check --from"
        )
    for parent, below in found.items():
        layer = next((int(part) for part in parent.split(".") if part.isdecimal()), 0)
        gated = spec is None or spec.applies_to(layer)
        _plan_module(plan, stored, parent, below, _sizes(asked.config, layer), asked.width if gated else "none")
    for name, one in stored.items():
        if name in plan.used:
            continue
        path, is_gate, _ = name.rpartition(f".{before.names.get('gate', '?')}.")
        if is_gate and not modules and path + "." not in found and f"{path}.up_proj.weight" not in stored:
            plan.problems.append(
                ("unexpected", f"{name}: a gate without queries beside it; name the gated modules with --modules")
            )
        plan.copy(name, one, name)
    times = Counter(name for name, _ in plan.made)
    plan.problems += [("duplicate", f"{name}, from {n} origins") for name, n in times.items() if n > 1]
    refuse(
        "the checkpoint", plan.problems, f"; check that its layout is {before.name} and all attention modules are gated"
    )
    return plan


def _attention_modules(stored: Mapping[str, Stored], layout: Layout, modules: str) -> dict[str, list[str]]:
    """Path with its dot -> the tensors below it, for modules that have queries, keys or values in this layout's names."""
    try:
        wanted = re.compile(modules)
    except re.error as error:
        raise SpecError(f"{modules!r} is not a regular expression: {error}") from None
    names = "|".join(re.escape(layout.names[key]) for key in layout.tensors if key != "gate")
    pattern = re.compile(rf"(|.*?\.)(?:{names})\..+")
    found: dict[str, list[str]] = {}
    for name in stored:
        match = pattern.fullmatch(name)
        if match and wanted.search(match[1]):
            found[match[1]] = []
    for name in stored:
        parts = name.split(".")
        for path in (".".join([*parts[:i], ""]) for i in range(len(parts))):
            if path in found:
                found[path].append(name)
    return found


def _plan_module(
    plan: Conversion, stored: Mapping[str, Stored], parent: str, below: list[str], sizes: Sizes, width: str
) -> None:
    before, after = plan.before, plan.after
    plan.modules += 1
    needed = [key for key in before.tensors if before.rows(key, sizes, width)]
    absent = [("missing", f"{parent}{before.names[key]}.weight") for key in needed
              if f"{parent}{before.names[key]}.weight" not in stored]  # fmt: skip
    movable = {f"{parent}{before.names[key]}.{suffix}" for key in needed for suffix in ("weight", "bias")}
    kept = f"{parent}{before.names['out']}."
    extra = [name for name in below if name not in movable and not name.startswith(kept)
             and name.startswith(tuple(f"{parent}{known}." for known in KNOWN))]  # fmt: skip
    why = f"not a weight or bias of layout {before.name}" + (" in a layer without a gate" if width == "none" else "")
    plan.problems += absent + [("unexpected", f"{name}: {why}") for name in extra]
    plan.used |= {*extra}
    if absent:
        plan.used |= {*below}
        return
    for name in below:
        if name.startswith(kept):
            plan.copy(name, stored[name], f"{parent}{after.names['out']}.{name[len(kept) :]}")
    for suffix in ("weight", "bias"):
        names = {key: f"{parent}{before.names[key]}.{suffix}" for key in needed}
        names = {key: name for key, name in names.items() if name in stored}
        if not names:
            continue
        empty = {
            key: torch.empty(stored[name].shape, dtype=stored[name].dtype, device="meta") for key, name in names.items()
        }
        try:
            made = layouts.convert(empty, sizes, before.name, after.name, width=width)
        except GatedAttnError as error:
            raise type(error)(f"{parent}*.{suffix}: {error}") from error
        target = {key: f"{parent}{after.names[key]}.{suffix}" for key in made}
        shard = stored[next(iter(names.values()))].shard
        plan.jobs.setdefault(shard, []).append(Job(sizes, width, names, target))
        plan.made += [(target[key], Stored(shard, tuple(one.shape), one.dtype)) for key, one in made.items()]
        plan.used |= {*names.values()}


def _write_shards(source: Path, draft: Path, stored: Mapping[str, Stored], plan: Conversion) -> int:
    """One output shard at a time, with the parts of a module that lie in other shards; the number of files."""
    files = sorted({one.shard for _, one in plan.made})
    for file in files:
        with Reader(source, stored) as reader:
            tensors = {new: reader.read(name) for name, new in plan.copies.get(file, {}).items()}
            for job in plan.jobs.get(file, []):
                given = {key: reader.read(name) for key, name in job.source.items()}
                made = layouts.convert(given, job.sizes, plan.before.name, plan.after.name, width=job.width)
                tensors |= {job.target[key]: tensor for key, tensor in made.items()}
            write_file(tensors, draft / file, reader.handle(file).metadata())
            del tensors
    write_index(source, draft, dict(plan.made))
    return len(files)


def _check(draft: Path, plan: Conversion) -> None:
    """Read the written headers back: every planned tensor once, with its shape and dtype, and nothing else."""
    expected, written = dict(plan.made), inventory(draft)
    problems = [("missing", name) for name in expected if name not in written]
    problems += [("unexpected", name) for name in written if name not in expected]
    problems += [("wrong", f"{name} is {written[name]}, planned {one}") for name, one in expected.items()
                 if name in written and written[name] != one]  # fmt: skip
    refuse("what was written", problems)


def _settled(what: str, asked: str | None, recorded: str | None, option: str) -> str:
    if asked and recorded and asked != recorded:
        raise SpecError(f"{option} {asked} contradicts {CONFIG}, which records {what} {recorded!r}: leave {option} out")
    if not (asked or recorded):
        raise SpecError(f"{CONFIG} records no {what}, and a {what} is never guessed from a shape: pass {option}")
    return str(asked or recorded)


def _attached(gates: Mapping[str, str] | None) -> GateSpec | None:
    """The one spec of attached gates, with the layers that have one; UnsupportedError where they differ."""
    if not gates:
        return None
    specs = {replace(GateSpec.parse(text), layers=None) for text in gates.values()}
    if len(specs) != 1:
        raise UnsupportedError(
            f"the model has {len(specs)} kinds of gates, and a layout holds one: {', '.join(sorted(map(str, specs)))}"
        )
    layers = {next((int(part) for part in name.split(".") if part.isdecimal()), 0) for name in gates}
    return replace(specs.pop(), layers=tuple(layers))


def _spec(text: GateSpec | str | None) -> GateSpec | None:
    if text is None:
        return None
    spec = GateSpec.parse(text)
    plain = spec.position == "output" and spec.source == "hidden" and spec.rank is None and spec.in_features is None
    if not plain or spec.width not in layouts.WIDTHS or spec.fill:
        raise UnsupportedError(
            f"gate {spec} has no layout: only output gates, headwise or elementwise, from the whole hidden state and without a "
            f"rank or fill can be stored as rows beside the queries"
        )
    return spec


def _sizes(config: Mapping[str, Any], layer: int) -> Sizes:
    text = config if "num_attention_heads" in config else config.get("text_config") or {}
    per_layer = text.get("num_attention_heads_per_layer")
    heads = per_layer[layer] if per_layer and layer < len(per_layer) else text.get("num_attention_heads")
    head_dim = text.get("head_dim") or (heads and text.get("hidden_size", 0) // heads)
    if not heads or not head_dim:
        raise CheckpointError(
            f"{CONFIG} needs num_attention_heads, and head_dim or hidden_size: found {heads} and {head_dim}"
        )
    return Sizes(heads, text.get("num_key_value_heads") or heads, head_dim)
