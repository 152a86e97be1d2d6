"""Sink transfer: a pretrained model's attention sinks become gates, and the sink token goes.

A head with a share a of its attention on the sink gives out = (1 - a) (attention over the other tokens) + a v0. So the gate
g = 1 - a on attention without the sink, with the fill c = v0, is the same function. Two tiers:

* exact: g is read from the scores (`sinks.absorb_sink`); the same function to rounding.
* hidden: g = sigmoid(W x + b) reads the token's hidden state, so it is known before attention. W and b are fitted to 1 - a
  (`shares`), then distilled towards the model as it was (`distil`). In layers that hardly look at the sink, its share tells a token
  whether it is the first, which its hidden state does not know yet: these get the exact gate, or the first token would become a
  sink again.

Shapes: H heads, K key/value heads, E head width, N rows, T tokens.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gated_attn.adapt import sinks
from gated_attn.adapt.corpus import Corpus
from gated_attn.adapt.evidence import PARTS, definitions, evidence
from gated_attn.adapt.shares import Fit, Sums, add_ranks, collect, passes
from gated_attn.codec import Record, drafted
from gated_attn.errors import RecipeError, SpecError, UnsupportedError
from gated_attn.hf import families
from gated_attn.hf.attach import active_gate, attach_each, attached, gates
from gated_attn.hf.families import Found
from gated_attn.hf.store import save_gates
from gated_attn.hf.wiring import GATE
from gated_attn.measure.environment import environment
from gated_attn.records import Diagnosis, Evidence, SinkLayer, TransferRecord
from gated_attn.records.transfer import SINK

SPEC = "output:headwise:sigmoid,bias=0,fill"
"""The gate of the hidden tier."""

RECORD, WORK = "transfer.json", "unfinished"
"""The record, and the folder of what an interrupted transfer goes on from."""

BATCH = 4
"""Rows that are read at a time."""

SAVE_EVERY = 8
"""Batches between two saves of the sums."""

STRONG = 0.3
"""A head whose strongest key is not the sink is listed if its mean share there is larger."""

Progress = Callable[[str, int, int], None]
"""Told (what, done, total)."""


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """What a transfer does; one that goes on in a folder must be the same.

    Fields:
        tier: `exact` or `hidden`; sink: the number of the token in front.
        tokens, length: calibration tokens, in rows of so many; steps, lr, batch: of distillation.
        parts: what is measured, of `evidence.PARTS`.
    """

    FORMAT: ClassVar[str] = "gated-attn.transfer-plan"
    VERSION: ClassVar[int] = 1

    tier: str = "exact"
    sink: int
    tokens: int = 48_000
    length: int = 256
    steps: int = 120
    lr: float = 3e-3
    batch: int = BATCH
    seed: int = 0
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tier not in ("exact", "hidden"):
            raise RecipeError(f"unknown tier {self.tier!r}; legal: exact, hidden")
        if self.tokens < self.length or self.length < 2 or self.steps < 0 or self.batch < 1 or not self.lr > 0:
            raise RecipeError(
                f"a transfer needs tokens >= length >= 2, steps >= 0, batch >= 1 and lr > 0; got tokens={self.tokens}, "
                f"length={self.length}, steps={self.steps}, batch={self.batch}, lr={self.lr:g}"
            )


def find_sink(tokenizer: Any) -> int:
    """The token that stands in front: the tokenizer's BOS, else its end-of-text token, else a line break."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    breaks = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if not breaks:
        raise RecipeError("the tokenizer has no BOS, no end of text and no line break; name a sink token")
    return int(breaks[0])


def transfer(
    model: nn.Module,
    data: Corpus,
    plan: Plan,
    folder: Path,
    *,
    name: str = "",
    sink_text: str = "",
    texts: Mapping[str, str] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> TransferRecord:
    """Make the model's sink gates, in place, and measure it before and after.

    The folder gets `gates.json` and `gates.safetensors` (`load_gates(base, folder)`), `transfer.json`, and `before.json` and
    `after.json`, the diagnoses. A transfer that was interrupted there goes on. A model without sinks is left as it is, and said to
    have none.

    Args:
        model: a causal transformers model, without gates.
        data: what it calibrates on and is measured on.
        name, sink_text, texts: what the record says the model, the sink token and the kinds of text are.

    Raises:
        UnsupportedError: cross attention, encoders, or (exact tier) what `absorb_sink` refuses.
        RecipeError: the folder holds another transfer.
    """
    start = time.perf_counter()
    rows = causal_rows(model)
    if there := gates(model):
        raise SpecError(f"this model has gates already ({next(iter(there))}); a transfer starts from a model without")
    work = _open(folder, plan)
    parameters = sum(p.numel() for p in model.parameters())
    before, seen = _measured(model, data, plan, work / "before", plan.sink, progress, "before")
    sums = _collected(model, rows, data, plan, work, progress)
    fits = {row.name: sums[row.name].fit() for row in rows}
    losses: list[tuple[int, float]] = []
    if not any(bool((fit.share_H > SINK).any()) for fit in fits.values()):
        after, late, sources = before, seen, dict.fromkeys(fits)
    elif plan.tier == "exact":
        sinks.absorb_sink(model, plan.sink)
        sources = dict.fromkeys(fits, "lse")
        after, late = _measured(model, data, plan, work / "after", None, progress, "after")
    else:
        sources = _attach(model, rows, fits, plan.sink)
        losses = _distilled(model, data, plan, work, progress)
        after, late = _measured(model, data, plan, work / "after", None, progress, "after")
    made = TransferRecord(
        model=name or str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        tier=plan.tier,
        spec=SPEC if plan.tier == "hidden" else sinks.SPEC,
        sink=plan.sink,
        sink_text=sink_text,
        texts=dict(texts or {kind: kind for kind in data.calibration}),
        tokens=int(sum(fit_sums.tokens_R.sum() for fit_sums in sums.values()) / max(len(sums), 1)),
        held_out_tokens=data.held_out.tokens,
        steps=plan.steps if losses else 0,
        losses=tuple(losses),
        layers=tuple(_layer(row, fits[row.name], sources[row.name]) for row in rows),
        others=tuple(_others(seen)),
        parameters=parameters,
        added_parameters=sum(p.numel() for gate in attached(model).values() for p in gate.parameters()),
        seconds=time.perf_counter() - start,
        before=before,
        after=after,
        definitions=definitions(data.held_out, seen) if seen is not None else {},
        environment=environment(),
    )
    if attached(model):
        save_gates(model, folder)
    for which, diagnosis in (("before", seen), ("after", late)):
        if diagnosis is not None:
            diagnosis.save(folder / f"{which}.json")
    made.save(folder / RECORD)
    shutil.rmtree(work)
    return made


def causal_rows(model: nn.Module) -> list[Found]:
    """The attention modules of a causal model; UnsupportedError for others."""
    rows = [row for row in families.find(model) if row.family in families.FAMILIES]
    config: Any = getattr(model, "config", None)
    if not rows or any(row.kind == "cross" for row in rows) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("sinks are transferred in causal self attention of transformers models only")
    if not all(getattr(row.module, "is_causal", True) for row in rows) or model.get_output_embeddings() is None:  # type: ignore[operator]
        raise UnsupportedError(
            f"{type(model).__name__} is no causal language model: an encoder's [CLS] is read by what follows, so it cannot be "
            "taken away"
        )
    return rows


def _open(folder: Path, plan: Plan) -> Path:
    """The folder of what an interrupted transfer left, which must have had the same plan."""
    if (folder / RECORD).exists():
        raise RecipeError(f"{folder} holds a transfer already, complete; use another output folder")
    work = folder / WORK
    work.mkdir(parents=True, exist_ok=True)
    there = work / "plan.json"
    if there.exists() and (old := Plan.load(there)) != plan:
        changed = [key for key, value in vars(plan).items() if getattr(old, key) != value]
        raise RecipeError(
            f"{folder} holds an unfinished transfer with another {', '.join(changed)} "
            f"({', '.join(str(getattr(old, key)) for key in changed)}); repeat its options to go on, or use another output folder"
        )
    plan.save(there)
    return work


def _measured(
    model: nn.Module, data: Corpus, plan: Plan, place: Path, sink: int | None, progress: Progress, which: str
) -> tuple[Evidence, Diagnosis | None]:
    """The evidence, from disk if an earlier run left it there."""
    numbers, maps = place / "evidence.json", place / "diagnosis.json"
    if not numbers.exists():
        total = 1 + ("attention" in plan.parts) + 6 * ("quantisation" in plan.parts) + 2 * ("streaming" in plan.parts)
        done = 0
        for what, found in evidence(model, data.held_out, sink=sink, parts=plan.parts):
            if found is None:
                progress(f"{which}: {what}", done, total)
                done += 1
            else:
                found.save(maps if isinstance(found, Diagnosis) else numbers)
    return Evidence.load(numbers), Diagnosis.load(maps) if maps.exists() else None


def _collected(
    model: nn.Module, rows: list[Found], data: Corpus, plan: Plan, work: Path, progress: Progress
) -> dict[str, Sums]:
    """The sums over the calibration text, saved on the way."""
    ids_NT = data.take(plan.tokens, plan.seed).to(next(model.parameters()).device)
    rank, ranks = _rank()
    ids_NT = ids_NT[rank::ranks]
    sums: dict[str, Sums] = {}
    groups = passes(model, rows)
    for number, group in enumerate(groups):
        place = work / f"sums-{number}-of-{len(groups)}-rank{rank}.safetensors"
        own, counted = _read_sums(place)
        batches = ids_NT[counted:].split(BATCH) if counted < len(ids_NT) else ()
        for count in collect(model, group, batches, plan.sink, own, seen=counted):
            progress("shares of the sink", number * len(ids_NT) + count, len(groups) * len(ids_NT))
            if count % (BATCH * SAVE_EVERY) == 0 or count == len(ids_NT):
                _write_sums(place, own, count)
        add_ranks(own)
        sums |= own
    return sums


def _read_sums(place: Path) -> tuple[dict[str, Sums], int]:
    if not place.exists():
        return {}, 0
    tensors = load_file(place)
    found: dict[str, Sums] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        if name:
            own = found.setdefault(name, Sums.__new__(Sums))
            setattr(own, part, tensor)
    return found, int(tensors["rows"])


def _write_sums(place: Path, sums: Mapping[str, Sums], rows: int) -> None:
    tensors = {f"{name}/{part}": tensor for name, own in sums.items() for part, tensor in own.tensors().items()}
    with drafted(place, replace=True) as draft:
        save_file({**tensors, "rows": torch.tensor(rows)}, draft)


def _attach(model: nn.Module, rows: list[Found], fits: Mapping[str, Fit], sink: int) -> dict[str, str | None]:
    """Gates with the fitted weights, and exact ones in layers that hardly look at the sink; module -> what its gate reads."""
    seen = sinks.alone(model, rows, sink)
    exact = sinks.why_inexact(model, rows) is None
    sources: dict[str, str | None] = {
        row.name: "hidden" if float(fits[row.name].share_H.mean()) > SINK else "lse" if exact else None for row in rows
    }
    specs = {"hidden": SPEC, "lse": sinks.SPEC}
    attach_each(model, {name: specs[source] for name, source in sources.items() if source is not None})
    with torch.no_grad():
        for row in rows:
            if sources[row.name] is None:
                continue
            gate: Any = active_gate(row.module.get_submodule(GATE))
            sinks.fill_in(gate, seen[row.name])
            if sources[row.name] == "hidden":
                gate.proj.weight.copy_(fits[row.name].weight_HD)
                gate.proj.bias.copy_(fits[row.name].bias_H)
    return sources


def _distilled(model: nn.Module, data: Corpus, plan: Plan, work: Path, progress: Progress) -> list[tuple[int, float]]:
    if not plan.steps:
        return []
    from gated_attn.adapt.distil import distil

    return distil(
        model, even_rows(data.calibration, plan), work / "distil", sink=plan.sink, steps=plan.steps, lr=plan.lr, batch=plan.batch,
        seed=plan.seed, progress=lambda step: progress("distillation", step, plan.steps),
    )  # fmt: skip


def even_rows(calibration: Mapping[str, Tensor], plan: Plan) -> Tensor:
    """Equally many rows of each kind, as many as the shortest has or the steps need."""
    order = torch.Generator().manual_seed(plan.seed + 1)
    each = max(1, plan.steps * plan.batch // len(calibration))
    drawn = [ids_NT[torch.randperm(len(ids_NT), generator=order)[:each]] for ids_NT in calibration.values()]
    return torch.cat(drawn)


def _layer(row: Found, fit: Fit, source: str | None) -> SinkLayer:
    r2 = tuple(fit.r2_H.tolist()) if source == "hidden" else None
    return SinkLayer(name=row.name, layer=row.layer, share=tuple(fit.share_H.tolist()), source=source, r2=r2)


def _others(seen: Diagnosis | None) -> list[str]:
    """Heads that look most at another token than the first, told from the diagnosis."""
    if seen is None:
        return []
    return [
        f"{module.name}, head {head.head}: {head.strongest_token!r} at {head.strongest_position}, {head.strongest_share:.2f}"
        for module in seen.attention
        for head in module.heads
        if head.strongest_position > 0 and (head.strongest_share or 0) > STRONG
    ]


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
