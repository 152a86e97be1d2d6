"""Watching a model's attention while it runs, whatever implementation it uses, without a change to what it computes.

    with capture(model) as seen:
        model(**batch)
    seen.attention["model.layers.3.self_attn"].first_share

The class of every attention module is swapped for one that runs the same attention function and then looks at the queries and keys
it was given (`swap`, as in `attach`); hooks show residual streams and gates. When the context ends all of that is gone.

Shapes: B batch, T queries, S keys, H heads, K key/value heads, E head width, G gate width, D model width.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gated_attn.attention import Sink
from gated_attn.attention.call import sink_gate
from gated_attn.errors import SpecError, UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf import families, native
from gated_attn.hf.attach import attached, why_none
from gated_attn.hf.families import Found
from gated_attn.hf.functions import PREFIX, Stock
from gated_attn.hf.monitor import is_compiled
from gated_attn.hf.store import unwrapped
from gated_attn.hf.swap import Swapped, swap, unswap
from gated_attn.hf.wiring import ConfigView, eager_of
from gated_attn.measure.calls import scores_of
from gated_attn.measure.seen import AGAIN, Capture, Chosen, check_finite
from gated_attn.measure.statistics import head_norms
from gated_attn.measure.streaming import Scores, Span, Summary, summarize
from gated_attn.measure.totals import EARLY, AttentionTotals

WATCH = "_gated_attn_watch"
"""Where a watched attention module keeps what watches it, while it does."""

RECORD = "gated_attn.record|"
"""Before the name of an attention function: the same function, watched."""


class RecordView(ConfigView):
    """A configuration in which the attention implementation goes by its watched name."""

    @property
    def _attn_implementation(self) -> Any:
        return register(self.__dict__["_shown"]._attn_implementation or "eager")


class Recorded(Swapped):
    """An attention module that asks for the watched form of the attention function that it is set to."""

    gated_prefix = "Recorded"

    @property
    def config(self) -> Any:
        return RecordView(_held(self))

    @classmethod
    def gated_space(cls, base: type[nn.Module]) -> dict[str, Any]:
        return {"eager_attention": staticmethod(eager_of(base))}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watch: _Watch = self.__dict__[WATCH]
        watch.begin(args[0] if args else kwargs["hidden_states"])
        out = super().forward(*args, **kwargs)  # type: ignore[misc]
        watch.end()
        return out


def _held(module: Any) -> Any:
    """The configuration as the class below shows it: a gated module shows a view of its own."""
    below = type(module).gated_base
    shown: Any = getattr(below, "config", None)
    return shown.__get__(module) if isinstance(shown, property) else module.__dict__["config"]


def register(name: str) -> str:
    """The name under which watched modules find this implementation; registered at the first request."""
    if RECORD + name not in AttentionInterface._global_mapping:
        AttentionInterface.register(RECORD + name, _watched(name))
    return RECORD + name


def recomputing() -> bool:
    """Whether this runs inside a backward pass, where gradient checkpointing calls modules again."""
    return bool(torch._C._current_graph_task_id() != -1)


def _watched(name: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, module.eager_attention)
        seen = Stock(module) if "flash" in name and not name.startswith(PREFIX) else module
        out_BTHE, weights = function(seen, query, key, value, attention_mask, *args, **kwargs)
        if recomputing():
            return out_BTHE, weights
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            module.__dict__[WATCH].see(name, query, key, attention_mask, kwargs, out_BTHE)
        return out_BTHE, weights

    return attention


class _Watch:
    """What watches one attention module."""

    def __init__(self, capture: Capture, row: Found, gate: tuple[str, Any] | None) -> None:
        self.capture, self.row, self.native_gate = capture, row, gate
        self._values_BTHG: Tensor | None = None

    def begin(self, hidden: Tensor) -> None:
        """The module is called; a gate that the model was born with is read from its input."""
        if self.native_gate is not None and not recomputing():
            name, gate = self.native_gate
            with torch.no_grad():
                self._values_BTHG = gate.values(hidden)
            self.capture.see_gate(self.capture.call(name), gate.spec, self._values_BTHG, self.row)

    def end(self) -> None:
        """The call is over."""
        self._values_BTHG = None

    def see(self, name: str, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any], out_BTHE: Tensor) -> None:
        """One call of the attention function."""
        capture, chosen = self.capture, self.capture.chosen
        B, H, T, _ = query.shape
        call = _Call(name, self.row.module, query, key, mask, kwargs)
        spans = capture.spans(self.row, B, T, key.shape[2], call.every.keep)
        out_BTHE = out_BTHE[:, :, :H]
        if self._values_BTHG is not None:
            out_BTHE = out_BTHE * self._values_BTHG
        own = capture.call(self.row.name)
        if capture.counts_tokens(own):
            capture.lengths += [span.stop - span.start for span in spans]
        if chosen.heads is not None:
            if max(chosen.heads) >= H:
                raise SpecError(f"head {max(chosen.heads)} is not there; {self.row.name} has heads 0 to {H - 1}")
            call.choose(chosen.heads)
        if chosen.queries is not None:
            spans = [cut for span in spans if (cut := _cut(span, *chosen.queries)) is not None]
        for span, summary in zip(spans, summarize(call.scores, spans, late=EARLY, lse=call.is_sink), strict=True):
            self._count(own, call, span, summary, out_BTHE[span.row, span.start : span.stop].detach())

    def _count(self, own: str, call: _Call, span: Span, summary: Summary, out_THE: Tensor) -> None:
        """One sequence of a call: what its weights came to, and what all heads gave."""
        capture, chosen = self.capture, self.capture.chosen
        if summary.visible_T.max() > span.key_stop - span.key_start:
            raise UnsupportedError(
                f"{self.row.name}: token {span.key_start} of row {span.row} begins a sequence, by its position ids, and its "
                f"queries see {int(summary.visible_T.max())} keys where the sequence has {span.key_stop - span.key_start}: "
                "this model looks across packed documents; pass use_cache=False, or a mask"
            )
        check_finite(f"attention of {self.row.name}", out_THE)
        chosen_THE = out_THE if chosen.heads is None else out_THE[:, list(chosen.heads)]
        if own not in capture.attention:
            capture.attention[own] = AttentionTotals(
                *chosen_THE.shape[1:], sink_tokens=chosen.sink_tokens, sink_eps=chosen.sink_eps
            )
        reads_input, ids_BL = capture.reads_input(self.row), capture.batch.ids_BL
        ids_S = ids_BL[span.row, span.key_start : span.key_stop] if reads_input and ids_BL is not None else None
        fits = ids_S is not None and len(ids_S) == span.key_stop - span.key_start
        row = None if chosen.whole else span.row
        capture.attention[own].add(summary, chosen_THE, ids_S if fits else None, head_norms(out_THE).mean(), row)
        if call.is_sink:
            gate_name, _, again = own.partition(AGAIN)
            name = f"{gate_name}.attn_gate{AGAIN * bool(again)}{again}"
            capture.add_gate(name, call.gate.spec, call.sink_values(span, summary), span)
        if capture.shows and reads_input and own not in capture.first:
            capture.first[own] = summary.first_HT[:, : chosen.shown].cpu()
            capture.patterns[own] = pattern(call.scores, span, chosen.shown)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SpecError("this model is watched: copy or pickle it before or after the capture, not within")


class _Call:
    """A call of an attention function: its scores, of the chosen heads and of every one, and the gate that it was handed."""

    def __init__(
        self, name: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> None:
        self.query = query
        self.every = self.scores = scores_of(name, module, query, key, mask, kwargs)
        self.gate: Any = getattr(kwargs.get("attn_gate"), "gate", None)
        self.is_sink = self.gate is not None and self.gate.spec.source == "lse"

    def choose(self, heads: tuple[int, ...]) -> None:
        """Look at these heads alone."""
        self.scores = self.every.of_heads(heads)

    def sink_values(self, span: Span, summary: Summary) -> Tensor:
        """The values (T, H, G) over one sequence of a gate that is read from the scores, of all heads."""
        return _sink_values(
            self.gate, self.query, self.every, span, summary.lse_HT if self.every is self.scores else None
        )


def _sink_values(gate: Any, query: Tensor, scores: Scores, span: Span, lse_HT: Tensor | None) -> Tensor:
    """The values (T, H, G) over one sequence of a gate that is read from the scores."""
    lse_HT = summarize(scores, [span], lse=True)[0].lse_HT if lse_HT is None else lse_HT
    assert lse_HT is not None
    q_BTHE = query[span.row : span.row + 1, :, span.start : span.stop].transpose(1, 2)
    form = gate(q_BTHE)
    assert isinstance(form, Sink)
    return sink_gate(form, q_BTHE, lse_HT.T[None], scores.scale)[0]


def _cut(span: Span, start: int, stop: int) -> Span | None:
    """The span's queries at positions start to stop."""
    first, last = max(start, span.position), min(stop, span.position + span.stop - span.start)
    if first >= last:
        return None
    move = span.start - span.position
    return Span(span.row, first + move, last + move, span.key_start, span.key_stop, first)


def pattern(scores: Scores, span: Span, tokens: int) -> Tensor:
    """The weights (H, R, C) of a sequence's first queries over its first keys, `tokens` each at the most."""
    weights_HRC = scores.weights(span.row, span.start, min(span.stop, span.start + tokens))
    return weights_HRC[:, :, span.key_start : min(span.key_stop, span.key_start + tokens)].cpu()


def attention_modules(model: nn.Module) -> dict[str, Found]:
    """Every attention module that can be watched, by name: those of the rows of `families`, and those with a gate of their own.

    Raises UnsupportedError, with what was found, if there are none.
    """
    found = {row.name: row for row in families.find(model) if row.family in families.FAMILIES}
    born = families.numbered(model, _native_family, lambda module, family: False)
    found |= {row.name: row for row in born if row.name not in found}
    if not found:
        raise UnsupportedError("no attention that can be watched", why_none(model))
    return found


def _native_family(module: nn.Module) -> families.Family | None:
    row = native.row_of(module)
    return families.Family(row.name, ()) if row is not None and row.package == "transformers" else None


def block_of(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """(name, module) of the layer that an attention module is part of: the innermost one whose class is a ...Layer or ...Block."""
    words = name.split(".")
    for depth in range(len(words) - 1, -1, -1):
        place = ".".join(words[:depth])
        module = model.get_submodule(place)
        if type(module).__name__.endswith(("Layer", "Block")):
            return place, module
    return name, model.get_submodule(name)


@contextlib.contextmanager
def capture(
    model: nn.Module,
    *,
    layers: Iterable[int] | None = None,
    chosen: Chosen | None = None,
) -> Iterator[Capture]:
    """Watch the model's attention, residual stream and gates in this context; its outputs are the same, bit for bit.

    Args:
        model: a transformers model, wrapped by PEFT, DDP or `torch.compile` or not; compiled code runs uncompiled meanwhile.
        layers: numbers of the layers to watch; None: all.
        chosen: which heads, queries and definitions.

    Raises:
        UnsupportedError: no attention of a known family, or a call with keywords whose meaning for the scores is not known.
        SpecError: a layer or head that is not there; a model that is watched already.
    """
    inner = unwrapped(model)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedError(
            "this adapter puts virtual tokens in front, which are no sequence's first; take it off, or merge it"
        )
    rows = attention_modules(inner)
    if layers is not None:
        wanted, there = set(layers), {row.layer for row in rows.values()}
        if missing := sorted(wanted - there):
            raise SpecError(f"layer {missing[0]} is not there; this model has layers {min(there)} to {max(there)}")
        rows = {name: row for name, row in rows.items() if row.layer in wanted}
    if watched := [name for name, row in rows.items() if WATCH in row.module.__dict__]:
        raise SpecError(f"{watched[0]} is watched already; leave the other capture first, or choose all at once")
    seen = Capture(inner, rows, chosen or Chosen())
    with contextlib.ExitStack() as undo:
        undo.enter_context(uncompiled(model))
        _watch_inputs(seen, undo)
        undo.enter_context(seen.generating.watching(inner))
        born = {gate.module: (name, gate) for name, gate in native.native_gates(inner).items()}
        for row in rows.values():
            swap(row.module, Recorded)
            undo.callback(unswap, row.module)
            row.module.__dict__[WATCH] = _Watch(seen, row, born.get(row.module))
            undo.callback(row.module.__dict__.pop, WATCH)
        _watch_streams(seen, undo)
        _watch_gates(seen, undo)
        yield seen


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Meanwhile compiled code runs as it was written, where hooks are seen."""
    compiled = any(is_compiled(module) for module in model.modules())
    with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
        yield


def _watch_inputs(seen: Capture, undo: contextlib.ExitStack) -> None:
    """The inputs of the model; of its base model or encoder, when that is called by itself, as `generate` does."""
    model: Any = seen.model
    parts = [model, getattr(model, getattr(model, "base_model_prefix", "") or "-", None)]
    parts += [model.get_encoder()] if seen.two_sides else []
    inside: list[nn.Module] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside.append(module)
        if len(inside) == 1 and not recomputing():
            named = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
            more = named.pop("kwargs", {})
            seen.see_inputs({**more, **named})

    def leave(*_: Any) -> None:
        inside.pop()

    for part in dict.fromkeys(part for part in parts if isinstance(part, nn.Module)):
        undo.callback(part.register_forward_pre_hook(enter, with_kwargs=True).remove)
        undo.callback(part.register_forward_hook(leave, always_call=True).remove)


def _watch_streams(seen: Capture, undo: contextlib.ExitStack) -> None:
    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if not recomputing():
                with torch.no_grad():
                    seen.see_stream(name, out)

        return hook

    for name, module in dict(block_of(seen.model, row) for row in seen.rows).items():
        undo.callback(module.register_forward_hook(look(name)).remove)


def _watch_gates(seen: Capture, undo: contextlib.ExitStack) -> None:
    def look(name: str, gate: Gate, owner: Found) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if not recomputing():
                with torch.no_grad():
                    seen.see_gate(seen.call(name), gate.spec, out, owner)

        return hook

    for name, gate in attached(seen.model).items():
        owners = [row for row in seen.rows.values() if name.startswith(f"{row.name}.")]
        if owners:
            owner = max(owners, key=lambda row: len(row.name))
            undo.callback(gate.register_forward_hook(look(name, gate, owner)).remove)
