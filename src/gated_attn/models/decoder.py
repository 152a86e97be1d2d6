"""`Decoder`: the reference language model, a Llama-like decoder with a gate in every attention.

Shapes: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from gated_attn.attention.activations import widen
from gated_attn.errors import ShapeError, SpecError
from gated_attn.nn.block import GatedTransformerBlock
from gated_attn.nn.cache import KVCache
from gated_attn.nn.rope import Rope
from gated_attn.spec import as_spec

IGNORED = -100
"""Labels that count for nothing, as in torch's cross entropy."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a `Decoder`. `gate` is a spec's text or "none"."""

    vocab_size: int
    layers: int
    heads: int
    dim: int
    ffn_dim: int
    kv_heads: int | None = None
    head_dim: int | None = None
    gate: str = "none"
    qk_norm: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0
    tie_embeddings: bool = True
    initializer_range: float = 0.02


class DecoderOutput(dict[str, Any]):
    """`loss` (a number, or absent without labels), `logits` (B, T, V) and `cache`, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


# torch.export takes and gives values of registered kinds only.
register_pytree_node(
    DecoderOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: DecoderOutput(zip(names, values, strict=True)),
    serialized_type_name="gated_attn.models.decoder.DecoderOutput",
)


class Decoder(nn.Module):
    """Token embedding, `layers` x `GatedTransformerBlock` with RoPE, RMSNorm, output projection (tied by default).

    forward(input_ids, labels=None, attention_mask=None, position_ids=None, doc_ids=None, num_items_in_batch=None, cache=None).
    labels are input_ids' own tokens, shifted inside, -100 for those that do not count. The loss is the sum of the counted
    tokens' negative log-likelihoods (nats) over `num_items_in_batch`, or over how many this batch counts; Trainer counts the
    labels that are not -100, so a row's first label, which nothing predicts, should be -100. attention_mask is
    1 or True at real tokens (B, S), doc_ids (B, S) the packed documents; both cover the cache's tokens too, and positions
    count real tokens, or start anew in each document, unless position_ids (B, T) say otherwise. `cache` is one
    KVCache per layer; `transformers.Trainer` drives the model as it is.
    """

    accepts_loss_kwargs = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # Not `config`: Trainer takes an attribute of that name for a transformers configuration and writes to it.
        self.decoder_config = config
        spec = as_spec(config.gate)
        if spec is not None and spec.layers is not None and max(spec.layers) >= config.layers:
            raise SpecError(
                f"'layers={max(spec.layers)}' in {str(spec)!r}: this model has layers 0 to {config.layers - 1}"
            )
        rope = Rope(config.head_dim or config.dim // config.heads, theta=config.rope_theta)
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            GatedTransformerBlock(
                config.dim, config.heads, ffn_dim=config.ffn_dim, gate=spec if spec is not None and spec.applies_to(i) else None,
                kv_heads=config.kv_heads, head_dim=config.head_dim, qk_norm=config.qk_norm, rope=rope, dropout=config.dropout,
                norm_eps=config.norm_eps,
            )
            for i in range(config.layers)
        )  # fmt: skip
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights N(0, `initial_std`); gates as their specs say."""
        gates = [f"{name}." for name, module in self.named_modules() if name.endswith("attn_gate")]
        for name, parameter in self.named_parameters():
            std = self.initial_std(name)
            if std is not None and not any(name.startswith(gate) for gate in gates):
                nn.init.normal_(parameter, std=std)

    def initial_std(self, name: str) -> float | None:
        """Standard deviation that a weight starts with; None for vectors, which are the norms' and start at 1.

        It is initializer_range, on the residual branches' last projections over sqrt(2 layers) (GPT-2).
        """
        if self.get_parameter(name).dim() < 2:
            return None
        residual = name.endswith(("out_proj.weight", "down_proj.weight"))
        return self.decoder_config.initializer_range / ((2 * self.decoder_config.layers) ** 0.5 if residual else 1.0)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: tuple[KVCache, ...] | None = None,
    ) -> DecoderOutput:
        self._check(input_ids, labels, attention_mask, cache)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        if position_ids is None and attention_mask is not None and doc_ids is None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        x_BTD = self.embed(input_ids)
        caches = []
        for i, layer in enumerate(self.layers):
            x_BTD = layer(
                x_BTD, mask=mask, doc_ids=doc_ids, positions=position_ids, cache=None if cache is None else cache[i]
            )
            if cache is not None:
                x_BTD, layer_cache = x_BTD
                caches.append(layer_cache)
        logits_BTV = F.linear(self.norm(x_BTD), self.embed.weight if self.head is None else self.head.weight)
        output = DecoderOutput(logits=logits_BTV)
        if labels is not None:
            output = DecoderOutput(loss=token_loss(logits_BTV, labels, num_items_in_batch), logits=logits_BTV)
        if cache is not None:
            output["cache"] = tuple(caches)
        return output

    def new_cache(self) -> tuple[KVCache, ...]:
        """An empty cache for `forward`."""
        return tuple(KVCache() for _ in self.layers)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """input_ids (B, T >= 1) with max_new_tokens behind them: the likeliest (temperature 0), or drawn at this temperature.

        Without dropout, whatever mode the model is in.
        """
        if input_ids.shape[1] == 0:
            raise ShapeError(f"input_ids of shape {tuple(input_ids.shape)}; generation starts from at least one token")
        cache, new, was_training = self.new_cache(), input_ids, self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                output = self(new, cache=cache)
                logits_BV, cache = output.logits[:, -1].float(), output.cache
                if temperature > 0:
                    new = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
                else:
                    new = logits_BV.argmax(-1, keepdim=True)
                input_ids = torch.cat([input_ids, new], 1)
        finally:
            self.train(was_training)
        return input_ids

    def _check(
        self, input_ids: Tensor, labels: Tensor | None, attention_mask: Tensor | None, cache: tuple[KVCache, ...] | None
    ) -> None:
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
            raise ShapeError(
                f"input_ids is {input_ids.dtype} of shape {tuple(input_ids.shape)}; pass token numbers (batch, tokens)"
            )
        if cache is not None and len(cache) != len(self.layers):
            raise ShapeError(
                f"a cache of {len(cache)} layers for a model of {len(self.layers)}; start from new_cache()"
            )
        seen = input_ids.shape[1] + (cache[0].length if cache else 0)
        wanted = (input_ids.shape[0], seen)
        if attention_mask is not None and (attention_mask.is_floating_point() or tuple(attention_mask.shape) != wanted):
            raise ShapeError(
                f"attention_mask is {attention_mask.dtype} of shape {tuple(attention_mask.shape)}; pass bool or int, True or 1 at "
                f"real tokens, of shape {wanted}, cached tokens included"
            )
        if labels is not None and labels.shape != input_ids.shape:
            raise ShapeError(
                f"labels of shape {tuple(labels.shape)} for input_ids of shape {tuple(input_ids.shape)}; they are the same tokens"
            )


def token_loss(logits_BTV: Tensor, labels_BT: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Sum of -log p(label t+1 | tokens up to t) over `num_items`, or over how many labels count; nats per token.

    Computed in float32 (float64 logits: float64). A batch in which nothing counts has loss 0, not NaN.
    """
    targets = labels_BT[:, 1:].flatten().long()
    total = F.cross_entropy(widen(logits_BTV[:, :-1].flatten(0, 1)), targets, ignore_index=IGNORED, reduction="sum")
    counted = (targets != IGNORED).sum() if num_items is None else num_items
    return total / (counted.clamp(min=1) if isinstance(counted, Tensor) else max(counted, 1))
