"""The fit of a sink's share: sums over text give what least squares on all tokens at once gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gated_attn.adapt import shares
from gated_attn.adapt.shares import LATE, Sums, collect, in_front, passes
from gated_attn.hf import families
from gated_attn.hf.swap import Swapped
from tests.hf import tiny
from tests.hf.tiny import spread

SINK = 5


def synthetic(
    tokens: int, seed: int, noise: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(tokens, 6, generator=draw)
    weight_HD, bias_H = torch.randn(2, 6, generator=torch.Generator().manual_seed(7)), torch.tensor([0.5, -1.0])
    logit_NH = x_ND @ weight_HD.T + bias_H + noise * torch.randn(tokens, 2, generator=draw)
    return x_ND, 1 - torch.sigmoid(logit_NH), weight_HD, bias_H


def test_a_share_that_is_linear_in_the_logit_is_found_again() -> None:
    sums = Sums(6, 2)
    for part, seed in ((0, 1), (0, 2), (1, 3)):
        x_ND, share_NH, weight_HD, bias_H = synthetic(400, seed)
        share_NH = share_NH.clamp(2e-3, 1 - 2e-3)  # inside what keeps its logit
        sums.add(x_ND, share_NH, part)
        sums.add_late(share_NH)
    fit = sums.fit()
    torch.testing.assert_close(fit.weight_HD, weight_HD, rtol=0.1, atol=0.1)
    torch.testing.assert_close(fit.bias_H, bias_H, rtol=0.1, atol=0.1)
    assert (fit.r2_H > 0.98).all()
    assert fit.share_H == pytest.approx(sums.late_H / 1200)


def test_the_fit_is_weighted_least_squares_on_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "STRENGTHS", (1e-12,))
    sums, xs, ys, ws = Sums(6, 2), [], [], []
    for part, seed in ((0, 1), (1, 2)):
        x_ND, share_NH, _, _ = synthetic(50, seed, noise=1.0)
        sums.add(x_ND, share_NH, part)
        opened = (1 - share_NH).clamp(1e-3, 1 - 1e-3)
        xs.append(torch.cat([x_ND, torch.ones(50, 1)], 1))
        ys.append(opened.logit())
        ws.append((opened * (1 - opened)).mean(1, keepdim=True).sqrt())
    x, y, w = torch.cat(xs).double(), torch.cat(ys).double(), torch.cat(ws).double()
    want = torch.linalg.lstsq(w * x, w * y).solution
    fit = sums.fit()
    torch.testing.assert_close(fit.weight_HD.double(), want[:-1].T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fit.bias_H.double(), want[-1], rtol=1e-4, atol=1e-4)


def test_noise_is_shrunk_as_much_as_held_out_rows_ask_for() -> None:
    draw, sums = torch.Generator().manual_seed(1), Sums(6, 1)
    for part, tokens in ((0, 12), (1, 400)):
        sums.add(torch.randn(tokens, 6, generator=draw), torch.rand(tokens, 1, generator=draw), part)
    strongest = shares._solved(sums.gram_RDD[0], sums.cross_RDH[0], shares.STRENGTHS[-1])
    weakest = shares._solved(sums.gram_RDD[0], sums.cross_RDH[0], shares.STRENGTHS[0])
    assert sums._error(strongest, 1) < sums._error(weakest, 1)
    assert sums.fit().r2_H.abs().max() < 0.5


def test_a_head_that_never_looks_elsewhere_has_no_r2_and_an_open_or_shut_gate() -> None:
    sums = Sums(6, 2)
    for part in (0, 1):
        sums.add(torch.randn(40, 6), torch.tensor([[0.0, 1.0]]).expand(40, 2), part)
    fit = sums.fit()
    assert fit.r2_H.tolist() == [0.0, 0.0]
    opened = torch.sigmoid(torch.randn(40, 6) @ fit.weight_HD.T + fit.bias_H)
    assert (opened[:, 0] > 0.99).all()
    assert (opened[:, 1] < 0.01).all()


@pytest.fixture
def model() -> Any:
    return spread(tiny.build("llama", impl="sdpa")).eval()


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(6, 90, (rows, length), generator=torch.Generator().manual_seed(3))


def test_shares_are_those_of_the_eager_maps(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "has_fast_bfloat16", lambda device: False)
    text, rows = ids(2, LATE + 9), list(families.find(model))
    sums: dict[str, Sums] = {}
    assert list(collect(model, rows, text.split(1), SINK, sums)) == [1, 2]
    assert not any(isinstance(module, Swapped) for module in model.modules())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**in_front(text, SINK), output_attentions=True).attentions
    for row, weights in zip(rows, maps, strict=True):
        torch.testing.assert_close(
            sums[row.name].share_H.float(), weights[:, :, LATE:, 0].mean((0, 2)), rtol=1e-4, atol=1e-6
        )


def test_layers_in_several_passes_and_batches_of_any_size_give_the_same(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "has_fast_bfloat16", lambda device: False)
    text, rows = ids(7, 12), list(families.find(model))
    whole: dict[str, Sums] = {}
    list(collect(model, rows, text.split(7), SINK, whole))
    monkeypatch.setattr(shares, "BUDGET", 1)
    parts: dict[str, Sums] = {}
    groups = passes(model, rows)
    assert [len(group) for group in groups] == [1] * len(rows)
    for group in groups:
        list(collect(model, group, text[:4].split(2), SINK, parts))
        own = {row.name: parts[row.name] for row in group}
        list(collect(model, group, text[4:].split(3), SINK, own, seen=4))
    for name, own in whole.items():
        for key, tensor in own.tensors().items():
            torch.testing.assert_close(parts[name].tensors()[key], tensor, rtol=1e-5, atol=1e-5)
        assert own.tokens_R.tolist() == [6 * 12, 12]
