"""The pairwise gate keeps no T x S tensor between the passes."""

from __future__ import annotations

import pytest
import torch

from gated_attn.attention import PairLogits, gated_attention
from gated_attn.attention.pairwise import BLOCK


@pytest.mark.parametrize("blocks", [2, 5])
def test_what_is_kept_for_the_backward_pass_is_linear_in_the_length(blocks: int) -> None:
    T = blocks * BLOCK + 1
    q, k, v = (torch.randn(1, T, 2, 3, requires_grad=True) for _ in range(3))
    gate = PairLogits(
        torch.randn(1, T, 2, 3, requires_grad=True), torch.randn(1, T, 2, 3, requires_grad=True), None, "sigmoid"
    )
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = gated_attention(q, k, v, gate, causal=True, impl="sdpa")
    inputs = 5 * q.untyped_storage().nbytes()
    mask = T * T  # one byte per pair: the causal mask is shared by all heads, layers could share it too
    assert sum(storages.values()) <= 3 * inputs + mask
    assert sum(storages.values()) < 2 * T * T * 4, "less than one head's scores would take"
    out.sum().backward()
    assert gate.query_BTHR.grad is not None
    assert torch.isfinite(gate.query_BTHR.grad).all()


def test_a_gate_of_ones_is_no_gate_and_of_halves_is_half() -> None:
    T = BLOCK + 3
    q, k, v = (torch.randn(2, T, 4, 5, dtype=torch.float64) for _ in range(3))
    zeros = torch.zeros(2, T, 4, 1, dtype=torch.float64)
    want = gated_attention(q, k, v, causal=True)
    for activation, value in (("2sigmoid", 1.0), ("sigmoid", 0.5), ("hardsigmoid", 0.5), ("nssigmoid", 0.75)):
        got = gated_attention(q, k, v, PairLogits(zeros, zeros, None, activation), causal=True, impl="sdpa")
        assert (got - value * want).abs().max() < 1e-12
