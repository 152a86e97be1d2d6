"""What a capture has seen: totals by the names of modules, and which sequence each query belonged to.

Shapes: B batch, T queries, H heads, G gate width, D model width, C token classes.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gated_attn.hf.families import Found
from gated_attn.measure.streaming import Span
from gated_attn.measure.tokens import Batch, Sequences
from gated_attn.measure.totals import AttentionTotals, GateTotals, StreamTotals

AGAIN = "#"
"""Between the name of a module that several layers share and the number of its call: `...attention#3` is its fourth."""

RANGES = {
    "tanh": (-1.0, 1.0),
    "2sigmoid": (0.0, 2.0),
    "silu": (-1.0, 4.0),
    "linear": (-4.0, 4.0),
    "softplus": (0.0, 4.0),
}
"""Where the histogram of a gate's values begins and ends, for activations that are not from 0 to 1."""


@dataclass(frozen=True)
class Chosen:
    """What is looked at, and how.

    Fields:
        heads: numbers of the heads, the same in every layer; None: all.
        queries: positions (start, stop) of the queries in their sequence; None: all.
        sink_tokens, sink_eps: T and eps of the sink rate.
        classes: names of token classes, and what says for token numbers (B, L) which each token is in, bool (B, L, C).
        shown: so many tokens of the first sequence are kept one by one.
    """

    heads: tuple[int, ...] | None = None
    queries: tuple[int, int] | None = None
    sink_tokens: int = 64
    sink_eps: float = 0.3
    classes: tuple[str, ...] = ()
    class_of: Callable[[Tensor], Tensor] | None = None
    shown: int = 0


class Capture:
    """What `capture` has seen so far: totals by the names of modules.

    Fields:
        attention: of every attention module watched; `rows` says where each is.
        streams: of the output of every layer, by the layer's name.
        gates: of every gate, attached or native, by its name in `gates(model)`; `specs` holds their specs.
        ids: the token numbers of the first sequence, as far as it is shown; `gate_values` and `first` are what its tokens' gates
            (mean over channels) and shares on the first token were, and `patterns` its first weights.
    """

    def __init__(self, model: nn.Module, rows: dict[str, Found], chosen: Chosen) -> None:
        self.model, self.rows, self.chosen = model, rows, chosen
        self.attention: dict[str, AttentionTotals] = {}
        self.streams: dict[str, StreamTotals] = {}
        self.gates: dict[str, GateTotals] = {}
        self.specs: dict[str, str] = {}
        self.batch = Batch(None, None, None, None)
        self.classes_BLC: Tensor | None = None
        self.ids: Tensor | None = None
        self.gate_values: dict[str, Tensor] = {}
        self.first: dict[str, Tensor] = {}
        self.patterns: dict[str, Tensor] = {}
        self.lengths: list[int] = []
        self._calls: Counter[str] = Counter()
        self._names = inspect.signature(type(model).forward)

    def see_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the model is called with; its modules are called anew."""
        self._calls.clear()
        named = self._names.bind_partial(self.model, *args, **kwargs).arguments
        more = named.pop("kwargs", {})
        named = {**more, **named}
        self.batch = Batch.of(named)
        ids_BL = self.batch.ids_BL
        class_of = self.chosen.class_of
        self.classes_BLC = None if class_of is None or ids_BL is None else class_of(ids_BL)
        if (
            self.chosen.shown
            and self.ids is None
            and ids_BL is not None
            and self.batch.tokens
            and self.batch.tokens.found
        ):
            row, start, stop = self.batch.tokens.found[0]
            self.ids = ids_BL[row, start : min(stop, start + self.chosen.shown)].cpu()

    def call(self, name: str) -> str:
        """The name under which this call of a module counts: a module that layers share is one for each of its calls."""
        self._calls[name] += 1
        number = self._calls[name] - 1
        return f"{name}{AGAIN}{number}" if number else name

    def row_of(self, name: str) -> Found:
        """The row of an attention module, from the name of one of its calls or of its gate's."""
        bare, _, number = name.partition(AGAIN)
        owners = [row for row in self.rows.values() if bare == row.name or bare.startswith(f"{row.name}.")]
        row = max(owners, key=lambda one: len(one.name))
        return row._replace(layer=row.layer + int(number or 0))

    def side(self, name: str) -> Sequences | None:
        """The sequences that a module's tokens belong to: the decoder's in a decoder of an encoder-decoder model."""
        two_sides = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
        return self.batch.decoder if two_sides and "decoder" in name.split(".") else self.batch.tokens

    def spans(self, row: Found, rows: int, queries: int, keys: int) -> list[Span]:
        """The sequences in a call of an attention module; each row as one sequence where it is not known better."""
        own = self.side(row.name)
        if own is not None and own.rows == rows:
            memory = None
            if row.kind == "cross":
                known = self.batch.tokens
                memory = known if known is not None and known.length == keys else Sequences.of(rows, keys)
            spans = own.spans(queries, keys, memory)
            if spans is not None:
                return spans
        return [Span(number, 0, queries, 0, keys) for number in range(rows)]

    def new_tokens(self, name: str) -> bool:
        """Whether this is the module whose queries tell how many tokens were read: the first one called, in its first call."""
        self._first = getattr(self, "_first", name)
        return name == self._first

    def see_stream(self, name: str, out: Any) -> None:
        """A layer's output."""
        x_BTD = out[0] if isinstance(out, tuple) else out
        if not isinstance(x_BTD, Tensor) or x_BTD.dim() != 3:
            return
        totals = self.streams.setdefault(self.call(name), StreamTotals())
        for span in self._token_spans(name, *x_BTD.shape[:2]):
            totals.add(x_BTD[span.row, span.start : span.stop].detach())

    def see_gate(self, name: str, spec: Any, values: Any, owner: Found) -> None:
        """A gate's values (B, T, H, G)."""
        if not isinstance(values, Tensor):
            return  # read from the scores, in attention
        reads_memory = owner.kind == "cross" and spec.position in ("value", "key")
        source = self.batch.tokens if reads_memory else self.side(owner.name)
        B, T = values.shape[:2]
        spans = source.spans(T, T) if source is not None and source.rows == B else None
        for span in spans if spans is not None else [Span(row, 0, T, 0, T) for row in range(B)]:
            self.add_gate(name, spec, values[span.row, span.start : span.stop], span, memory=reads_memory)

    def add_gate(self, name: str, spec: Any, gate_THG: Tensor, span: Span, *, memory: bool = False) -> None:
        """One sequence's values of a gate."""
        if name not in self.gates:
            self.specs[name] = str(spec)
            self.gates[name] = GateTotals(
                gate_THG.shape[1], RANGES.get(spec.activation, (0.0, 1.0)), self.chosen.classes
            )
        classes_TC = None
        if self.classes_BLC is not None and not memory and self.batch.decoder is None:
            first = span.key_start + span.position
            classes_TC = self.classes_BLC[span.row, first : first + len(gate_THG)]
            classes_TC = classes_TC if len(classes_TC) == len(gate_THG) else None
        self.gates[name].add(gate_THG, classes_TC)
        if self.chosen.shown and name not in self.gate_values:
            self.gate_values[name] = gate_THG[: self.chosen.shown].float().mean(-1).T.cpu()

    def _token_spans(self, name: str, rows: int, tokens: int) -> list[Span]:
        own = self.side(name)
        spans = own.spans(tokens, tokens) if own is not None and own.rows == rows and own.length >= tokens else None
        if spans is None and own is not None and own.rows == rows:  # queries behind a cache
            spans = own.spans(tokens, own.length)
        return spans if spans is not None else [Span(row, 0, tokens, 0, tokens) for row in range(rows)]
