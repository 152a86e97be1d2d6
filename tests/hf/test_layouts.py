"""Layouts of fused gates: every pair bitwise, against views written down from each project's own forward, and exact rewrites."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gated_attn.errors import ShapeError, SpecError, UnsupportedError
from gated_attn.hf import layouts
from gated_attn.hf.layouts import LAYOUTS, Sizes

H, E, D = 8, 4, 23
GROUPED = Sizes(H, 2, E)
FUSED = ("per_head", "per_kv_group", "flat", "group_qgkv", "tail_rows")


def roles(sizes: Sizes, width: str, *, bias: bool = False) -> dict[str, Tensor]:
    """Whole numbers, all different, so that products are exact and no row can stand for another."""
    count = {role: sizes.rows(role, width) for role in ("q", "gate", "k", "v")}
    columns = 1 if bias else D
    values = torch.arange(sum(count.values()) * columns, dtype=torch.float64).split(
        [n * columns for n in count.values()]
    )
    made = {role: part.view(-1, columns) for role, part in zip(count, values, strict=True)}
    return {role: part[:, 0] if bias else part for role, part in made.items()}


@pytest.mark.parametrize("width", ["headwise", "elementwise"])
@pytest.mark.parametrize("kv_heads", [1, 2, H])
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_ordered_pair_goes_there_and_back_bit_for_bit(source: str, kv_heads: int, width: str) -> None:
    sizes = Sizes(H, kv_heads, E)
    if width not in LAYOUTS[source].widths:
        with pytest.raises(UnsupportedError, match=f"{source} holds headwise gates, not elementwise"):
            layouts.role_rows(source, sizes, width)
        return
    for bias in (False, True):
        canonical = roles(sizes, width, bias=bias)
        stored = layouts.join(canonical, sizes, source, width=width)
        for target in LAYOUTS:
            if width not in LAYOUTS[target].widths:
                continue
            there = layouts.convert(stored, sizes, source, target, width=width)
            assert set(there) == set(LAYOUTS[target].tensors)
            back = layouts.convert(there, sizes, target, source, width=width)
            for key, tensor in stored.items():
                assert torch.equal(back[key], tensor)
            for role, tensor in layouts.split(there, sizes, target, width=width).items():
                assert torch.equal(tensor, canonical[role])


def views(layout: str, width: str, sizes: Sizes, projected: Tensor) -> dict[str, Tensor]:
    """(B, T, N) of a fused projection -> (B, T, rows) per role, as the code of each project writes it."""
    B, T, _ = projected.shape
    KV, G, one = sizes.kv_heads, sizes.heads // sizes.kv_heads, {"headwise": 1, "elementwise": E}[width]
    if layout == "per_head":  # transformers qwen3_next and qwen3_5
        q, gate = projected.view(B, T, -1, E + one).split([E, one], dim=-1)
        parts = {"q": q, "gate": gate}
    elif layout == "per_kv_group":  # qiuzh20/gated_attention modeling_qwen3.py
        q, gate = projected.view(B, T, KV, -1).split([E * G, one * G], dim=-1)
        parts = {"q": q, "gate": gate}
    elif layout == "flat":
        parts = {"q": projected[..., : H * E], "gate": projected[..., H * E :]}
    elif layout == "group_qgkv":  # Megatron-LM core/transformer/attention.py, attention_output_gate
        mixed = projected.view(B, T, KV, -1).split([G * E, G * one, E, E], dim=3)
        parts = dict(zip(("q", "gate", "k", "v"), mixed, strict=True))
    else:  # Megatron-LM dev, head_wise_attn_gate
        mixed, gate = projected[..., :-H], projected[..., -H:]
        q, k, v = mixed.view(B, T, KV, (G + 2) * E).split([G * E, E, E], dim=3)
        parts = {"q": q, "gate": gate, "k": k, "v": v}
    return {role: part.reshape(B, T, -1) for role, part in parts.items()}


@pytest.mark.parametrize("width", ["headwise", "elementwise"])
@pytest.mark.parametrize("kv_heads", [1, 2, H])
@pytest.mark.parametrize("layout", FUSED)
def test_the_rows_are_those_that_the_projects_own_views_read(layout: str, kv_heads: int, width: str) -> None:
    if width not in LAYOUTS[layout].widths:
        pytest.skip("headwise only")
    sizes, canonical = Sizes(H, kv_heads, E), roles(Sizes(H, kv_heads, E), width)
    fused = layouts.join(canonical, sizes, layout, width=width)[LAYOUTS[layout].fused or ""]
    x = torch.randint(-3, 4, (2, 5, D), generator=torch.manual_seed(3)).double()
    for role, part in views(layout, width, sizes, x @ fused.T).items():
        assert torch.equal(part, x @ canonical[role].T), role


def attention(name: str, sizes: Sizes) -> Any:
    """The attention layer that transformers ships, without rotation and norms: attention returns ones and keeps its query."""
    module = importlib.import_module(f"transformers.models.{name}")
    config_class, layer = (
        (module.Qwen3NextConfig, f"{name}.modeling_{name}.Qwen3NextAttention")
        if name == "qwen3_next"
        else (module.Qwen3_5TextConfig, f"{name}.modeling_{name}.Qwen3_5Attention")
    )
    config = config_class(
        hidden_size=D, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, head_dim=E,
        num_hidden_layers=1, layer_types=["full_attention"],
    )  # fmt: skip
    config._attn_implementation = "recorded"
    path, _, cls = layer.rpartition(".")
    built = getattr(importlib.import_module(f"transformers.models.{path}"), cls)(config, layer_idx=0).double()
    built.q_norm = built.k_norm = built.o_proj = torch.nn.Identity()
    return built


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("kv_heads", [1, 2, H])
def test_per_head_is_what_transformers_reads(name: str, kv_heads: int) -> None:
    interface = pytest.importorskip("transformers").AttentionInterface
    sizes, seen = Sizes(H, kv_heads, E), {}

    def recorded(module: Any, query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        seen["q"] = query.transpose(1, 2)
        return torch.ones_like(seen["q"]), None

    interface.register("recorded", recorded)
    try:
        layer = attention(name, sizes)
        q, gate = torch.randn(2, H * E, D, dtype=torch.float64, generator=torch.manual_seed(5)) / D**0.5
        k = v = torch.zeros(kv_heads * E, D, dtype=torch.float64)
        x = torch.randn(2, 7, D, dtype=torch.float64)
        rotation = torch.ones(2, 7, E, dtype=torch.float64), torch.zeros(2, 7, E, dtype=torch.float64)

        def run(layout: str) -> tuple[Tensor, Tensor]:
            """Queries and gate values of transformers, given the tensors of a layout."""
            stored = layouts.join({"q": q, "gate": gate, "k": k, "v": v}, sizes, layout, width="elementwise")
            layer.q_proj.weight.data = stored["q"]
            out = layer(x, position_embeddings=rotation, attention_mask=None)[0]
            return seen["q"].flatten(2), out

        queries, values = run("per_head")
        torch.testing.assert_close(queries, x @ q.T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(values, (x @ gate.T).sigmoid(), rtol=1e-12, atol=1e-12)
        for other in ("per_kv_group", "flat"):
            same = other == "per_kv_group" and kv_heads == H
            assert bool((run(other)[1] - values).abs().max() > 1e-3) is not same
    finally:
        for registry in (interface._global_mapping, interface()._local_mapping):
            registry.pop("recorded", None)


def test_one_query_head_per_group_makes_the_two_q_proj_layouts_one_and_more_do_not() -> None:
    for kv_heads in (1, 2, H):
        canonical = roles(Sizes(H, kv_heads, E), "elementwise")
        a, b = (
            layouts.join(canonical, Sizes(H, kv_heads, E), layout, width="elementwise")["q"]
            for layout in ("per_head", "per_kv_group")
        )
        assert torch.equal(a, b) is (kv_heads == H)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_role_rows_tile_each_tensor_and_slices_say_the_same(layout: str) -> None:
    for width in LAYOUTS[layout].widths:
        index = layouts.role_rows(layout, GROUPED, width)
        assert list(index) == ["q", "gate", "k", "v"]
        for key, members in LAYOUTS[layout].roles.items():
            tiled = torch.cat([index[role] for role in members]).sort().values
            assert torch.equal(tiled, torch.arange(LAYOUTS[layout].rows(key, GROUPED, width)))
        for role, slices in layouts.role_slices(layout, GROUPED, width).items():
            rows = [row for part in slices for row in range(part.start, part.stop)]
            assert rows == index[role].tolist()
            assert all(a.stop != b.start for a, b in pairwise(slices))


@pytest.mark.parametrize("width", ["headwise", "elementwise"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_shows_the_same_rows_without_a_copy(layout: str, width: str) -> None:
    if width not in LAYOUTS[layout].widths:
        pytest.skip("headwise only")
    canonical = roles(GROUPED, width)
    for key, tensor in layouts.join(canonical, GROUPED, layout, width=width).items():
        for role in LAYOUTS[layout].roles[key]:
            seen = layouts.view(tensor, role, GROUPED, layout, width=width)
            assert torch.equal(seen.flatten(0, 1), canonical[role])
            assert seen.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            turned = layouts.view(tensor.T, role, GROUPED, layout, width=width, axis=-1)
            assert torch.equal(turned, seen.movedim(-1, 0))
    with pytest.raises(ShapeError, match=r"has 22 rows; layout"):
        layouts.view(torch.zeros(22, 3), "gate", GROUPED, layout, width=width)


def test_slices_by_hand() -> None:
    assert layouts.role_slices("tail_rows", GROUPED, "headwise") == {
        "q": [slice(0, 16), slice(24, 40)], "gate": [slice(48, 56)],
        "k": [slice(16, 20), slice(40, 44)], "v": [slice(20, 24), slice(44, 48)],
    }  # fmt: skip
    assert layouts.role_slices("per_kv_group", GROUPED, "headwise")["gate"] == [slice(16, 20), slice(36, 40)]
    assert layouts.role_slices("per_head", Sizes(2, 1, E), "none")["gate"] == []


def test_a_layer_without_a_gate_keeps_its_layout() -> None:
    plain = {role: part for role, part in roles(GROUPED, "none").items() if role != "gate"}
    for layout in LAYOUTS:
        stored = layouts.join(plain, GROUPED, layout, width="none")
        assert all(tensor.numel() for tensor in stored.values())
        again = layouts.split(stored, GROUPED, layout, width="none")
        assert set(again) == {"q", "k", "v"}
        assert all(torch.equal(again[role], part) for role, part in plain.items())


def test_inputs_are_neither_changed_nor_shared_and_out_passes_through() -> None:
    canonical = {**roles(GROUPED, "headwise"), "out": torch.randn(D, H * E)}
    before = {role: part.clone() for role, part in canonical.items()}
    for layout in LAYOUTS:
        stored = layouts.join(canonical, GROUPED, layout, width="headwise")
        assert stored["out"] is canonical["out"]
        for tensor in (part for key, part in stored.items() if key != "out"):
            tensor.zero_()
    assert all(torch.equal(part, before[role]) for role, part in canonical.items())
    one = layouts.split(torch.zeros(H * (E + 1), D), GROUPED, "per_head", width="headwise")
    assert {role: tuple(part.shape) for role, part in one.items()} == {"q": (H * E, D), "gate": (H, D)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_every_dtype_moves_by_bits(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (H * 2 * E, D * dtype.itemsize), dtype=torch.uint8, generator=torch.manual_seed(7))
    parts = layouts.split(bits.view(dtype), GROUPED, "per_head", width="elementwise")
    assert parts["q"].dtype == dtype
    again = layouts.join(parts, GROUPED, "per_head", width="elementwise")["q"]
    assert torch.equal(again.view(torch.uint8), bits)


def test_errors_carry_both_numbers_and_what_to_do() -> None:
    with pytest.raises(ShapeError, match=r"q of shape \(63, 23\) has 63 rows; layout per_head has 64"):
        layouts.split(torch.zeros(63, D), GROUPED, "per_head", width="elementwise")
    with pytest.raises(ShapeError, match="has 64 rows; layout per_head has 40"):
        layouts.split(torch.zeros(64, D), GROUPED, "per_head", width="headwise")
    with pytest.raises(ShapeError, match="6 heads, 4 KV heads"):
        Sizes(6, 4, E)
    with pytest.raises(SpecError, match="no layout 'per_heads'; did you mean 'per_head'"):
        layouts.named("per_heads")
    with pytest.raises(SpecError, match="width 'shared' has no layout"):
        layouts.role_rows("flat", GROUPED, "shared")
    with pytest.raises(SpecError, match="has no tensor 'qkv'; it has q, k, v"):
        layouts.split({"qkv": torch.zeros(1)}, GROUPED, "flat", width="headwise")
    with pytest.raises(SpecError, match="no fused tensor"):
        layouts.split(torch.zeros(1), GROUPED, "g_proj", width="headwise")
    with pytest.raises(SpecError, match="no role 'query'"):
        layouts.join({"query": torch.zeros(1)}, GROUPED, "flat", width="headwise")
    with pytest.raises(UnsupportedError, match="per_head keeps q, gate in one tensor, and q is missing beside gate"):
        layouts.join({"gate": torch.zeros(H)}, GROUPED, "per_head", width="headwise")
    some = roles(GROUPED, "headwise")
    with pytest.raises(ShapeError, match=r"gate is \(8, 12\)"):  # a gate that reads 12 channels only
        layouts.join({**some, "gate": some["gate"][:, :12]}, GROUPED, "flat", width="headwise")
    with pytest.raises(ShapeError, match=r"gate is .* of torch.float32; beside q"):
        layouts.join({**some, "gate": some["gate"].float()}, GROUPED, "flat", width="headwise")


def bf16(start: float, end: float) -> Tensor:
    """Every bfloat16 from start to end, of both signs."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    return every[(every.abs().double() >= start) & (every.abs().double() <= end)]


def test_a_1_plus_w_norm_in_bf16_comes_back_bit_for_bit() -> None:
    w = torch.cat([bf16(2**-15, 8.0), torch.zeros(1, dtype=torch.bfloat16)])
    scale = layouts.from_zero_centred(w)
    assert scale.dtype == torch.float32
    assert torch.equal(scale.double(), 1 + w.double())
    assert torch.equal(layouts.to_zero_centred(scale, torch.bfloat16).view(torch.int16), w.view(torch.int16))
    assert ((1 + w) - 1 != w).double().mean() > 0.7  # what staying in bfloat16 would have lost
    tiny = torch.tensor([3.1e-9, 0.25], dtype=torch.bfloat16)
    assert layouts.from_zero_centred(tiny).dtype == torch.float64
    assert torch.equal(layouts.to_zero_centred(layouts.from_zero_centred(tiny), torch.bfloat16), tiny)


def test_a_plain_norm_comes_back_from_zero_centred_and_stays_narrow_where_it_can() -> None:
    middle = bf16(0.5, 2.0)
    middle = middle[middle > 0]
    assert layouts.to_zero_centred(middle).dtype == torch.bfloat16
    scale = bf16(2**-15, 200.0)
    w = layouts.to_zero_centred(scale)
    assert w.dtype == torch.float32
    assert torch.equal(layouts.from_zero_centred(w, torch.bfloat16).view(torch.int16), scale.view(torch.int16))


@pytest.mark.parametrize("bad", [1e-30, float("nan"), float("inf")])
def test_a_norm_that_cannot_be_shifted_exactly_is_refused(bad: float) -> None:
    with pytest.raises(UnsupportedError, match=r"1 of 2 norm weights, such as (9.98\d+e-31|nan|inf) of"):
        layouts.from_zero_centred(torch.tensor([0.5, bad], dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match=r"1 of 1 norm weights.*in torch.bfloat16: leave dtype out"):
        layouts.from_zero_centred(torch.tensor([0.01]), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folding_2sigmoid_into_the_out_projection_is_exact(dtype: torch.dtype) -> None:
    generator = torch.manual_seed(11)
    weight, bias, o, logits = (
        torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((D, 12), (D,), (5, 12), (5, 12))
    )
    gate = torch.sigmoid(5 * logits)
    folded = layouts.fold_2sigmoid(weight)
    assert torch.equal((o * (2 * gate)) @ weight.T + bias, (o * gate) @ folded.T + bias)
    assert torch.equal(layouts.unfold_2sigmoid(folded), weight)


def test_folding_refuses_what_would_round() -> None:
    with pytest.raises(UnsupportedError, match=r"1 of 2 out weights, such as 40000 of torch\.float16"):
        layouts.fold_2sigmoid(torch.tensor([1.0, 40000.0], dtype=torch.float16))
    with pytest.raises(UnsupportedError, match=r"multiplied by 0\.5 exactly"):
        layouts.unfold_2sigmoid(torch.tensor([2.0**-24], dtype=torch.float16))


def test_headwise_expands_and_collapses_and_a_true_elementwise_gate_does_not() -> None:
    for gate in (torch.randn(H, D), torch.randn(H)):
        wide = layouts.expand_headwise(gate, E)
        x = torch.randn(3, D) if gate.dim() == 2 else None
        assert torch.equal(wide.unflatten(0, (H, E))[:, 3], gate)
        if x is not None:
            torch.testing.assert_close((x @ wide.T).view(3, H, E), (x @ gate.T)[:, :, None].expand(3, H, E))
        assert torch.equal(layouts.collapse_elementwise(wide, E), gate)
        wide[2 * E + 1] += 1
        with pytest.raises(ShapeError, match=r"1 of 8 heads \(the first is head 2\)"):
            layouts.collapse_elementwise(wide, E)
    with pytest.raises(ShapeError, match=r"\(9, 23\) has no heads of 4 rows"):
        layouts.collapse_elementwise(torch.zeros(9, D), E)


def test_a_layout_says_what_its_rows_are() -> None:
    said = {name: str(layout) for name, layout in LAYOUTS.items()}
    assert said["separate"] == "q_proj; attn_gate.proj; k_proj; v_proj"
    assert said["per_kv_group"] == "q_proj = [q gate] per KV group; k_proj; v_proj"
    assert said["flat"] == "q_proj = all q, then all gate; k_proj; v_proj"
    assert said["tail_rows"] == "linear_qkv = [q k v] per KV group, then all gate (headwise only)"
    assert len({*said.values()}) == len(LAYOUTS)
