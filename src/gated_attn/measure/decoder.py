"""What a `Decoder` does with its attention and its gates, on held-out batches, one batch and one layer at a time.

Shapes: B batch, T tokens, D model width, H heads, G gate width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gated_attn.attention import Sink
from gated_attn.attention.call import make_call, sink_gate
from gated_attn.attention.reference import softmax_weights
from gated_attn.measure.statistics import first_token_share, histogram, max_abs, share_below
from gated_attn.models.decoder import Decoder
from gated_attn.nn.attention import GatedAttention
from gated_attn.nn.block import GatedTransformerBlock
from gated_attn.records import GATE_SHUT, HISTOGRAM_BINS, GateStat, SampleGates


@dataclass(frozen=True)
class DecoderMeasures:
    """`first_token_share` is a mean over layers, heads and all queries but the first; gate numbers are None without gates."""

    first_token_share: float
    first_token_share_by_head: tuple[tuple[float, ...], ...]
    gate_mean: float | None
    gate_below: float | None
    max_abs: float
    gates: tuple[GateStat, ...]


@dataclass
class _Head:
    """Running sums over the batches for one head's gate."""

    total: float = 0.0
    below: float = 0.0
    count: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)

    def add(self, values: Tensor, span: tuple[float, float]) -> None:
        self.total += float(values.double().sum())
        self.below += share_below(values, GATE_SHUT) * values.numel()
        self.count += values.numel()
        self.histogram = [a + b for a, b in zip(self.histogram, histogram(values, HISTOGRAM_BINS, *span), strict=True)]

    def stat(self, layer: int, head: int) -> GateStat:
        mean, below = self.total / self.count, self.below / self.count
        return GateStat(layer=layer, head=head, mean=mean, below=below, histogram=tuple(self.histogram))


def measure_decoder(
    model: Decoder, batches: Iterable[Tensor], *, histogram_range: tuple[float, float] = (0.0, 1.0)
) -> DecoderMeasures:
    """Run the model on batches of token numbers (B, T) in evaluation mode, and sum up what its attention modules see.

    The model's outputs, mode and hooks are as before afterwards. Memory: one layer's softmax weights of one batch at a time.
    """
    shares: dict[int, list[Tensor]] = {}
    heads: dict[tuple[int, int], _Head] = {}
    largest, rows = 0.0, 0

    def attention_seen(layer: int, attn: GatedAttention, x_BTD: Tensor, gate: object) -> None:
        weights_BHTS, gate_BTHG = weights_and_gate(attn, x_BTD, gate)
        shares.setdefault(layer, []).append(first_token_share(weights_BHTS[..., 0]).double().sum(0))
        if gate_BTHG is not None:
            for head, values in enumerate(gate_BTHG.unbind(2)):
                heads.setdefault((layer, head), _Head()).add(values, histogram_range)

    def stream_seen(x_BTD: Tensor) -> None:
        nonlocal largest
        largest = max(largest, max_abs(x_BTD))

    with _watching(model, attention_seen, stream_seen):
        for tokens_BT in batches:
            model(tokens_BT)
            rows += len(tokens_BT)
    by_head = tuple(tuple((torch.stack(shares[layer]).sum(0) / rows).tolist()) for layer in sorted(shares))
    count = sum(head.count for head in heads.values())
    return DecoderMeasures(
        first_token_share=float(torch.tensor(by_head).mean()),
        first_token_share_by_head=by_head,
        gate_mean=sum(head.total for head in heads.values()) / count if count else None,
        gate_below=sum(head.below for head in heads.values()) / count if count else None,
        max_abs=largest,
        gates=tuple(head.stat(*key) for key, head in sorted(heads.items())),
    )


def sample_gates(model: Decoder, tokens_T: Tensor, texts: Sequence[str]) -> SampleGates | None:
    """Every gate over the tokens of one text, a mean over the channels; None for a model without readable gates."""
    values = gates_of(model, tokens_T[None])
    if not values:
        return None
    layers = tuple(sorted(values))
    rows = tuple(tuple(tuple(row) for row in values[layer][0].float().mean(-1).T.tolist()) for layer in layers)
    return SampleGates(tokens=tuple(texts), values=rows, layers=layers)


def gates_of(model: Decoder, tokens_BT: Tensor) -> dict[int, Tensor]:
    """The gates of every layer that has readable ones on these tokens, (B, T, H, G) each, in evaluation mode."""
    values: dict[int, Tensor] = {}

    def attention_seen(layer: int, attn: GatedAttention, x_BTD: Tensor, gate: object) -> None:
        _, gate_BTHG = weights_and_gate(attn, x_BTD, gate)
        if gate_BTHG is not None:
            values[layer] = gate_BTHG

    with _watching(model, attention_seen, lambda _: None):
        model(tokens_BT)
    return values


def weights_and_gate(attn: GatedAttention, x_BTD: Tensor, gate: object) -> tuple[Tensor, Tensor | None]:
    """(softmax weights (B, H, T, S) before any gate, gate values (B, T, H, G)) of a self attention on its input.

    `gate` is what the attention's own `Gate` returned on this input. The values are None where there is no gate, or where it
    has one value per query and key (pairwise).
    """
    q_BTHE, k_BSKE, v_BSKE, _ = attn.project(x_BTD)
    weights_BHTS, lse_BHT = softmax_weights(make_call(q_BTHE, k_BSKE, v_BSKE, causal=attn.causal, window=attn.window))
    if isinstance(gate, Sink):
        gate = sink_gate(gate, q_BTHE, lse_BHT.transpose(1, 2), attn.head_dim**-0.5)
    if not isinstance(gate, Tensor):
        return weights_BHTS, None
    B, T, _ = x_BTD.shape
    return weights_BHTS, gate.expand(B, T, *gate.shape[2:])


@contextlib.contextmanager
def _watching(
    model: Decoder,
    attention_seen: Callable[[int, GatedAttention, Tensor, object], None],
    stream_seen: Callable[[Tensor], None],
) -> Iterator[None]:
    """Evaluation mode without gradients, with hooks on each attention (input, gate's value) and the residual stream; all undone."""
    handles = []
    gates: dict[int, object] = {}
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, GatedTransformerBlock)

        def after_gate(gate: Any, args: Any, value: object, index: int = index) -> None:
            gates[index] = value

        def after_attention(attn: Any, args: tuple[Tensor, ...], out: Any, index: int = index) -> None:
            attention_seen(index, attn, args[0], gates.get(index))

        if layer.attn.attn_gate is not None:
            handles.append(layer.attn.attn_gate.register_forward_hook(after_gate))
        handles.append(layer.attn.register_forward_hook(after_attention))
        handles.append(layer.register_forward_pre_hook(lambda _, args: stream_seen(args[0])))
        handles.append(layer.register_forward_hook(lambda _, args, out: stream_seen(out)))
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
