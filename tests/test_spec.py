"""`GateSpec`: text and value are one, every legal spec's parameter formula is right, every illegal one is named."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_attn.errors import GatedAttnError, SpecError
from gated_attn.gate import Gate
from gated_attn.presets import PRESETS
from gated_attn.spec import ACTIVATIONS, ALIASES, INITS, OPS, POSITIONS, SOURCES, TARGETS, WIDTHS, GateSpec, as_spec

SIZES: dict[str, Any] = {"dim": 23, "heads": 6, "kv_heads": 3, "head_dim": 10, "latent_dim": 7}
numbers = st.floats(-20, 20, allow_nan=False) | st.integers(-9, 9).map(float)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def specs(draw: st.DrawFn) -> GateSpec:
    """Any legal spec: fields drawn freely, and drawn again while they exclude each other."""
    position, width, source = draw(st.sampled_from(_heads()))
    vectorless = source in ("constant", "lse")
    fields = {
        "position": position,
        "width": width,
        "source": source,
        "activation": "sigmoid" if source == "lse" else draw(st.sampled_from(ACTIVATIONS)),
        "in_features": None if vectorless else draw(optional(st.integers(1, 7))),
        "rank": None if vectorless else draw(optional(st.integers(1, 5))),
        "op": draw(st.sampled_from(OPS)),
        "bias": draw(optional(numbers)),
        "std": draw(optional(numbers.map(abs))),
        "init": draw(optional(st.sampled_from(INITS))),
        "top_k": draw(optional(st.integers(1, 3))),
        "fill": draw(st.booleans()),
        "sink_key": source == "lse" and draw(st.booleans()),
        "layers": draw(optional(st.lists(st.integers(0, 90), min_size=1).map(tuple))),
    }
    for dropped in ({}, {"bias": None}, {"std": None}, {"init": None, "std": None}, {"top_k": None}, {"fill": False},
                    {"op": "mul"}, {"op": "mul", "fill": False, "top_k": None, "init": None, "std": None}):  # fmt: skip
        try:
            return GateSpec(**{**fields, **dropped})
        except SpecError:
            continue
    return GateSpec(position, width, source=source, activation="sigmoid")


def _heads() -> list[tuple[str, str, str]]:
    """(position, width, source) of every legal kind of gate."""
    legal = []
    for position, width, source in itertools.product(POSITIONS, WIDTHS, SOURCES):
        try:
            GateSpec(position, width, source=source)
        except SpecError:
            continue
        legal.append((position, width, source))
    return legal


def test_the_kinds_of_gate_are_as_many_as_designed() -> None:
    kinds = _heads()
    counts = {position: sum(kind[0] == position for kind in kinds) for position in POSITIONS}
    assert counts == {"output": 12, "value": 9, "key": 9, "query": 11, "dense": 6, "weights": 5}
    assert {kind[1] for kind in kinds} == set(WIDTHS)
    assert {kind[2] for kind in kinds} == set(SOURCES)


@given(specs())
@settings(max_examples=400)
def test_text_and_value_are_one(spec: GateSpec) -> None:
    text = str(spec)
    assert "\n" not in text
    again = GateSpec.parse(text)
    assert again == spec
    assert hash(again) == hash(spec)
    assert str(again) == text
    assert GateSpec.parse(spec) is spec


@given(specs())
@settings(max_examples=400)
def test_the_parameter_formula_counts_the_modules_parameters(spec: GateSpec) -> None:
    gate = Gate(spec, SIZES["dim"], SIZES["heads"], kv_heads=3, head_dim=10, latent_dim=7)
    assert spec.parameters(**SIZES) == sum(p.numel() for p in gate.parameters())


@given(specs())
def test_spaces_and_order_of_keys_do_not_matter(spec: GateSpec) -> None:
    head, *options = str(spec).split(",")
    keyed: list[str] = []
    for option in options:  # a bare number goes on with the layers list before it
        if keyed and not option[0].isalpha():
            keyed[-1] += "," + option
        else:
            keyed.append(option)
    assert GateSpec.parse(" , ".join([head, *reversed(keyed)])) == spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("output:elementwise", "output:elementwise:sigmoid"),
        ("G1:headwise:sigmoid", "output:headwise:sigmoid"),
        ("G2:headwise,bias=-2,layers=0-3,7", "value:headwise:sigmoid,bias=-2,layers=0-3,7"),
        ("G3:shared:2sigmoid", "key:shared:2sigmoid"),
        ("G4:elementwise,source=query", "query:elementwise:sigmoid,source=query"),
        ("G5:headwise,bias=none", "dense:headwise:sigmoid"),
        ("weights:pairwise", "weights:pairwise:sigmoid"),
        ("weights:pairwise,source=query_key,rank=16", "weights:pairwise:sigmoid,rank=16"),
        ("output:headwise,layers=7,2,1,0,2", "output:headwise:sigmoid,layers=0-2,7"),
        ("output:headwise,std=0.02", "output:headwise:sigmoid"),
        ("output:headwise,init=half,std=0", "output:headwise:sigmoid,init=half"),
        ("output:headwise,bias=-0.0", "output:headwise:sigmoid,bias=0"),
        ("paper", "output:elementwise:sigmoid"),
        ("paper-headwise", "output:headwise:sigmoid"),
        ("nanogpt", "output:headwise:sigmoid,in=12,init=half"),
        ("identity", "output:headwise:2sigmoid,init=identity"),
        ("blog", "output:elementwise:sigmoid,bias=-2"),
        ("paper,layers=1", "output:elementwise:sigmoid,layers=1"),
        ("blog,bias=-1", "output:elementwise:sigmoid,bias=-1"),
        ("sink,fill,bias=2.5,sink_key", "output:headwise:sigmoid,source=lse,bias=2.5,fill,sink_key"),
    ],
)  # fmt: skip
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(GateSpec.parse(text)) == canonical
    assert str(GateSpec.parse(canonical)) == canonical


@pytest.mark.parametrize(
    ("text", "token", "hint"),
    [
        ("outptu:headwise", "'outptu'", "output, value, key, query, dense, weights (aliases G1, G2, G3, G4, G5)"),
        ("output:headwide", "'headwide'", "headwise, elementwise, shared, pairwise"),
        ("output:headwise:relu", "'relu'", "sigmoid, 2sigmoid"),
        ("output", "'output'", "position:width[:activation] nor a preset"),
        ("papr", "'papr'", "paper-headwise"),
        ("output:headwise:sigmoid:x", "'output:headwise:sigmoid:x'", "position:width[:activation]"),
        ("output:headwise,sauce=query", "'sauce=query'", "source="),
        ("output:headwise,rank", "'rank'", "rank="),
        ("output:headwise,fill=1", "'fill=1'", "fill"),
        ("output:headwise,rank=1.5", "'rank=1.5'", "whole number"),
        ("output:headwise,rank=0", "'rank=0'", "at least 1"),
        ("output:headwise,in=-3", "'in=-3'", "whole number"),
        ("output:headwise,bias=x", "'bias=x'", "not a number"),
        ("output:headwise,bias=nan", "'bias=nan'", "finite"),
        ("output:headwise,std=-1", "'std=-1'", "not negative"),
        ("output:headwise,layers=3-1", "'layers=3-1'", "backwards"),
        ("output:headwise,layers=", "'layers='", "layer"),
        ("output:headwise,rank=2,rank=3", "'rank=3'", "twice"),
        ("output:headwise,init=wide", "'wide'", "identity, half, open, closed"),
        ("output:headwise,source=values", "'values'", "hidden, query"),
        ("output:headwise,op=sub", "'sub'", "mul, add"),
        ("output:pairwise", "'pairwise'", "use weights:pairwise"),
        ("weights:elementwise", "'elementwise'", "headwise or pairwise"),
        ("dense:shared", "'shared'", "dense:elementwise"),
        ("weights:pairwise:silu", "'silu'", "never negative"),
        ("weights:pairwise,fill", "'fill'", "no single share"),
        ("output:elementwise,source=lse", "'source=lse'", "output:headwise:sigmoid"),
        ("output:headwise,sink_key", "'sink_key'", "only source=lse"),
        ("output:headwise,source=constant,rank=3", "'rank=3'", "no weight"),
        ("output:headwise,source=constant,in=3", "'in=3'", "reads no channels"),
        ("value:headwise,source=query", "'source=query'", "output, query and weights"),
        ("output:headwise:sigmoid,init=identity", "'init=identity'", "2sigmoid"),
        ("output:headwise:hardsigmoid,init=identity", "'init=identity'", "linear"),
        ("output:headwise,init=open,bias=0", "'bias=0.0'", "drop one of the two"),
        ("output:headwise,init=open,bias=none", "'bias=none'", "needs a bias"),
        ("output:headwise,op=add,fill", "'fill'", "op=mul"),
        ("output:headwise,op=add,top_k=2", "'top_k=2'", "op=mul"),
        ("weights:headwise,op=add", "'op=add'", "use output:headwise,op=add"),
        ("sink,top_k=2", "'top_k=2'", "known only after attention"),
    ],
)  # fmt: skip
def test_errors_name_the_token_and_the_legal_ones(text: str, token: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        GateSpec.parse(text)
    assert token in str(caught.value)
    assert hint in str(caught.value)
    assert isinstance(caught.value, GatedAttnError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        None,
        3,
        ",",
        ":",
        "::",
        "output:",
        ":headwise",
        "none",
        "output:headwise,",
        "output:headwise,,rank=2",
        "output:headwise,layers=0-999999999",
    ],
)
def test_what_is_no_spec_at_all_is_a_spec_error(text: Any) -> None:
    with pytest.raises(SpecError):
        GateSpec.parse(text)


@given(st.text(alphabet="outpheadwisgr:,=0123456789.- ", max_size=40))
def test_no_text_raises_anything_but_a_spec_error(text: str) -> None:
    try:
        spec = GateSpec.parse(text)
    except SpecError:
        return
    assert GateSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "fields",
    [{"fill": 1}, {"layers": 3}, {"layers": "0-3"}, {"layers": ()}, {"bias": True}, {"bias": 10**400}, {"rank": 2.0}],
)
def test_fields_of_a_wrong_type_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(fields))):
        GateSpec("output", "headwise", **fields)


def test_a_spec_is_frozen_and_none_is_no_gate() -> None:
    spec = GateSpec("output", "headwise")
    with pytest.raises(AttributeError):
        spec.width = "shared"  # type: ignore[misc]
    assert as_spec(None) is None
    assert as_spec("none") is None
    assert as_spec("paper") == GateSpec("output", "elementwise")
    assert [i for i in range(9) if GateSpec.parse("paper,layers=0-2,7").applies_to(i)] == [0, 1, 2, 7]


def test_presets_are_legal_and_say_who_uses_them() -> None:
    for name, preset in PRESETS.items():
        spec = GateSpec.parse(name)
        assert spec == GateSpec.parse(preset.text)
        assert len(preset.used_by) > 4
    assert {"paper", "paper-headwise", "nanogpt", "identity", "blog", "qwen3-next", "qwen3.5", "lfm3", "afmoe", "laguna",
            "step", "olmo-core", "megatron"} <= set(PRESETS)  # fmt: skip
    assert set(ALIASES.values()) < set(POSITIONS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("init", TARGETS)
def test_init_is_a_logit_at_which_the_activation_has_that_value(activation: str, init: str) -> None:
    import torch

    from gated_attn.attention.activations import activate

    try:
        spec = GateSpec("output", "headwise", activation, init=init)
    except SpecError:
        assert activation == "nssigmoid", "only nssigmoid, which lies above 0.5, cannot start there"
        assert TARGETS[init] <= 0.5
        return
    assert float(activate(torch.tensor(spec.start, dtype=torch.float64), activation)) == pytest.approx(TARGETS[init])


@pytest.mark.parametrize(
    "module",
    [
        "gated_attn",
        "gated_attn.spec",
        "gated_attn.presets",
        "gated_attn.records",
        "gated_attn.samples",
        "gated_attn.report.html",
    ],
)
def test_the_ground_floor_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
