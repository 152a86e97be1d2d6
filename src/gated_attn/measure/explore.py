"""What every head of a model does with one text: its gate, what it attends to, what it adds; and the same model with heads changed.

    view = look(model, read(model, tokenizer, "The cat sat on the"), tokenizer)
    view.sites["model.layers.3.self_attn"].weights(token=4)  # of every head over the tokens
    with scaled(model, {("model.layers.3.self_attn", 2): 0.0}):
        shut = look(model, ...)

Shapes: T queries, S keys, H heads, E head width, G gate width, D model width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.errors import RecipeError, UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf import native
from gated_attn.hf.attach import attached
from gated_attn.hf.families import Found
from gated_attn.hf.modes import evaluating
from gated_attn.hf.store import unwrapped
from gated_attn.hf.swap import swap, unswap
from gated_attn.measure.calls import scores_of
from gated_attn.measure.capture import AGAIN, WATCH, Recorded, _sink_values, attention_modules, uncompiled
from gated_attn.measure.edits import out_of, width_of
from gated_attn.measure.seen import Calls
from gated_attn.measure.streaming import Scores, Span, summarize
from gated_attn.measure.texts import written

LIMIT = 1024
"""So many tokens of a text are read at the most: queries and keys of every layer are kept."""


@dataclass(frozen=True)
class Site:
    """One attention module in one forward pass, or one call of a module that layers share (`name#1` is its second).

    Fields:
        name, layer, kind: which it is; kind is `self` or `cross`.
        queries, keys: what its queries and its keys are, a name in `View.tokens`: `text`, `target` behind an encoder, or places
            that the model made of something else.
        gate: the spec of its gate; None: it has none.
        gate_HT: the gate's values, a mean over channels, for each head: that of its key/value head for key and value gates, the one
            for all heads for shared and dense gates. None without a gate, and for pairwise gates and gates of a memory, which are
            not a number per query.
        first_HT: A[t, 0], the share of its attention that the head parks on the first token.
        added_HT: |x_h W_h|, the norm of what the out projection makes of this head alone, gated; what comes behind it (a norm after
            attention, say) is left out.
        scores: queries and keys as they met.
    """

    name: str
    layer: int
    kind: str
    queries: str
    keys: str
    gate: str | None
    gate_HT: Tensor | None
    first_HT: Tensor
    added_HT: Tensor
    scores: Scores = field(repr=False)

    def weights(self, token: int) -> Tensor:
        """A[t, :] of every head (H, S) for one query, before any gate; 0 where the query cannot see the key."""
        weights_HC = self.scores.weights(0, token, token + 1)[:, 0]
        weights_HS = weights_HC.new_zeros(weights_HC.shape[0], self.scores.shape[3])
        weights_HS[:, : weights_HC.shape[1]] = weights_HC
        return weights_HS


@dataclass(frozen=True)
class Prediction:
    """What the model expects at one place: log probabilities over its vocabulary, of the next token or of the one at a mask."""

    kind: str
    token: int
    log_V: Tensor = field(repr=False)


@dataclass(frozen=True)
class View:
    """One input through a model: the tokens of each side, and what each site did."""

    tokens: dict[str, tuple[str, ...]]
    sites: dict[str, Site]
    predicted: Prediction | None


@dataclass(frozen=True)
class Candidate:
    """A token that was likely before or after a change, with its two probabilities."""

    id: int
    before: float
    after: float


def shift(before: Prediction, after: Prediction, k: int = 10) -> tuple[list[Candidate], float]:
    """The k likeliest tokens of both together, the likeliest of either first, and KL(before || after) in nats."""
    p_V, q_V = before.log_V.exp(), after.log_V.exp()
    ids = torch.maximum(p_V, q_V).topk(min(k, len(p_V))).indices.tolist()
    moved = torch.where(p_V > 0, p_V * (before.log_V - after.log_V), 0.0).sum().clamp(min=0)
    return [Candidate(i, float(p_V[i]), float(q_V[i])) for i in ids], float(moved)


def read(model: nn.Module, tokenizer: Any, text: str, target: str = "") -> dict[str, Tensor]:
    """The text as the model's inputs, one row; behind an encoder the decoder reads its start token and `target`.

    RecipeError for a text without tokens or with more than `LIMIT`.
    """
    config, device = unwrapped(model).config, next(model.parameters()).device
    numbers = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    limit = min([LIMIT, tokenizer.model_max_length, *(n for n in numbers if isinstance(n, int) and n > 0)])

    def ids_of(words: str, special: bool) -> list[int]:
        ids = tokenizer(words, add_special_tokens=special, verbose=False)["input_ids"]
        if len(ids) > limit:
            raise RecipeError(f"{len(ids)} tokens, and at most {limit} are shown; shorten the text")
        return list(ids)

    ids = ids_of(text, True)
    if not ids:
        raise RecipeError("the text has no tokens; write some")
    found = {"input_ids": torch.tensor([ids], device=device)}
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    if getattr(config, "is_encoder_decoder", False):
        start = getattr(config, "decoder_start_token_id", None)
        start = getattr(config, "pad_token_id", 0) if start is None else start
        found["decoder_input_ids"] = torch.tensor([[start, *ids_of(target, False)]], device=device)
    return found


def look(model: nn.Module, inputs: Mapping[str, Any], tokenizer: Any = None) -> View:
    """Run the model on one row of inputs in evaluation mode and keep what every head did; the model is as before afterwards.

    Memory: queries and keys of every layer, as a key/value cache has; never a T x T map, which `Site.weights` computes a row of.

    Raises UnsupportedError for attention of no known family, and for models that cut one input into several (windows).
    """
    inner = unwrapped(model)
    eyes = _Eyes(inner, attention_modules(inner))
    with evaluating(model), uncompiled(model), contextlib.ExitStack() as undo:
        eyes.open(undo)
        out = inner(**inputs)
    tokens = {"text": _written(tokenizer, inputs.get("input_ids"))}
    if "decoder_input_ids" in inputs:
        tokens["target"] = _written(tokenizer, inputs["decoder_input_ids"])
    sites = {name: _with_sides(site, tokens) for name, site in eyes.sites("target" in tokens).items()}
    return View(tokens, sites, _predicted(inner, inputs, out, tokenizer))


def _with_sides(site: Site, tokens: dict[str, tuple[str, ...]]) -> Site:
    """The site, its queries and keys of a side of their own, by number, where they are not the tokens read: patches, frames."""
    sides = []
    for side, count in zip((site.queries, site.keys), site.scores.shape[2:], strict=True):
        if len(tokens.get(side, ())) != count:
            side = f"{count} places"
            tokens[side] = tuple(str(i) for i in range(count))
        sides.append(side)
    return replace(site, queries=sides[0], keys=sides[1])


def _written(tokenizer: Any, ids_BL: Tensor | None) -> tuple[str, ...]:
    ids = [] if ids_BL is None else ids_BL[0].tolist()
    return tuple(f"[{token}]" if tokenizer is None else written(tokenizer, token) for token in ids)


def _predicted(model: Any, inputs: Mapping[str, Any], out: Any, tokenizer: Any) -> Prediction | None:
    """Of the next token; of the first mask where the model fills masks; None where it predicts no token, or has no mask to fill."""
    logits = getattr(out, "logits", None)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[0] != 1:
        return None
    place = logits.shape[1] - 1
    masked = "MaskedLM" in type(model).__name__
    if masked:
        mask = None if tokenizer is None else tokenizer.mask_token_id
        there = (inputs["input_ids"][0] == mask).nonzero() if mask is not None else []
        if not len(there):
            return None
        place = int(there[0])
    return Prediction("mask" if masked else "next", place, logits[0, place].float().log_softmax(-1).cpu())


class _Eyes:
    """What looks at every attention module, out projection and gate in one forward pass."""

    def __init__(self, model: nn.Module, rows: dict[str, Found]) -> None:
        self.model, self.rows = model, rows
        self.calls = Calls()
        self.born = {gate.module: gate for gate in native.native_gates(model).values()}
        self.found: dict[str, dict[str, Any]] = defaultdict(dict)
        self.asking = False  # whether the modules are called to see what one head adds

    def open(self, undo: contextlib.ExitStack) -> None:
        """Start looking, until `undo` is closed."""
        self.calls.reset_with(self.model, undo)
        for row in self.rows.values():
            swap(row.module, Recorded)
            undo.callback(unswap, row.module)
            row.module.__dict__[WATCH] = _Eye(self, row)
            undo.callback(row.module.__dict__.pop, WATCH)
            out = out_of(self.model, row)
            undo.callback(out.register_forward_pre_hook(self._out(row)).remove)
        for name, gate in attached(self.model).items():
            owners = [row for row in self.rows.values() if name.startswith(f"{row.name}.")]
            if owners:
                owner = max(owners, key=lambda row: len(row.name))
                undo.callback(gate.register_forward_hook(self._gate(owner)).remove)

    def _out(self, row: Found) -> Any:
        def hook(out: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.asking = True
            self.found[self.calls.name(row.name, "out")]["added_HT"] = _added(out, args[0], *width_of(row))
            self.asking = False

        return hook

    def _gate(self, row: Found) -> Any:
        def hook(gate: Gate, args: Any, values: Any) -> None:
            if self.asking:
                return
            seen = self.found[self.calls.name(row.name, "gate")]
            seen["gate"] = str(gate.spec)
            if isinstance(values, Tensor):
                seen["gate_THG"] = values[0]

        return hook

    def sites(self, two_sides: bool) -> dict[str, Site]:
        """What was seen, in the order of the calls."""
        return {name: self._site(name, seen, two_sides) for name, seen in self.found.items() if "scores" in seen}

    def _site(self, name: str, seen: dict[str, Any], two_sides: bool) -> Site:
        bare, _, number = name.partition(AGAIN)
        row, scores = self.rows[bare], seen["scores"]
        queries = "target" if two_sides and "decoder" in bare.split(".") else "text"
        return Site(
            name, row.layer + int(number or 0), row.kind, queries, "text" if row.kind == "cross" else queries, seen.get("gate"),
            _per_head(seen.get("gate_THG"), *scores.shape[1:3]), seen["first_HT"], seen["added_HT"], scores,
        )  # fmt: skip


class _Eye:
    """What a `Recorded` module shows itself to."""

    def __init__(self, eyes: _Eyes, row: Found) -> None:
        self.eyes, self.row = eyes, row
        self.seen: dict[str, Any] = {}

    def begin(self, hidden: Tensor) -> None:
        """The module is called; a gate that the model was born with is read from its input."""
        self.seen = self.eyes.found[self.eyes.calls.name(self.row.name)]
        born = self.eyes.born.get(self.row.module)
        if born is not None:
            self.seen["gate"], self.seen["gate_THG"] = str(born.spec), born.values(hidden)[0]

    def end(self) -> None:
        """The call is over."""

    def see(self, name: str, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any], out_BTHE: Tensor) -> None:
        """The call of the attention function."""
        B, _, T, _ = query.shape
        if B != 1:
            raise UnsupportedError(
                f"{self.row.name} reads {B} rows where one text or image was given; pass one, to a model that does not cut it up"
            )
        scores = scores_of(name, self.row.module, query, key, mask, kwargs)
        span = Span(0, 0, T, 0, key.shape[2])
        gate: Any = getattr(kwargs.get("attn_gate"), "gate", None)
        sink = gate is not None and gate.spec.source == "lse"
        summary = summarize(scores, [span], lse=sink)[0]
        self.seen["scores"], self.seen["first_HT"] = scores, summary.first_HT.cpu()
        if sink:
            self.seen["gate_THG"] = _sink_values(gate, query, scores, span, summary.lse_HT)


def _added(out: nn.Module, x_BTD: Tensor, heads: int, width: int) -> Tensor:
    """The norm (H, T) of what the out projection, whatever it is made of, adds for each head: out(head alone) - out(no head)."""
    none = x_BTD.clone()
    none[..., : heads * width] = 0
    bias = out.forward(none).float()
    norms = []
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        alone = none.clone()
        alone[..., own] = x_BTD[..., own]
        norms.append((out.forward(alone).float() - bias).norm(dim=-1).flatten())
    return torch.stack(norms).cpu()


def _per_head(gate_THG: Tensor | None, heads: int, tokens: int) -> Tensor | None:
    """The gate's means over channels as (H, T), or None where it is not a number per head and query."""
    if gate_THG is None:
        return None
    gate_HT = gate_THG.float().mean(-1).T.cpu()
    if gate_HT.shape[1] == 1:  # constant
        gate_HT = gate_HT.expand(-1, tokens)
    if gate_HT.shape[1] != tokens or heads % gate_HT.shape[0]:
        return None
    return gate_HT.repeat_interleave(heads // gate_HT.shape[0], 0)
