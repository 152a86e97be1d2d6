"""`GatedTransformerBlock`: the pre-norm formula, every option passed on, and every way of running it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gated_attn.nn import GatedTransformerBlock, KVCache, Rope
from gated_attn.nn.block import SwiGLU

DIM, HEADS, KV, WIDTH, FFN = 23, 6, 3, 10, 31
GATES = ["none", "paper", "paper-headwise", "sink,fill", "weights:pairwise", "value:headwise,top_k=2"]


def make(gate: str = "paper", **options: object) -> GatedTransformerBlock:
    torch.manual_seed(7)
    block = GatedTransformerBlock(
        DIM, HEADS, ffn_dim=FFN, gate=gate, **{"kv_heads": KV, "head_dim": WIDTH, "rope": Rope(WIDTH), **options},  # type: ignore[arg-type]
        dtype=torch.float64,
    )  # fmt: skip
    for parameter in [] if block.attn.attn_gate is None else block.attn.attn_gate.parameters():
        torch.nn.init.normal_(parameter, std=5 * parameter.shape[-1] ** -0.5)
    return block


def inputs(tokens: int = 7) -> torch.Tensor:
    return torch.randn(2, tokens, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("gate", GATES)
def test_it_is_the_pre_norm_block(gate: str) -> None:
    block, x = make(gate), inputs()
    middle = x + block.attn(block.attn_norm(x))
    assert torch.equal(block(x), middle + block.ffn(block.ffn_norm(middle)))


def test_swiglu_is_its_formula() -> None:
    ffn, x = SwiGLU(5, 7, dtype=torch.float64), torch.randn(3, 2, 5, dtype=torch.float64)
    gate, up = x @ ffn.gate_proj.weight.T, x @ ffn.up_proj.weight.T
    assert (ffn(x) - (gate / (1 + (-gate).exp()) * up) @ ffn.down_proj.weight.T).abs().max() < 1e-12


@pytest.mark.parametrize("gate", GATES)
def test_every_way_of_running_it_gives_one_answer(gate: str) -> None:
    torch._dynamo.reset()
    block, x = make(gate), inputs()
    want = block(x)
    (want_grad,) = torch.autograd.grad(want.square().sum(), block.ffn.up_proj.weight)

    def same(out: torch.Tensor, tolerance: float = 1e-11) -> None:
        assert (out - want).abs().max() <= tolerance
        if out.requires_grad:
            (grad,) = torch.autograd.grad(out.square().sum(), block.ffn.up_proj.weight)
            assert (grad - want_grad).abs().max() <= 1e-9

    same(checkpoint(block, x, use_reentrant=False))
    same(torch.compile(block, fullgraph=True, backend="aot_eager")(x))
    same(copy.deepcopy(block)(x).detach())
    same(pickle.loads(pickle.dumps(block))(x).detach())
    with torch.inference_mode():
        same(block.eval()(x))
    out, cache = block(x[:, :4], cache=KVCache())
    rest, cache = block(x[:, 4:], cache=cache)
    assert cache.length == 7
    same(torch.cat([out, rest], 1))


@pytest.mark.parametrize("gate", GATES)
def test_it_exports_with_dynamic_batch_and_length(gate: str) -> None:
    block = make(gate).eval()
    batch, tokens = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(block, (inputs(),), dynamic_shapes={"x_BTD": {0: batch, 1: tokens}})
    other = torch.randn(3, 29, DIM, dtype=torch.float64)
    assert (program.module()(other) - block(other)).abs().max() < 1e-11


@pytest.mark.parametrize("gate", ["none", "paper", "paper-headwise", "sink,fill"])
def test_gradients_per_sample_through_vmap_on_the_reference(gate: str) -> None:
    block, x = make(gate, impl="reference"), inputs()
    parameters = dict(block.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], x_TD: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(block, parameters, (x_TD[None],)).square().sum()

    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for row in range(2):
        want = torch.autograd.grad(block(x[row : row + 1]).square().sum(), list(parameters.values()))
        for got, expected in zip(per_sample.values(), want, strict=True):
            assert (got[row] - expected).abs().max() < 1e-8


def test_dropout_falls_on_the_branches_in_training_only() -> None:
    block, x = make("paper", dropout=0.5), inputs()
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))
    assert (block.residual_dropout.p, block.attn.dropout) == (0.5, 0.5)


def test_a_window_and_documents_reach_the_attention() -> None:
    block, x = make("paper", window=2), inputs()
    moved = x.clone()
    moved[:, 0] += 1
    changed = (block(moved) != block(x)).any(-1).any(0)
    assert changed.tolist() == [True, True] + [False] * 5
    docs = torch.tensor([[0, 0, 1, 1, 1, 1, 1]] * 2)
    whole = make("paper")
    assert (whole(x, doc_ids=docs)[:, 2:] - whole(x[:, 2:])).abs().max() < 1e-11
