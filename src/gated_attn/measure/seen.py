"""What a capture has seen: totals by the names of modules, and which sequence each query belonged to.

Shapes: B batch, T queries, H heads, G gate width, D model width, C token classes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.errors import SpecError, UnsupportedError
from gated_attn.hf.families import Found
from gated_attn.measure.generating import Generating
from gated_attn.measure.streaming import Span
from gated_attn.measure.tokens import Batch, Sequences
from gated_attn.measure.totals import AttentionTotals, GateTotals, StreamTotals

AGAIN = "#"
"""Between the name of a module that several layers share and the number of its call: `...attention#3` is its fourth."""

TOWERS = ("vision", "visual", "image", "audio")
"""In the names of parts that read no text in models that read text, too."""

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
        whole: no call goes on with the sequences of one before, so that nothing is kept of them.
    """

    heads: tuple[int, ...] | None = None
    queries: tuple[int, int] | None = None
    sink_tokens: int = 64
    sink_eps: float = 0.3
    classes: tuple[str, ...] = ()
    class_of: Callable[[Tensor], Tensor] | None = None
    shown: int = 0
    whole: bool = False

    def __post_init__(self) -> None:
        heads = self.heads
        if heads is not None and (not heads or min(heads) < 0 or len(set(heads)) < len(heads)):
            raise SpecError(f"heads={list(heads)}: pass numbers of heads, each once, from 0 on")
        if self.queries is not None and not 0 <= self.queries[0] < self.queries[1]:
            raise SpecError(f"queries={self.queries}: pass two positions, the first before the second")
        if self.sink_tokens < 1 or self.shown < 0:
            raise SpecError(f"sink_tokens={self.sink_tokens}, shown={self.shown}: at least 1, and at least 0")


class Calls:
    """Numbers the calls of modules within one forward pass of the model, each of several kinds on its own."""

    def __init__(self) -> None:
        self.made: Counter[tuple[str, str]] = Counter()

    def reset_with(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        """Start anew with each forward pass, until `undo` is closed."""
        undo.callback(model.register_forward_pre_hook(lambda *_: self.made.clear()).remove)

    def name(self, module: str, kind: str = "") -> str:
        """The name of this call: a module that layers share is one for each of its calls."""
        number = self.made[kind, module]
        self.made[kind, module] += 1
        return f"{module}{AGAIN}{number}" if number else module


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
        self.batch = Batch()
        self.classes_BLC: Tensor | None = None
        self.ids: Tensor | None = None
        self.gate_values: dict[str, Tensor] = {}
        self.first: dict[str, Tensor] = {}
        self.patterns: dict[str, Tensor] = {}
        self.lengths: list[int] = []
        self.call = Calls().name
        self.two_sides = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._counts_tokens = ""
        self._told: dict[tuple[int, int], Sequences] = {}
        self.generating = Generating()

    def see_inputs(self, inputs: Mapping[str, Any]) -> None:
        """The keywords that the model, or a part of it, is called with; its modules are called anew."""
        self.call = Calls().name
        self._told.clear()
        self.batch = Batch.of(inputs, self.batch)
        if ended := self.generating.ended(inputs, "decoder_input_ids" if self.two_sides else "input_ids"):
            self.batch = self.batch.without(ended)
        ids_BL, class_of, tokens = self.batch.ids_BL, self.chosen.class_of, self.batch.tokens
        self.classes_BLC = None if class_of is None or ids_BL is None else class_of(ids_BL)
        if self.shows and self.ids is None and ids_BL is not None and tokens is not None and tokens.found:
            row, start, stop = tokens.found[0]
            self.ids = ids_BL[row, start : min(stop, start + self.chosen.shown)].cpu()

    @property
    def shows(self) -> bool:
        """Whether first tokens are kept one by one; with chosen queries they need not be the first."""
        return self.chosen.shown > 0 and (self.chosen.queries is None or self.chosen.queries[0] == 0)

    def row_of(self, name: str) -> Found:
        """The row of an attention module, from the name of one of its calls or of its gate's."""
        bare, _, number = name.partition(AGAIN)
        owners = [row for row in self.rows.values() if bare == row.name or bare.startswith(f"{row.name}.")]
        row = max(owners, key=lambda one: len(one.name))
        return row._replace(layer=row.layer + int(number or 0))

    def side(self, name: str) -> Sequences | None:
        """The sequences that a module's tokens belong to: the decoder's in a decoder; None in a tower that reads no text."""
        words = name.split(".")
        if any(part in word for word in words for part in TOWERS):
            return None
        return self.batch.decoder if self.two_sides and "decoder" in words else self.batch.tokens

    def reads_input(self, row: Found) -> bool:
        """Whether a module's queries and keys are what the model reads first: its text, or else its patches or frames."""
        return row.kind == "self" and self.side(row.name) is self.batch.tokens

    def spans(self, row: Found, rows: int, queries: int, keys: int, keep: Tensor | None) -> list[Span]:
        """The sequences in a call of an attention module; what its mask hides from all is padding where nothing else says so."""
        own = self.side(row.name)
        if own is not None and own.rows == rows:
            memory = None
            if row.kind == "cross":
                known = self.batch.tokens
                memory = known if known is not None and known.length == keys else _of_keys(keep, rows, keys)
            spans = own.spans(queries, keys, memory)
            if spans is not None:
                return spans
        if queries == keys:
            self._told[rows, queries] = told = _of_keys(keep, rows, keys)
            return told.spans(queries, keys) or []
        return [Span(number, 0, queries, 0, keys) for number in range(rows)]

    def token_spans(self, name: str, rows: int, tokens: int) -> list[Span]:
        """The sequences in an output of a module, one row per token."""
        for own in (self.side(name), self._told.get((rows, tokens))):
            spans = own.spans(tokens, own.length) if own is not None and own.rows == rows else None
            if spans is not None:
                return spans
        return [Span(row, 0, tokens, 0, tokens) for row in range(rows)]

    def counts_tokens(self, name: str) -> bool:
        """Whether this is the module whose queries tell how many tokens were read: the first one called, in its first call."""
        self._counts_tokens = self._counts_tokens or name
        return name == self._counts_tokens

    def see_stream(self, name: str, out: Any) -> None:
        """A layer's output."""
        x_BTD = out[0] if isinstance(out, tuple) else out
        if not isinstance(x_BTD, Tensor) or x_BTD.dim() != 3:
            return
        totals = self.streams.setdefault(self.call(name), StreamTotals())
        for span in self.token_spans(name, *x_BTD.shape[:2]):
            x_TD = x_BTD[span.row, span.start : span.stop].detach()
            check_finite(f"the residual stream behind {name}", x_TD)
            totals.add(x_TD, whole=span.position == 0)

    def see_gate(self, name: str, spec: Any, values: Any, owner: Found) -> None:
        """A gate's values (B, T, H, G)."""
        if not isinstance(values, Tensor):
            return  # read from the scores, in attention
        reads_memory = owner.kind == "cross" and spec.position in ("value", "key")
        source = self.batch.tokens if reads_memory else self.side(owner.name)
        B, T = values.shape[:2]
        memory = reads_memory and source is not None and source.rows == B
        spans = source.spans(T, T) if memory and source is not None else self.token_spans(owner.name, B, T)
        for span in spans if spans is not None else [Span(row, 0, T, 0, T) for row in range(B)]:
            self.add_gate(name, spec, values[span.row, span.start : span.stop], span, memory=reads_memory)

    def add_gate(self, name: str, spec: Any, gate_THG: Tensor, span: Span, *, memory: bool = False) -> None:
        """One sequence's values of a gate."""
        check_finite(f"gate {name}", gate_THG)
        if name not in self.gates:
            self.specs[name] = str(spec)
            self.gates[name] = GateTotals(
                gate_THG.shape[1], RANGES.get(spec.activation, (0.0, 1.0)), self.chosen.classes
            )
        classes_TC = None
        reads_input = not memory and self.reads_input(self.row_of(name))
        if self.classes_BLC is not None and reads_input:
            first = span.key_start + span.position
            classes_TC = self.classes_BLC[span.row, first : first + len(gate_THG)]
            classes_TC = classes_TC if len(classes_TC) == len(gate_THG) else None
        self.gates[name].add(gate_THG, classes_TC)
        if self.shows and reads_input and name not in self.gate_values:
            self.gate_values[name] = gate_THG[: self.chosen.shown].float().mean(-1).T.cpu()


def _of_keys(keep: Tensor | None, rows: int, keys: int) -> Sequences:
    """The sequences that a mask of what queries see, broadcastable to (B, H, T, S), tells of; all tokens are real without one."""
    if keep is None:
        return Sequences.of(rows, keys)
    return Sequences.of(rows, keys, keep.flatten(1, 2).any(1).expand(rows, keys))


def check_finite(what: str, x: Tensor) -> None:
    """UnsupportedError naming where the first NaN or infinity was, since no statistic means anything behind it."""
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise UnsupportedError(
            f"{what}: {bad} of {x.numel()} values are NaN or infinite in {str(x.dtype).removeprefix('torch.')}, so nothing can be "
            "measured from here on; load the model in another dtype, or mend its weights"
        )
