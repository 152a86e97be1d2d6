"""A pretrained model's attention sink as a gate: the same function without the sink token, exactly.

With a sink token in front, a head gives out = a v0 + (1 - a) (attention over the other tokens), where a = sigmoid(scale q . k0 -
lse(other scores)) is the sink's share, and k0, v0 are its key and value. So the gate g = 1 - a on attention without the sink, with
the fill c = v0, is the same function: out = g * attention + (1 - g) * c. k0 and v0 depend on nothing but the token, since it comes
first; keeping them as one fixed key and value per head is what a prefix of one token does (arXiv:2406.12016).

Shapes: B batch, T tokens, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.errors import UnsupportedError
from gated_attn.hf import families
from gated_attn.hf.attach import active_gate, attach, detach
from gated_attn.hf.families import Found
from gated_attn.hf.modes import evaluating
from gated_attn.hf.swap import swap, unswap
from gated_attn.hf.wiring import GATE
from gated_attn.measure.capture import WATCH, Recorded

SPEC = "output:headwise:sigmoid,source=lse,bias=0,fill,sink_key"
"""The gate that a sink is: read from the scores' log-sum-exp, with a key for the sink and its value as fill."""


class OneToken:
    """What one token alone gives an attention module: its key, and its value as each query head sees it."""

    def __init__(self) -> None:
        self.key_KE: Tensor | None = None
        self.value_HE: Tensor | None = None

    def begin(self, hidden: Tensor) -> None:
        """The module is called."""

    def end(self) -> None:
        """The call is over."""

    def see(self, name: str, query: Tensor, key: Tensor, mask: Any, kwargs: Any, out_BTHE: Tensor) -> None:
        """One call of the attention function, in which every query can only look at the one key."""
        self.key_KE, self.value_HE = key[0, :, 0].clone(), out_BTHE[0, 0].clone()


def absorb_sink(model: nn.Module, token: int, *, layers: Iterable[int] | None = None) -> nn.Module:
    """Make the sink token's key and value part of the model, in place: it reads the rest as with `token` in front.

    model(ids) afterwards is model([token, *ids]) before, without its first row; nothing of the token is left in the input, the
    cache or any activation. The gates are ordinary ones (`SPEC`): `detach` gives the first model back, `save_gates` keeps them.

    Args:
        model: a causal transformers model with rotary positions, whose attention implementation is sdpa or gated_attn.
        token: number of the token that stood in front, such as the tokenizer's BOS.
        layers: only in these layers; in the others the model goes on without its sink, which is no longer exact.

    Raises:
        UnsupportedError: positions that are not rotary, windows that would lose sight of the token, cross attention.
        SpecError: gates there already.
    """
    rows = [row for row in families.find(model) if row.family in families.FAMILIES]
    _check(model, rows)
    seen = alone(model, rows, token)
    numbers = None if layers is None else list(layers)
    with evaluating(model):
        want_BTV = _logits(model, token)
    attach(model, SPEC, layers=numbers)
    for row in rows:
        if (gate := row.module._modules.get(GATE)) is not None:
            fill_in(active_gate(gate), seen[row.name])
    if numbers is None:
        with evaluating(model):
            _compare(model, want_BTV)
    return model


@torch.no_grad()
def fill_in(gate: Any, one: OneToken) -> None:
    """Give a gate the token's value as fill, and its key where it has a place for that."""
    assert one.key_KE is not None
    assert one.value_HE is not None
    if gate.sink_key is not None:
        gate.sink_key.copy_(one.key_KE.repeat_interleave(gate.shape_HG[0] // len(one.key_KE), 0))
    gate.fill.fill_HE.copy_(one.value_HE)


def _logits(model: nn.Module, token: int | None) -> Tensor:
    """Of a few tokens, with this one in front and its own row left out."""
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids_BT = torch.arange(1, 13).view(2, 6).mul(size // 13 or 1).remainder(size).to(next(model.parameters()).device)
    if token is None:
        return model(input_ids=ids_BT, use_cache=False).logits
    in_front_BT = torch.cat([torch.full_like(ids_BT[:, :1], token), ids_BT], 1)
    return model(input_ids=in_front_BT, use_cache=False).logits[:, 1:]


def _compare(model: nn.Module, want_BTV: Tensor) -> None:
    """UnsupportedError, without the gates, if the model does not do what it did."""
    got_BTV = _logits(model, None)
    error, scale = float((got_BTV - want_BTV).abs().max()), float(want_BTV.abs().max())
    allowed = 64 * torch.finfo(want_BTV.dtype if want_BTV.element_size() < 4 else torch.float32).eps * scale
    if not error <= allowed:
        detach(model)
        raise UnsupportedError(
            f"without its sink token the model's logits differ by {error:.3g}, and {allowed:.3g} is rounding: attention here sees "
            "more of positions than their differences, or more of the sink than its key and value"
        )


def alone(model: nn.Module, rows: list[Found], token: int) -> dict[str, OneToken]:
    """What the token gives each attention module when it stands one position before the first, or at it if it must."""
    device = next(model.parameters()).device
    seen = {row.name: OneToken() for row in rows}
    with contextlib.ExitStack() as undo:
        undo.enter_context(evaluating(model))
        for row in rows:
            swap(row.module, Recorded)
            undo.callback(unswap, row.module)
            row.module.__dict__[WATCH] = seen[row.name]
            undo.callback(row.module.__dict__.pop, WATCH)
        placed = {"position_ids": torch.tensor([[-1]], device=device)} if _rotary(model) else {}
        model(input_ids=torch.tensor([[token]], device=device), use_cache=False, **placed)
    return seen


def _check(model: nn.Module, rows: list[Found]) -> None:
    if not rows or any(row.kind == "cross" for row in rows):
        raise UnsupportedError("a sink can be absorbed by causal self attention of transformers models only")
    if (why := why_inexact(model, rows)) is not None:
        raise UnsupportedError(why)


def why_inexact(model: nn.Module, rows: list[Found]) -> str | None:
    """Why gates that are read from the scores would not be what this model does with its sink token; None if they would."""
    config: Any = getattr(model, "config", None)
    if "position_ids" not in inspect.signature(type(model).forward).parameters or not _rotary(model):
        return (
            f"{type(model).__name__} has no rotary positions: what a token is depends on how many come before it, so the sink "
            "token cannot be taken away from in front of the others"
        )
    window = getattr(config, "sliding_window", None)
    window = next((own for row in rows if (own := getattr(row.module, "sliding_window", None))), window)
    if window:
        return f"{type(model).__name__} looks back {window} tokens only, so later tokens never saw the sink as a gate would show it"
    if getattr(config, "_attn_implementation", "sdpa") not in ("sdpa", "gated_attn"):
        return f"the sink is read from the scores, which attn_implementation={config._attn_implementation!r} hides; use sdpa"
    return None


def _rotary(model: nn.Module) -> bool:
    return any("rotary" in type(module).__name__.lower() for module in model.modules())
