"""A model and a text -> a `Diagnosis`: what attention, residual stream and gates did, with every definition beside it.

Shapes: B batch, L tokens of a batch, C token classes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.errors import RecipeError
from gated_attn.hf.modes import evaluating
from gated_attn.measure.capture import AGAIN, Capture, Chosen, block_of, capture
from gated_attn.measure.environment import environment
from gated_attn.measure.memory import PeakMemory
from gated_attn.measure.seen import RANGES
from gated_attn.measure.texts import CLASSES, classifier, written
from gated_attn.measure.tokens import cache_of
from gated_attn.measure.totals import BINS, EARLY, AttentionTotals
from gated_attn.records import (
    AttentionStat,
    Diagnosis,
    GateReading,
    HeadStat,
    Pattern,
    SampleGates,
    StreamStat,
    TokenView,
)

DEAD = 0.01
"""A head is dead if its output's norm is below this share of the mean over its module's heads."""

PATTERNS = 6
"""How many heads' weights are kept token by token."""

Batches = Iterable[Mapping[str, Any]]


def diagnose(
    model: nn.Module,
    batches: Batches,
    *,
    name: str = "",
    text: str = "",
    tokenizer: Any = None,
    labels: Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    queries: tuple[int, int] | None = None,
    sink_tokens: int = 64,
    sink_eps: float = 0.3,
    shown: int = 48,
    patterns: Sequence[tuple[str, int]] | None = None,
    plain: bool = True,
) -> Diagnosis:
    """Run the model on the batches in evaluation mode, watched, and say what was seen; the model is as before afterwards.

    Memory above the model's own grows with length, never with its square: one block of scores, and a few numbers per query and
    key of one attention module.

    Args:
        model: a transformers model; with attached gates, with gates of its own, or without.
        batches: keywords of the model's forward, such as `{"input_ids": ..., "attention_mask": ...}`; padding does not count.
        name, text: what the diagnosis says was measured, and on what.
        tokenizer: writes tokens out, and tells classes of tokens apart.
        labels: names of positions, for a model whose tokens are no text (`images.patch_labels`).
        layers, heads, queries: only these layers, heads, and positions (start, stop) of queries.
        sink_tokens, sink_eps: T and eps of the sink rate (arXiv:2410.10781: 64, 0.3).
        shown: how many of the first tokens are kept one by one, and `patterns` the heads, (module, head), whose weights are.
        plain: also time the model unwatched, all batches first, and compare memory.

    Raises UnsupportedError, SpecError as `capture`; RecipeError without batches or tokens.
    """
    batches = [dict(batch) for batch in batches]
    if not batches:
        raise RecipeError("there is nothing to read: pass at least one batch")
    class_of = None if tokenizer is None else classifier(tokenizer)
    chosen = Chosen(
        None if heads is None else tuple(heads), queries, sink_tokens, sink_eps, CLASSES if class_of else (), class_of, shown,
        whole=all(cache_of(batch) is None for batch in batches),
    )  # fmt: skip
    seconds = {"plain": 0.0, "watched": 0.0}
    peaks = {"plain": PeakMemory(), "watched": PeakMemory()}
    with evaluating(model):
        for batch in batches if plain else ():
            with peaks["plain"]:
                seconds["plain"] += _timed(model, batch)
        with capture(model, layers=layers, chosen=chosen) as seen:
            for batch in batches:
                with peaks["watched"]:
                    seconds["watched"] += _timed(model, batch)
    extra = peaks["watched"].bytes - peaks["plain"].bytes if plain and peaks["plain"].known else None
    made = _record(seen, batches, tokenizer, labels, name, text, patterns)
    return replace(
        made,
        seconds=seconds["watched"],
        plain_seconds=seconds["plain"] if plain else None,
        peak_extra_bytes=None if extra is None else max(extra, 0),
    )


def _timed(model: nn.Module, batch: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    model(**batch)
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _record(
    seen: Capture,
    batches: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    labels: Sequence[str] | None,
    name: str,
    text: str,
    patterns: Sequence[tuple[str, int]] | None,
) -> Diagnosis:
    model, chosen = seen.model, seen.chosen
    if not seen.attention:
        why = "" if chosen.queries is None else f", or no sequence has queries at positions {chosen.queries[0]} and on"
        raise RecipeError(f"the model called none of its attention modules, or the batches hold no real tokens{why}")
    config = getattr(model, "config", None)
    attention = tuple(_attention(seen, name, totals, tokenizer, labels) for name, totals in seen.attention.items())
    lengths = seen.lengths
    return Diagnosis(
        model=name or str(getattr(config, "_name_or_path", "") or type(model).__name__),
        text=f"{text or 'the batches given'}, sha256 {_hash(batches)}",
        sequences=len(lengths),
        tokens=sum(lengths),
        shortest=min(lengths),
        longest=max(lengths),
        parameters=sum(p.numel() for p in model.parameters()),
        attn_implementation=str(getattr(config, "_attn_implementation", None) or "eager"),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        sink_tokens=chosen.sink_tokens,
        sink_eps=chosen.sink_eps,
        attention=attention,
        streams=tuple(_streams(seen)),
        gates=tuple(_gates(seen)),
        view=_view(seen, attention, tokenizer, labels, patterns),
        definitions=definitions(chosen, sum(lengths), len(lengths)),
        environment=environment(),
    )


def _attention(
    seen: Capture, name: str, totals: AttentionTotals, tokenizer: Any, labels: Sequence[str] | None
) -> AttentionStat:
    row, H = seen.row_of(name), totals.heads
    numbers = range(H) if seen.chosen.heads is None else seen.chosen.heads
    columns: dict[str, list[Any]] = {
        "first_token_share": totals.first.value(H),
        "first_token_share_all": totals.first_all.value(H),
        "sink_share": totals.sink.value(H),
        "sink_rate": totals.sink_rate.value(H),
        "strongest_share": totals.strongest.value(H),
        "strongest_early_share": totals.early.value(H),
        "entropy": totals.entropy.value(H),
        "effective_rank": totals.effective_ranks(),
        "output_norm": totals.norm.value(H),
    }
    norms = [value or 0.0 for value in columns["output_norm"]]
    least = DEAD * (totals.module_norm.value(1)[0] or 0.0)
    heads = []
    for i, number in enumerate(numbers):
        at = totals.strongest_at[i].most_common(1)
        position, token = at[0][0] if at else (-1, -1)
        heads.append(
            HeadStat(
                head=number,
                strongest_position=position,
                strongest_token=_token_at(position, token, tokenizer, labels),
                dead=norms[i] < least or not norms[i],
                **{key: values[i] for key, values in columns.items()},
            )
        )
    return AttentionStat(name=name, layer=row.layer, kind=row.kind, queries=totals.queries, heads=tuple(heads))


def _token_at(position: int, token: int, tokenizer: Any, labels: Sequence[str] | None) -> str | None:
    if tokenizer is not None and token >= 0:
        return written(tokenizer, token)
    return labels[position] if labels is not None and 0 <= position < len(labels) else None


def _streams(seen: Capture) -> Iterable[StreamStat]:
    layers: dict[str, int] = {}
    for name, row in seen.rows.items():
        layers.setdefault(block_of(seen.model, name)[0], row.layer)
    for name, totals in seen.streams.items():
        block, _, again = name.partition(AGAIN)
        n = max(len(totals.inf_norms), 1)
        yield StreamStat(
            name=name,
            layer=layers[block] + int(again or 0),
            max_abs=totals.max_abs,
            median_abs=sum(totals.medians) / n,
            massive=totals.massive,
            inf_norm=sum(totals.inf_norms) / n,
            kurtosis=sum(totals.kurtoses) / n,
            token_norm_ratio=totals.ratio,
            token_norm_position=totals.ratio_at,
        )


def _gates(seen: Capture) -> Iterable[GateReading]:
    for name, totals in seen.gates.items():
        below = (totals.below_H3 / max(totals.values, 1)).T.tolist()
        counts_C = totals.by_class_HC2[..., 1].sum(0)
        means_C = totals.by_class_HC2[..., 0].sum(0) / counts_C.clamp(min=1)
        yield GateReading(
            name=name,
            layer=seen.row_of(name).layer,
            spec=seen.specs[name],
            mean=tuple((totals.total_H / max(totals.values, 1)).tolist()),
            median=tuple(totals.medians()),
            below_01=tuple(below[0]),
            below_005=tuple(below[1]),
            above_095=tuple(below[2]),
            largest=tuple(totals.largest_H.tolist()),
            token_entropy=tuple(totals.entropies()),
            by_class={word: float(means_C[i]) for i, word in enumerate(totals.classes) if counts_C[i]},
        )


def _view(
    seen: Capture,
    attention: Sequence[AttentionStat],
    tokenizer: Any,
    labels: Sequence[str] | None,
    patterns: Sequence[tuple[str, int]] | None,
) -> TokenView | None:
    if not seen.shows:
        return None
    if seen.ids is not None:
        tokens = tuple(f"[{token}]" if tokenizer is None else written(tokenizer, token) for token in seen.ids.tolist())
    else:
        tokens = tuple(labels or ())[: seen.chosen.shown]
    if not tokens:
        return None
    layers = {name: seen.row_of(name).layer for name in (*seen.first, *seen.gate_values)}
    first, gates = _sample(tokens, seen.first, layers), _sample(tokens, seen.gate_values, layers)
    if patterns is None:
        patterns = _typical(attention)
    made = []
    numbers = None if seen.chosen.heads is None else list(seen.chosen.heads)
    for name, head in patterns:
        at = head if numbers is None else numbers.index(head)
        if name in seen.patterns:
            weights = tuple(tuple(round(x, 4) for x in row) for row in seen.patterns[name][at].tolist())
            made.append(Pattern(name=name, layer=layers[name], head=head, weights=weights))
    return TokenView(tokens=tokens, gates=gates, first=first, patterns=tuple(made))


def _sample(tokens: tuple[str, ...], values: Mapping[str, Tensor], layers: Mapping[str, int]) -> SampleGates | None:
    """Of the modules that show every token and have equally many heads."""
    fitting = {name: value for name, value in values.items() if value.shape[1] == len(tokens)}
    heads = {len(value) for value in fitting.values()}
    fitting = {name: value for name, value in fitting.items() if len(value) == max(heads)}
    if not fitting:
        return None
    rows = tuple(tuple(tuple(round(x, 4) for x in row) for row in value.tolist()) for value in fitting.values())
    return SampleGates(tokens=tokens, values=rows, layers=tuple(layers[name] for name in fitting))


def _typical(attention: Sequence[AttentionStat]) -> list[tuple[str, int]]:
    """Heads from the one with the largest share on the first token to that with the smallest, evenly spaced between them."""
    heads = [(head.first_token_share or 0.0, module.name, head.head) for module in attention for head in module.heads]
    heads.sort(key=lambda one: one[0], reverse=True)
    n = min(PATTERNS, len(heads))
    places = sorted({round(i * (len(heads) - 1) / max(n - 1, 1)) for i in range(n)})
    return [(heads[i][1], heads[i][2]) for i in places]


def _hash(batches: Sequence[Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for key in sorted(batch):
            if isinstance(batch[key], Tensor):
                digest.update(key.encode() + batch[key].detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:12]


def definitions(chosen: Chosen, tokens: int, sequences: int) -> dict[str, str]:
    """What each number is, with T, queries and tokens as they were; one source for JSON, table and report."""
    which = (
        "all queries"
        if chosen.queries is None
        else f"queries at positions {chosen.queries[0]} to {chosen.queries[1] - 1}"
    )
    over = f"{which} of {sequences} sequences, {tokens:,} tokens, padding left out; weights before any gate"
    T, eps = chosen.sink_tokens, chosen.sink_eps
    ranges = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in RANGES.items())
    return {
        "first_token_share": f"mean of A[t, 0], key 0 being its sequence's first real token, over {over}; query 0 left out "
        "(F-Attn, arXiv:2505.06708)",
        "first_token_share_all": f"the same with query 0, whose share is 1 under a causal mask, over {over}",
        "sink_share": f"mean of A[t, 0] over the first T = {T} queries of each sequence of at least T tokens, query 0 among them "
        "(alpha_1, arXiv:2410.10781)",
        "sink_rate": f"share of sequences, layers and heads whose sink_share is above eps = {eps:g}, T = {T} (arXiv:2410.10781)",
        "strongest_share": "largest over keys s of the mean of A[t, s] over the queries that see s, of keys that at least "
        f"min({EARLY}, half the sequence) queries see; {over}",
        "strongest_early_share": f"largest over the first {EARLY} keys s of the mean of A[t, s] over queries from {EARLY} on; "
        f"{over}",
        "entropy": f"mean of -sum_s A ln A / ln n over queries that see n >= 2 keys; {over}",
        "effective_rank": "exp(-sum p ln p), p = sigma / sum sigma, sigma the singular values of a head's outputs (tokens x width, "
        "gated where there is a gate behind attention, uncentred; Roy and Vetterli 2007)",
        "output_norm": "mean over tokens of the 2-norm of what a head hands to the out projection, g * (A v)",
        "dead": f"output_norm below {DEAD:g} of the mean over the heads of its module",
        "max_abs": f"largest |x| of the residual stream behind any layer, over {tokens:,} tokens",
        "m_act": "mean over layers of the largest |x| behind each (M-Act, arXiv:2505.06708)",
        "median_abs": "median |x| of the residual stream behind a layer, a mean over sequences",
        "massive": "values of the residual stream with |x| > 100 and |x| >= 1000 times the median |x| of their sequence "
        "(arXiv:2402.17762)",
        "inf_norm": "max |x| per sequence (of its prompt, where a cache goes on with it), a mean over "
        "sequences; of the model: the largest over layers (arXiv:2306.12929)",
        "kurtosis": "mean((x - mu)^4) / (std^4 + 1e-6) per sequence, not excess (3 for a Gaussian), a mean over sequences and "
        "layers (arXiv:2306.12929, of layer outputs)",
        "token_norm_ratio": "largest 2-norm of a token's residual stream over the median of its sequence's",
        "gate_mean": "mean gate value over tokens and channels, of a head or of all heads",
        "gate_median": f"median gate value per head, to 1/{BINS} of its activation's range (0 to 1; {ranges}); what lies beyond "
        "counts at its end",
        "gate_below_01": "share of |g| below 0.1; below_005 and above_095 likewise (g above 0.95)",
        "gate_token_entropy": "-sum_t p ln p / ln n of p = g_t / sum g, g the mean over channels, negative values as 0; 1 is even",
        "gate_by_class": "mean gate over heads and channels of the tokens of a class; a token is in one class by its kind and in "
        "one by whether it occurred before in its sequence",
    }  # fmt: skip
