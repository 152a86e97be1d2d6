"""What a sink costs a model, measured: the same numbers before and after its sinks are transferred, on the same tokens.

Shapes: N rows, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from gated_attn.adapt.perplexity import nll
from gated_attn.adapt.quantize import SCHEMES, RoundedCache, quantized
from gated_attn.adapt.shares import LATE, in_front, no_logits
from gated_attn.adapt.streaming import streaming_nll
from gated_attn.measure.diagnose import diagnose
from gated_attn.records import Diagnosis, Evidence

FEW = 8
"""Rows of each kind of text whose attention is looked at, and that are scored with rounded numbers."""

WINDOW, BLOCK = 1024, 64
"""Tokens in the cache of a stream, and how many go in at a time."""

PARTS = ("perplexity", "attention", "quantisation", "streaming")
"""What can be measured."""


@dataclass(frozen=True)
class HeldOut:
    """Text that nothing was fitted on.

    Fields:
        rows: kind -> ids (N, T).
        ranges: ids (N, T) of other text, of all kinds, that sets the ranges of static quantisation.
        stream_T: one long text, or None.
    """

    rows: Mapping[str, Tensor]
    ranges: Tensor
    stream_T: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many are scored at a time."""
        return sum(len(ids) * (ids.shape[1] - 1) for ids in self.rows.values())


def evidence(
    model: nn.Module, held_out: HeldOut, *, sink: int | None, parts: tuple[str, ...] = PARTS
) -> Iterator[tuple[str, Evidence | Diagnosis | None]]:
    """Measure the model; yields (what comes next, None) before each part, ("attention", its Diagnosis), and last ("", Evidence).

    Args:
        sink: the token that stands in front of everything the model reads and is not scored; None: nothing does.
        parts: of `PARTS`; "perplexity" is always measured.
    """
    found: dict[str, float | None] = {}
    yield "perplexity", None
    perplexity = _perplexities(model, held_out, sink)
    if "attention" in parts:
        yield "attention", None
        numbers, seen = _attention(model, held_out, sink)
        found |= numbers
        yield "attention", seen
    if "quantisation" in parts:
        ranges = [
            {**in_front(ids_BT, sink), "use_cache": False, **no_logits(model)} for ids_BT in held_out.ranges.split(4)
        ]
        few = replace(held_out, rows={kind: ids_NT[:FEW] for kind, ids_NT in held_out.rows.items()})
        for scheme in SCHEMES:
            yield "unrounded" if scheme == "none" else scheme, None
            with quantized(model, scheme, calibration=ranges):
                key = "unrounded" if scheme == "none" else scheme.replace("-", "_")
                found[f"{key}_perplexity"] = _perplexities(model, few, sink)["all"]
        for bits in (8, 4):
            yield f"int{bits} cache", None
            found[f"kv{bits}_perplexity"] = _perplexities(model, few, sink, bits)["all"]
    if "streaming" in parts and held_out.stream_T is not None:
        for key, keep in (("streaming_perplexity", 0), ("streaming_keep4_perplexity", 4)):
            yield f"stream, {keep} tokens kept", None
            loss = streaming_nll(model, held_out.stream_T, window=WINDOW, keep=keep, block=BLOCK, first=sink)
            found[key] = loss.perplexity
    yield "", Evidence(perplexity=perplexity, **found)


def _perplexities(model: nn.Module, held_out: HeldOut, sink: int | None, bits: int | None = None) -> dict[str, float]:
    cache = None if bits is None else lambda: RoundedCache(bits)
    losses = {kind: nll(model, ids_NT, first=sink, cache=cache) for kind, ids_NT in held_out.rows.items()}
    found = {kind: loss.perplexity for kind, loss in losses.items()}
    total, tokens = (sum(getattr(loss, name) for loss in losses.values()) for name in ("total", "tokens"))
    return found | {"all": math.exp(total / tokens)}


def _attention(model: nn.Module, held_out: HeldOut, sink: int | None) -> tuple[dict[str, float | None], Diagnosis]:
    few = {kind: ids_NT[:FEW] for kind, ids_NT in held_out.rows.items()}
    digest = hashlib.sha256(b"".join(ids_NT.cpu().numpy().tobytes() for ids_NT in few.values())).hexdigest()[:12]
    told = f"held-out {', '.join(few)}, sha256 {digest}"
    # Of equal length with the sink and without, so that the two compare.
    rows = [ids_BT if sink is None else ids_BT[:, :-1] for ids_NT in few.values() for ids_BT in ids_NT.split(4)]
    batches = [{**in_front(ids_BT, sink), "use_cache": False, **no_logits(model)} for ids_BT in rows]
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    every = replace(diagnose(model, batches, plain=False), text=told)
    late = every if longest <= LATE else diagnose(model, batches, queries=(LATE, longest), plain=False)
    return {
        "first_token_share": late.first_token_share,
        "sink_rate": every.sink_rate,
        "strongest_early_share": every.strongest_early_share,
        "max_abs": every.max_abs,
        "kurtosis": every.kurtosis,
    }, every


def definitions(held_out: HeldOut, seen: Diagnosis) -> dict[str, str]:
    """What each number of an `Evidence` is."""
    N, T = sum(len(ids) for ids in held_out.rows.values()), max(ids.shape[1] for ids in held_out.rows.values())
    scored = f"{held_out.tokens:,} held-out tokens, {N} rows of {T}, positions 1 to {T - 1} of each"
    told = seen.definitions
    stream = 0 if held_out.stream_T is None else len(held_out.stream_T)
    return {
        "perplexity": f"exp of the mean of -log p of the next token, of {scored}; the sink token in front, where there is one, is "
        "not scored",
        "first_token_share": f"mean of A[t, 0] over queries from {LATE} on, layers and heads, on {seen.tokens:,} of these tokens; "
        "key 0 is the first token that the model reads; weights before any gate",
        **{name: told[name] for name in ("sink_rate", "strongest_early_share", "max_abs", "kurtosis")},
        "unrounded_perplexity": f"perplexity over the first {FEW} rows of each kind, run as the rounded ones, nothing rounded",
        "w8a8_static_perplexity": "the same with int8 weights, symmetric per output channel, and int8 inputs of "
        "every linear layer, symmetric per tensor, ranges from other text (arXiv:2306.12929); gates and the output head in full "
        "precision; simulated",
        "w8a8_dynamic_perplexity": "the same as w8a8_static with ranges of each token's own",
        "w4a16_perplexity": "the same as unrounded with int4 weights, symmetric in groups of 64 input channels; simulated",
        "kv8_perplexity": "the same as unrounded with keys and values rounded to int8, symmetric per token and head",
        "kv4_perplexity": "the same as kv8 with int4",
        "streaming_perplexity": f"perplexity of {stream:,} tokens of one text with a cache of the last {WINDOW} tokens, in "
        f"blocks of {BLOCK}, positions within the cache (arXiv:2309.17453), no first tokens kept",
        "streaming_keep4_perplexity": "the same as streaming with the first 4 kept",
    }  # fmt: skip
