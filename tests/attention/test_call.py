"""The public door of `gated_attention`: what does not fit is refused with both shapes and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gated_attn.attention import IMPLS, PairLogits, Sink, explain, gated_attention, reference, sdpa
from gated_attn.attention.call import make_call
from gated_attn.errors import GatedAttnError, ShapeError, UnsupportedError

B, T, S, H, K, E = 2, 5, 7, 6, 3, 11


def qkv() -> dict[str, Any]:
    return {"q_BTHE": torch.randn(B, T, H, E), "k_BSKE": torch.randn(B, S, K, E), "v_BSKE": torch.randn(B, S, K, E)}


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"q_BTHE": torch.randn(T, H, E)}, ["(5, 6, 11)", "4 dimensions"]),
    ({"k_BSKE": torch.randn(B, S, K, E + 1)}, ["11 and 12", "(2, 5, 6, 11)", "(2, 7, 3, 12)", "project both"]),
    (
        {"k_BSKE": torch.randn(B + 1, S, K, E), "v_BSKE": torch.randn(B + 1, S, K, E)},
        ["batch sizes differ", "(3, 7, 3, 11)"],
    ),
    ({"v_BSKE": torch.randn(B, S + 1, K, E)}, ["keys and values differ", "(2, 7, 3, 11)", "(2, 8, 3, 11)"]),
    ({"q_BTHE": torch.randn(B, T, 7, E)}, ["7 query heads cannot share 3", "multiple"]),
    ({"k_BSKE": torch.randn(B, S, 0, E), "v_BSKE": torch.randn(B, S, 0, E)}, ["6 query heads cannot share 0"]),
    ({"v_BSKE": torch.randn(B, S, K, E).double()}, ["mixed dtypes", "torch.float32", "torch.float64", "cast"]),
    ({"v_BSKE": torch.randn(B, S, K, E, device="meta")}, ["mixed devices", "cpu", "meta", "move"]),
    ({"q_BTHE": torch.ones(B, T, H, E, dtype=torch.long)}, ["torch.int64", "floating point"]),
    ({"gate": torch.rand(B, T, H)}, ["(2, 5, 6)", "(2, 5, 6, 11)", "(B, T, H, 1) headwise"]),
    ({"gate": torch.rand(B, S, H, 1)}, ["(2, 7, 6, 1)", "(2, 5, 6, 11)"]),
    ({"gate": torch.rand(B, T, K, 1)}, ["(2, 5, 3, 1)", "shared by all heads"]),
    ({"gate": torch.ones(B, T, H, 1, dtype=torch.bool)}, ["torch.bool", "not a mask"]),
    ({"gate": torch.rand(B, T, H, 1, device="meta")}, ["meta", "cpu", ".to("]),
    ({"gate": Sink(torch.zeros(K))}, ["(3,)", "(6,)"]),
    ({"gate": Sink(torch.zeros(H), torch.zeros(H, E + 1))}, ["(6, 12)", "(6, 11)"]),
    (
        {"gate": PairLogits(torch.zeros(B, T, H, 4), torch.zeros(B, S, H, 4), None, "sigmoid")},
        ["(2, 7, 6, 4)", "(2, 7, 3, 'R')"],
    ),
    ({"fill": torch.zeros(H, E)}, ["fill needs a gate"]),
    ({"fill": torch.zeros(E), "gate": torch.rand(B, T, H, 1)}, ["(11,)", "(6, 11)"]),
    ({"mask": torch.ones(B, S, dtype=torch.bool)}, ["(2, 7)", "(2, 6, 5, 7)", "mask[:, None, None, :]"]),
    ({"mask": torch.ones(B, T, S, dtype=torch.bool)}, ["(2, 5, 7)", "mask[:, None]"]),
    ({"mask": torch.ones(T, S + 1, dtype=torch.bool)}, ["(5, 8)", "(2, 6, 5, 7)"]),
    ({"mask": torch.ones(T, S, dtype=torch.long)}, ["torch.int64", "polarity", "mask.bool()"]),
    ({"mask": torch.ones(T, S, device="meta")}, ["mask is on meta", "cpu"]),
    ({"window": 0}, ["window=0", "int >= 1"]),
    ({"window": True}, ["window=True"]),
    ({"window": 2.5}, ["window=2.5"]),
    ({"doc_ids": torch.zeros(B, T, dtype=torch.long)}, ["(2, 5)", "(2, 7)", "cached ones included"]),
    ({"doc_ids": torch.zeros(B, S)}, ["torch.float32", "int document number"]),
    ({"dropout": 1.0}, ["dropout=1.0", "[0, 1)"]),
    ({"dropout": -0.1}, ["dropout=-0.1"]),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[words[0] for _, words in WRONG])
def test_what_does_not_fit_is_refused_with_both_shapes(wrong: dict[str, Any], words: list[str]) -> None:
    for call in (gated_attention, explain):
        with pytest.raises(ShapeError) as caught:
            call(**{**qkv(), **wrong})
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "\n" not in message
        assert isinstance(caught.value, GatedAttnError)


def test_an_unknown_impl_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="unknown impl 'fast'; known: auto, sdpa, flex, reference"):
        gated_attention(**qkv(), impl="fast")


def test_explain_names_the_choice_and_each_refusal() -> None:
    trained = qkv()
    trained["q_BTHE"].requires_grad_()
    found = explain(**trained)
    assert found.impl == "sdpa"
    assert found.reasons["flex"] == "FlexAttention has no backward pass on the CPU"
    assert "sdpa comes first" in found.reasons["reference"]
    assert str(found).splitlines()[0] == "sdpa: chosen"
    assert explain(**trained, return_lse=True).impl == "reference"
    refused = explain(**trained, impl="flex")
    assert refused.impl is None
    assert "no implementation serves this call" in str(refused)
    assert "flex was asked for" in refused.reasons["sdpa"]
    with pytest.raises(UnsupportedError) as caught:
        gated_attention(**trained, impl="flex")
    assert caught.value.reasons == {"flex": "FlexAttention has no backward pass on the CPU"}


def test_dropout_never_falls_on_the_fill() -> None:
    arguments = {**qkv(), "gate": Sink(torch.zeros(H)), "fill": torch.ones(H, E), "dropout": 0.5}
    assert "dropout would fall on the sink's fill" in explain(**arguments, impl="sdpa").reasons["sdpa"]
    assert explain(**arguments).impl == "reference"
    hidden = torch.zeros(T, S, dtype=torch.bool)
    assert torch.equal(gated_attention(**arguments, mask=hidden), torch.ones(B, T, H, E))


def test_the_log_sum_exp_is_float32_at_least() -> None:
    low = {name: t.bfloat16() for name, t in qkv().items()}
    for impl in ("reference", "flex"):
        assert gated_attention(**low, impl=impl, return_lse=True)[1].dtype == torch.float32


def test_one_more_impl_needs_nothing_but_a_row_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    ours = ModuleType("ours")
    ours.why_not = lambda call: None if call.q_BTHE.shape[1] == 1 else "serves one query only"  # type: ignore[attr-defined]
    ours.run = lambda call: (torch.full_like(call.q_BTHE, 7.0), None)  # type: ignore[attr-defined]
    monkeypatch.setitem(IMPLS, "ours", ours)
    arguments = qkv()
    assert explain(**arguments).reasons["ours"] == "serves one query only"
    arguments["q_BTHE"] = torch.randn(B, 1, H, E)
    assert (gated_attention(**arguments, impl="ours") == 7).all()


def test_the_fast_code_does_not_import_the_reference() -> None:
    import ast
    import inspect

    from gated_attn.attention import flex, pairwise

    for module in (sdpa, flex, pairwise):
        tree = ast.parse(inspect.getsource(module))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "gated_attn.attention.reference" not in imported
    assert len(inspect.getsource(reference).splitlines()) <= 60


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_inputs_are_cast_as_sdpa_casts_them(dtype: torch.dtype) -> None:
    mixed = qkv()
    mixed["v_BSKE"] = mixed["v_BSKE"].to(dtype)
    with torch.autocast("cpu", dtype):
        out = gated_attention(**mixed, gate=torch.rand(B, T, H, 1))
    assert out.dtype == dtype
    with pytest.raises(ShapeError, match="mixed dtypes"):
        gated_attention(**mixed)


def test_the_output_has_the_queries_dtype_whatever_the_gates() -> None:
    arguments = {name: t.bfloat16() for name, t in qkv().items()}
    for impl in IMPLS:
        out = gated_attention(**arguments, gate=torch.rand(B, T, H, 1), fill=torch.rand(H, E), impl=impl)
        assert out.dtype == torch.bfloat16


def test_needs_grad_sees_every_leaf() -> None:
    q, k, v = qkv().values()
    leaf = torch.zeros(H, requires_grad=True)
    assert not make_call(q, k, v).needs_grad
    assert make_call(q, k, v, Sink(leaf)).needs_grad
    assert make_call(q, k, v, mask=torch.zeros(T, S, requires_grad=True)).needs_grad
    with torch.no_grad():
        assert not make_call(q, k, v, Sink(leaf)).needs_grad


@pytest.mark.parametrize("form", ["strided", "expanded"])
def test_views_are_read_as_they_are(form: str) -> None:
    q, k, v = qkv().values()
    gate = torch.rand(B, T, H, 2)[..., :1] if form == "strided" else torch.rand(1, T, 1, 1).expand(B, T, H, 1)
    assert not gate.is_contiguous()
    assert torch.equal(gated_attention(q, k, v, gate), gated_attention(q, k, v, gate.contiguous()))
    packed = torch.randn(B, S, K, 2 * E)
    a, b = packed.split(E, -1)
    assert torch.allclose(gated_attention(q, a, b), gated_attention(q, a.contiguous(), b.contiguous()), atol=1e-6)
