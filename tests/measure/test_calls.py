"""Each attention function of transformers reads masks in its own way; `scores_of` reads them alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from gated_attn.errors import UnsupportedError
from gated_attn.measure.calls import scores_of

B, H, K, T, S, E = 2, 4, 2, 5, 7, 6


class Module(nn.Module):
    is_causal = True


def qk() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(B, H, T, E, generator=made), torch.randn(B, K, S, E, generator=made)


def seen(name: str, mask: Any, **kwargs: Any) -> Tensor:
    """Bool (B, T, S): the keys with a weight above 0."""
    scores = scores_of(name, Module(), *qk(), mask, kwargs)
    weights = torch.stack([scores.weights(row, 0, T) for row in range(B)])
    full = torch.zeros(B, H, T, S)
    full[..., : weights.shape[-1]] = weights
    assert ((full > 0) == (full > 0)[:, :1]).all()
    return (full > 0)[:, 0]


ROW, COLUMN = torch.arange(T)[:, None], torch.arange(S)


def test_without_a_mask_each_is_causal_in_its_own_way() -> None:
    start, end = (COLUMN <= ROW).expand(B, T, S), (COLUMN <= ROW + S - T).expand(B, T, S)
    assert torch.equal(seen("sdpa", None), start)
    assert torch.equal(seen("gated_attn|sdpa", None), start)
    assert torch.equal(seen("gated_attn", None), start)
    assert torch.equal(seen("flash_attention_2", None), end)
    assert seen("eager", None).all()
    assert seen("sdpa", None, is_causal=False).all()


def test_flash_attention_reads_keys_to_leave_out_and_windows() -> None:
    keys = torch.tensor([[1] * S, [0, 0, 1, 1, 1, 1, 1]])
    want = (COLUMN <= ROW + S - T) & keys.bool()[:, None]
    assert torch.equal(seen("flash_attention_2", keys), want)
    near = want & (COLUMN > ROW + S - T - 3)
    assert torch.equal(seen("flash_attention_2", keys, sliding_window=3), near)


def test_masks_are_bool_or_added_or_a_rule() -> None:
    keep = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(2)) < 0.5
    keep[..., 0] = True
    added = torch.zeros(B, 1, T, S).masked_fill(~keep, torch.finfo(torch.float32).min)
    for name, mask in (("sdpa", keep), ("eager", added), ("sdpa", added.masked_fill(~keep, -torch.inf))):
        assert torch.equal(seen(name, mask), keep[:, 0])
    half = torch.zeros(B, 1, T, S, dtype=torch.float16).masked_fill(~keep, torch.finfo(torch.float16).min)
    assert torch.equal(seen("eager", half, output_attentions=True), keep[:, 0])
    rule = create_block_mask(lambda b, h, q, k: k <= q + b, B, None, T, S, device="cpu")
    assert torch.equal(seen("flex_attention", rule), ROW + torch.arange(B)[:, None, None] >= COLUMN)


def test_soft_caps_sinks_and_biases_change_the_weights_as_they_are_written() -> None:
    q, k = qk()
    s = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    bias, sink = torch.randn(1, H, T, S), torch.randn(H)
    options = {"scaling": 0.3, "softcap": 1.5, "position_bias": bias, "s_aux": sink, "dropout": 0.1, "use_cache": True}
    scores = scores_of("eager", Module(), q, k, None, options)
    want = torch.cat([1.5 * torch.tanh(s / 1.5) + bias, sink[None, :, None, None].expand(B, H, T, 1)], -1).softmax(-1)
    got = torch.stack([scores.weights(row, 0, T) for row in range(B)])
    assert (got - want[..., :-1]).abs().max() < 1e-6


@pytest.mark.parametrize("options", [{"temperature": 2.0}, {"head_mask": torch.ones(H)}])
def test_what_is_not_understood_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"what {next(iter(options))}="):
        scores_of("sdpa", Module(), *qk(), None, options)


@pytest.mark.parametrize("name", ["mine", "gated_attn|mine", "sdpa_paged"])
def test_a_function_that_is_not_known_is_refused(name: str) -> None:
    """It may mask or scale as it likes."""
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match="does not know what attn_implementation="):
        scores_of(name, nn.Module(), q, q, None, {})


def test_packed_lengths_without_a_mask_are_refused_for_flash_alone() -> None:
    lengths = {"cu_seq_lens_q": torch.tensor([0, 2, 5])}
    assert scores_of("sdpa", Module(), *qk(), torch.ones(1, 1, T, S, dtype=torch.bool), lengths).keep is not None
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q"):
        scores_of("flash_attention_2", Module(), *qk(), None, lengths)
