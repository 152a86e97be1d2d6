"""Gates in models of plain torch.nn and of timm."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import io
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_attn.errors import SpecError, UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf import attach as hf
from gated_attn.hf import families, plain
from gated_attn.hf.native import native_gates
from gated_attn.hf.store import load_gates, save_gates
from gated_attn.hf.verify import verify
from gated_attn.nn.multihead import GatedMultiheadAttention

B, T, S, D, H, E, FF, LAYERS = 3, 7, 5, 24, 4, 6, 34, 3
IDENTITY = "output:headwise:2sigmoid,init=identity"


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says about its own encoder: nested tensors are a prototype, or are not used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Nn]ested.tensor.*", category=UserWarning)
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile forgets after each test what it compiled; its limits are per code object, and tests share code."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def encoder(nested: bool = True, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    with quiet():
        layer = nn.TransformerEncoderLayer(D, H, FF, dropout=0.0, batch_first=True, **options)
        return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=nested)


def transformer() -> nn.Transformer:
    torch.manual_seed(0)
    with quiet():
        return nn.Transformer(D, H, 2, LAYERS, FF, dropout=0.0, batch_first=True)


def awake(model: nn.Module, std: float = 5.0) -> nn.Module:
    for gate in hf.gates(model).values():
        for parameter in gate.parameters():
            nn.init.normal_(parameter, std=std * D**-0.5)
    return model


def mhas(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.MultiheadAttention, GatedMultiheadAttention)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def inputs() -> tuple[Tensor, Tensor]:
    """(x, which tokens are padding)."""
    torch.manual_seed(1)
    return torch.randn(B, T, D), torch.arange(T) >= torch.tensor([T, 2, 4])[:, None]


def run(model: nn.Module, x: Tensor, padding: Tensor | None) -> Tensor:
    with quiet():
        out = model(x, src_key_padding_mask=padding)
    # torch's nested tensors give padding back as zeros, and may cut what is padding in every sample
    return out if padding is None else F.pad(out, (0, 0, 0, T - out.shape[1])).masked_fill(padding[..., None], 0.0)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_no_path_of_an_encoder_skips_the_gate(padded: bool, nested: bool) -> None:
    model = awake(hf.attach(encoder(nested), "output:elementwise"))
    x, padding = inputs()
    mask = padding if padded else None
    calls: list[int] = []
    for module in mhas(model).values():
        module.register_forward_pre_hook(lambda *_: calls.append(1))
    want = run(model.train(), x, mask)
    stock = run(encoder(nested).train(), x, mask)
    assert (want - stock).abs().max() > 0.1  # awake
    model.eval()
    for mode in (nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(run(model, x, mask), want)
    assert len(calls) == 4 * LAYERS


@pytest.mark.parametrize("grad", [nullcontext, torch.no_grad])
@pytest.mark.parametrize("training", [True, False])
def test_identity_and_detach(training: bool, grad: Any) -> None:
    x, padding = inputs()
    model = encoder().train(training)
    keys, parameters, before = list(model.state_dict()), dict(model.named_parameters()), None
    with grad():
        before = run(model, x, padding)
        assert hf.attach(model, IDENTITY) is model
        torch.testing.assert_close(run(model, x, padding), before)
        gated = [key for key in model.state_dict() if ".attn_gate." not in key]
        assert sorted(gated) == sorted(keys)
        assert len(model.state_dict()) > len(keys)
        assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
        state = torch.get_rng_state()
        assert hf.detach(model) is model
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(run(model, x, padding), before)
    assert list(model.state_dict()) == keys
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert {type(module) for module in mhas(model).values()} == {nn.MultiheadAttention}
    assert all(module.training is training for module in model.modules())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"kdim": 11, "vdim": 13},
        {"batch_first": True},
        {"dropout": 0.25},
    ],
    ids=str,
)
def test_every_kind_of_multihead_attention_comes_back_as_it_was(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(D, H, **options).double()
    model = nn.ModuleDict({"mixer": stock}).eval()
    stock.train()
    q, k, v = (torch.randn(n, n, width).double() for n, width in ((5, D), (5, stock.kdim), (5, stock.vdim)))
    torch.manual_seed(2)
    before = stock(q, k, v)
    described, attributes = repr(stock), {key: value for key, value in vars(stock).items() if "hook" not in key}
    hf.attach(model, IDENTITY)
    gated = model["mixer"]
    assert gated.training
    assert gated.attn_gate.proj.weight.dtype == torch.float64
    if stock.dropout == 0.0:
        for got, want in zip(gated(q, k, v), before, strict=True):
            torch.testing.assert_close(got, want)
    hf.detach(model)
    again = model["mixer"]
    assert again is not stock
    assert repr(again) == described
    assert {key: value for key, value in vars(again).items() if "hook" not in key} == attributes
    torch.manual_seed(2)
    for got, want in zip(again(q, k, v), before, strict=True):
        assert torch.equal(got, want)


def test_frozen_stays_frozen_and_only_gates_train() -> None:
    model = encoder().requires_grad_(False)
    model.layers[1].self_attn.in_proj_bias.requires_grad_(True)
    hf.attach(model, "output:headwise")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    gates = {f"layers.{n}.self_attn.attn_gate.proj.weight" for n in range(LAYERS)}
    assert trained == gates | {"layers.1.self_attn.in_proj_bias"}
    run(model, *inputs()).square().sum().backward()
    assert all(model.get_parameter(name).grad is not None for name in gates)
    hf.detach(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"layers.1.self_attn.in_proj_bias"}


def test_self_and_cross_have_gates_of_their_own() -> None:
    model = hf.attach(transformer(), {"self": "value:elementwise", "cross": "output:headwise"})
    specs = {name: str(gate.spec) for name, gate in hf.gates(model).items()}
    assert specs == {
        **{f"encoder.layers.{n}.self_attn.attn_gate": "value:elementwise:sigmoid" for n in range(2)},
        **{f"decoder.layers.{n}.self_attn.attn_gate": "value:elementwise:sigmoid" for n in range(LAYERS)},
        **{f"decoder.layers.{n}.multihead_attn.attn_gate": "output:headwise:sigmoid" for n in range(LAYERS)},
    }
    awake(model)
    source, target = torch.randn(B, S, D), torch.randn(B, T, D)
    with quiet():
        want = model.train()(source, target)
        torch.testing.assert_close(model.eval()(source, target), want)
        with torch.no_grad():
            torch.testing.assert_close(model(source, target), want)


def test_a_cross_gate_reads_the_query_side() -> None:
    """the gate has the queries' length, and other keys and values leave it as it is."""
    model = hf.attach(transformer(), {"cross": "output:headwise"})
    seen: list[Tensor] = []
    for gate in hf.gates(model).values():
        gate.register_forward_hook(lambda _gate, _args, values: seen.append(values))
    layer, memory = model.decoder.layers[0], torch.randn(B, S, D)
    x = torch.randn(B, T, D)
    layer.multihead_attn(x, memory, memory)
    layer.multihead_attn(x, memory + 1, memory - 1)
    assert seen[0].shape == (B, T, H, 1)
    assert torch.equal(*seen)


def test_layers_and_names_choose() -> None:
    model = hf.attach(encoder(), "output:headwise,layers=0,2")
    assert [name.split(".")[1] for name in hf.gates(model)] == ["0", "2"]
    hf.detach(model)
    hf.attach(model, "output:headwise,layers=0", layers=[1])
    assert list(hf.gates(model)) == ["layers.1.self_attn.attn_gate"]
    model = hf.attach(transformer(), "output:headwise", names=["decoder.*"])
    assert len(hf.gates(model)) == 2 * LAYERS
    with pytest.raises(SpecError, match=r"'layers=7': the self attention of this model has layers 0 to 2"):
        hf.attach(encoder(), "output:headwise,layers=7")
    with pytest.raises(SpecError, match="has self attention only"):
        hf.attach(encoder(), {"cross": "output:headwise"})
    with pytest.raises(SpecError, match=r"no attention module is named nothing\*"):
        hf.attach(encoder(), "output:headwise", names=["nothing*"])


def test_a_memory_of_another_width_means_cross_attention() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(D, H), nn.MultiheadAttention(D, H, kdim=11, vdim=13)])
    assert [row.kind for row in families.find(model)] == ["self", "cross"]
    assert [row.kind for row in families.find(hf.attach(model, IDENTITY))] == ["self", "cross"]


def test_shut_gates_leave_the_bias() -> None:
    model = hf.attach(encoder(), "output:headwise,bias=0")
    for gate in hf.gates(model).values():
        nn.init.zeros_(gate.proj.weight)
        nn.init.constant_(gate.proj.bias, -1e9)
    x, _ = inputs()
    for module in mhas(model).values():
        nn.init.normal_(module.out_proj.bias)
        assert torch.equal(module(x, x, x)[0], module.out_proj.bias.expand(B, T, D))


def test_a_shared_module_stays_shared() -> None:
    one = nn.MultiheadAttention(D, H)
    model = nn.ModuleDict({"a": one, "b": nn.ModuleList([one])})
    hf.attach(model, IDENTITY)
    assert model["a"] is model["b"][0]
    assert len(hf.gates(model)) == 1
    hf.detach(model)
    assert type(model["a"]) is nn.MultiheadAttention
    assert model["a"] is model["b"][0]


def test_hooks_and_attributes_of_others_move_along() -> None:
    model = encoder()
    attention, calls = model.layers[0].self_attn, []
    handle = attention.register_forward_hook(lambda *_: calls.append("whole"))
    attention.out_proj.register_forward_hook(lambda *_: calls.append("out"))
    attention.layer_idx = 7
    hf.attach(model, "output:headwise")
    gated, (x, _) = model.layers[0].self_attn, inputs()
    gated(x, x, x)
    assert calls == ["out", "whole"]  # the out projection is really called
    assert gated.layer_idx == 7
    handle.remove()
    gated(x, x, x)
    assert calls == ["out", "whole", "out"]
    hf.detach(model)
    assert model.layers[0].self_attn.layer_idx == 7
    assert model.layers[0].self_attn.out_proj is attention.out_proj


def test_copies_are_whole_and_apart() -> None:
    model = awake(hf.attach(encoder(), "output:headwise,bias=0"))
    x, padding = inputs()
    want = run(model, x, padding)
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), x, padding), want)
    twin = copy.deepcopy(model)
    for gate in hf.gates(twin).values():
        nn.init.constant_(gate.proj.bias, -1e9)
    assert torch.equal(run(model, x, padding), want)
    assert not torch.equal(run(twin, x, padding), want)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    fresh = hf.attach(encoder(), "output:headwise,bias=0")
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert torch.equal(run(fresh, x, padding), want)
    result = fresh.load_state_dict(encoder().state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(".attn_gate." in key for key in result.missing_keys)
    assert {type(m) for m in mhas(hf.detach(twin)).values()} == {nn.MultiheadAttention}


class Own(nn.MultiheadAttention):
    """Somebody's own attention."""


def patched(model: nn.Module) -> nn.Module:
    attention = model.layers[1].self_attn
    attention.forward = attention.forward
    return model


def wrapped(model: nn.Module) -> nn.Module:
    model.layers[1].self_attn.out_proj = nn.Sequential(model.layers[1].self_attn.out_proj)
    return model


@pytest.mark.parametrize(
    ("model", "text", "why"),
    [
        (nn.MultiheadAttention(D, H), IDENTITY, "it is the model itself.*from_torch"),
        (nn.Sequential(Own(D, H)), IDENTITY, "Own is a class of its own"),
        (patched(encoder()), IDENTITY, "1 of 3 .*\n  layers.1.self_attn: its forward was replaced on the instance"),
        (wrapped(encoder()), IDENTITY, r"changed since it was built \(Sequential\)"),
        (encoder(), "output:headwise,source=latent", "3 of 3 .*reads a compressed query"),
        (nn.Linear(2, 3), IDENTITY, "no attention that a gate can be attached to"),
    ],
)
def test_what_cannot_be_gated_is_refused_and_left_alone(model: nn.Module, text: str, why: str) -> None:
    described, flags = repr(model), [p.requires_grad for p in model.parameters()]
    with pytest.raises(UnsupportedError, match=f"(?s){why}"):
        hf.attach(model, text)
    assert repr(model) == described
    assert [p.requires_grad for p in model.parameters()] == flags


def test_other_attention_is_listed() -> None:
    class OddAttention(nn.Module):
        pass

    with pytest.raises(UnsupportedError) as caught:
        hf.attach(nn.Sequential(OddAttention()), IDENTITY)
    (name,) = caught.value.reasons
    assert name.endswith("OddAttention")
    assert "EvaAttention" in caught.value.reasons[name]


def test_a_gate_is_as_wide_as_what_it_reads() -> None:
    for position, wanted in (("output", D), ("key", 11), ("value", 13)):
        model = hf.attach(nn.ModuleList([nn.MultiheadAttention(D, H, kdim=11, vdim=13)]), f"{position}:headwise")
        (row,) = families.find(model)
        assert plain.width(row, position) == wanted
        assert row.module.attn_gate.n_in == wanted


def test_attaching_twice_is_refused() -> None:
    model = hf.attach(encoder(), IDENTITY)
    with pytest.raises(SpecError, match="has gates already"):
        hf.attach(model, IDENTITY)


def test_modules_built_gated_stay() -> None:
    model = nn.Sequential(GatedMultiheadAttention(D, H))
    hf.detach(model)
    assert isinstance(model[0], GatedMultiheadAttention)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_equals_eager() -> None:
    model = awake(hf.attach(encoder(nested=False), "output:elementwise")).eval()
    x, padding = inputs()
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(compiled, x, padding), run(model, x, padding))


# timm -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timm() -> Iterator[dict[str, type[nn.Module]]]:
    """timm's own attention classes, from their files: the package itself cannot be imported without torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    root = Path(next(iter(spec.submodule_search_locations)))
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "timm"}
    for name in before:
        del sys.modules[name]
    for name in ("timm", "timm.layers", "timm.models"):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    layers = importlib.import_module("timm.layers.attention")
    tree = ast.parse((root / "models" / "eva.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EvaAttention"]
    eva = sys.modules["timm.models.eva"] = types.ModuleType("timm.models.eva")
    vars(eva).update({**vars(layers), **vars(importlib.import_module("typing")), "__name__": "timm.models.eva"})
    exec(compile(tree, "eva.py", "exec"), vars(eva))
    yield {
        "Attention": layers.Attention,
        "AttentionRope": layers.AttentionRope,
        "EvaAttention": eva.EvaAttention,
    }
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        del sys.modules[name]
    sys.modules.update(before)


LN = nn.LayerNorm
# class, its options, whether it takes rotary positions
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": ("Attention", {"qkv_bias": True}, False),
    "normed": ("Attention", {"qk_norm": True, "scale_norm": True, "norm_layer": LN, "attn_head_dim": 8}, False),
    "rope": ("AttentionRope", {"qk_norm": True, "norm_layer": LN, "num_prefix_tokens": 2}, True),
    "grouped": ("AttentionRope", {"qkv_fused": False, "num_kv_heads": 2, "qk_norm": True, "norm_layer": LN}, True),
    "eva": ("EvaAttention", {"norm_layer": LN}, True),
    "eva biases apart": ("EvaAttention", {"norm_layer": LN, "qkv_bias_separate": True, "qk_norm": True}, True),
    "eva unfused": ("EvaAttention", {"qkv_fused": False, "scale_norm": False}, True),
    "eva unbiased": ("EvaAttention", {"qkv_bias": False, "scale_norm": False}, False),
}
TEXTS = (
    "output:headwise", "output:elementwise", "output:shared", "output:headwise,fill", "output:elementwise:tanh,op=add",
    "output:headwise,source=constant", "weights:headwise", "value:elementwise", "value:headwise", "key:headwise",
    "query:elementwise", "query:headwise,source=query", "dense:elementwise", "dense:headwise", "output:headwise,in=5,top_k=2",
)  # fmt: skip


def timm_model(classes: dict[str, Any], kind: str, count: int = 2) -> tuple[nn.ModuleList, dict[str, Any]]:
    """Modules of one kind with every parameter drawn, and the keywords of a call."""
    name, options, rope = KINDS[kind]
    torch.manual_seed(0)
    model = nn.ModuleList(classes[name](D, H, **options) for _ in range(count))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if not rope:
        return model.eval(), {}
    angles = torch.randn(T - model[0].num_prefix_tokens, model[0].head_dim)
    return model.eval(), {"rope": torch.cat([angles.sin(), angles.cos()], -1)}


def reference(module: Any, gate: Gate, x: Tensor, rope: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """timm's attention written out, with the gate where the spec says."""
    spec, width = gate.spec, module.head_dim

    def project(letter: str, place: int) -> Tensor:
        if getattr(module, "qkv", None) is None:
            return getattr(module, f"{letter}_proj")(x)
        bias = getattr(module, f"{letter}_bias", None)
        rows = module.qkv(x).chunk(3, -1)[place]
        return rows if bias is None else rows + bias

    def position(heads: Tensor, name: str) -> Tensor:
        return gate.modulate(heads, heads if spec.source == "query" else x) if spec.position == name else heads

    q, k, v = (project(letter, place).unflatten(-1, (-1, width)) for place, letter in enumerate("qkv"))
    q = position(module.q_norm(q), "query").transpose(1, 2)
    k = position(module.k_norm(k), "key").transpose(1, 2)
    v = position(v, "value").transpose(1, 2)
    if rope is not None:
        turn = sys.modules["timm.layers.attention"].apply_rot_embed_cat
        n = module.num_prefix_tokens
        q, k = (torch.cat([y[:, :, :n], turn(y[:, :, n:], rope, half=module.rotate_half)], 2) for y in (q, k))
    out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
    out = module.norm(out.flatten(2)).unflatten(-1, (-1, width))
    y = module.proj(position(position(out, "output"), "weights").flatten(2))
    return position(y[:, :, None], "dense")[:, :, 0]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [True, False])
def test_timm_gates_are_where_they_should_be(timm: Any, kind: str, text: str, fused: bool) -> None:
    model, call = timm_model(timm, kind)
    awake(hf.attach(model, text))
    x = torch.randn(B, T, D)
    for module in model:
        module.fused_attn = fused
        torch.testing.assert_close(
            module(x, **call), reference(module, module.attn_gate, x, **call), rtol=1e-4, atol=1e-5
        )
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        want = reference(module, module.attn_gate, x, **call, mask=mask)
        torch.testing.assert_close(module(x, **call, is_causal=True), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(module(x, **call, attn_mask=mask), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", ["output", "value", "key", "query", "dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_timm_identity_is_exact_and_detach_restores(timm: Any, kind: str, position: str, dtype: torch.dtype) -> None:
    model, call = timm_model(timm, kind)
    model.to(dtype)
    call = {key: value.to(dtype) for key, value in call.items()}
    model[0].requires_grad_(False)
    x, keys, classes = torch.randn(B, T, D, dtype=dtype), list(model.state_dict()), [type(m) for m in model]
    flags = [p.requires_grad for p in model.parameters()]
    before = [module(x, **call) for module in model]
    hf.attach(model, f"{position}:elementwise:2sigmoid,init=identity")
    assert list(hf.gates(model)) == ["0.attn_gate", "1.attn_gate"]
    assert hf.gates(model)["0.attn_gate"].proj.weight.dtype == dtype
    assert all(torch.equal(module(x, **call), want) for module, want in zip(model, before, strict=True))
    assert [key for key in model.state_dict() if ".attn_gate." not in key] == keys
    hf.detach(model)
    assert [type(module) for module in model] == classes
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(module(x, **call), want) for module, want in zip(model, before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_timm_copies_and_gradients(timm: Any, kind: str) -> None:
    model, call = timm_model(timm, kind, count=1)
    awake(hf.attach(model.requires_grad_(False), "value:headwise,bias=0"))
    x = torch.randn(B, T, D)
    want = model[0](x, **call)
    twin = copy.deepcopy(model)
    nn.init.constant_(twin[0].attn_gate.proj.bias, -1e9)
    assert torch.equal(model[0](x, **call), want)
    assert not torch.equal(twin[0](x, **call), want)
    want.square().sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {"0.attn_gate.proj.weight", "0.attn_gate.proj.bias"}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("position", ["output", "value", "key", "dense"])
@pytest.mark.parametrize("kind", ["plain", "eva", "grouped"])
def test_timm_compiled_and_exported_equal_eager(timm: Any, kind: str, position: str) -> None:
    model, call = timm_model(timm, kind, count=1)
    module = awake(hf.attach(model, f"{position}:elementwise"))[0]
    x = torch.randn(B, T, D)
    with torch.no_grad():
        want = module(x, **call)
        torch.testing.assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x, **call), want)
        torch.testing.assert_close(torch.export.export(module, (x,), call).module()(x, **call), want)


@pytest.mark.parametrize("kind", ["plain", "rope", "eva", "eva unfused"])
def test_timm_gates_of_its_own_are_seen(timm: Any, kind: str) -> None:
    name, options, _ = KINDS[kind]
    torch.manual_seed(0)
    model = nn.ModuleList([timm[name](D, H, **options, gated=True)]).eval()
    (path, gate), x = *native_gates(model).items(), torch.randn(B, T, D)
    assert path == "0.gate"
    assert str(gate.spec) == "output:elementwise:sigmoid" + (
        ",bias=0" if options.get("qkv_bias", name != "Attention") else ""
    )
    assert torch.equal(gate.values(x).flatten(2), model[0].gate(x).sigmoid())
    with pytest.raises(UnsupportedError, match="has a gate of its own, which native_gates"):
        hf.attach(model, IDENTITY)
    assert native_gates(timm_model(timm, kind)[0]) == {}


@pytest.mark.parametrize(
    "text",
    ["output:headwise,source=lse", "weights:pairwise", "output:headwise,source=query", "output:headwise,source=latent"],
)
def test_timm_refuses_what_its_forward_does_not_show(timm: Any, text: str) -> None:
    model, _ = timm_model(timm, "plain")
    with pytest.raises(UnsupportedError, match="2 of 2 attention modules cannot have this gate"):
        hf.attach(model, text)
    assert not hf.gates(model)


def test_timm_dense_gates_are_as_wide_as_the_output(timm: Any) -> None:
    model = nn.ModuleList([timm["Attention"](D, H, dim_out=D + 8)])
    with pytest.raises(UnsupportedError, match="a dense gate is 24 wide and this module's output 32"):
        hf.attach(model, "dense:headwise")
    hf.attach(model, "output:headwise")


def test_timm_gates_that_no_call_reaches_are_an_error(timm: Any) -> None:
    class Elsewhere(timm["Attention"]):  # type: ignore[misc]
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            return self.qkv(x)[..., : x.shape[-1]]

    model = hf.attach(nn.ModuleList([Elsewhere(D, H)]), "output:headwise")
    with pytest.raises(UnsupportedError, match="does not call its proj"):
        model[0](torch.randn(B, T, D))


@pytest.mark.parametrize(
    "spec",
    [
        "output:elementwise",
        "output:headwise,fill",
        "value:headwise",
        "dense:headwise",
        "weights:pairwise,bias=1",
        "key:headwise",
        "query:elementwise,source=query",
        "value:elementwise,fill",
        "key:headwise,fill",
    ],
)
def test_gates_are_verified_saved_and_loaded(spec: str, tmp_path: Path) -> None:
    x, padding = inputs()
    model = awake(hf.attach(encoder().eval(), spec))
    batch = {"src": x, "src_key_padding_mask": padding}
    with quiet():
        shown = verify(model, batch)
    assert shown.ok, str(shown)
    assert len(shown.rows) == LAYERS
    with torch.no_grad(), quiet():
        want = model(**batch)
        save_gates(model, tmp_path)
        assert torch.equal(load_gates(encoder().eval(), tmp_path)(**batch), want)


@pytest.mark.parametrize("kind", ["separate widths", "no bias"])
@pytest.mark.parametrize("spec", ["key:headwise", "query:headwise", "value:elementwise,fill"])
def test_key_and_query_gates_are_verified_in_modules_of_their_own(kind: str, spec: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"kdim": 11, "vdim": 13} if kind == "separate widths" else {"bias": False}
            self.attn = nn.MultiheadAttention(D, H, batch_first=True, **sizes)

        def forward(self, x: Tensor) -> Tensor:
            k, v = (x[..., : self.attn.kdim], x[..., : self.attn.vdim])
            return self.attn(x, k, v)[0]

    model = awake(hf.attach(Model().eval(), spec))
    x = torch.randn(B, T, D)
    if "fill" in spec and kind == "no bias":
        with pytest.raises(UnsupportedError, match="has no bias of its own"):
            verify(model, {"x": x})
        return
    want = model(x)
    shown = verify(model, {"x": x})
    assert shown.ok, str(shown)
    assert torch.equal(model(x), want), "the weights are as before"


@pytest.mark.parametrize("spec", ["key:headwise", "query:elementwise", "value:elementwise,fill", "key:headwise,fill"])
@pytest.mark.parametrize("kind", ["plain", "normed", "grouped", "eva", "eva biases apart"])
def test_key_and_query_gates_are_verified_in_timm_too(timm: Any, kind: str, spec: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.options = timm_model(timm, kind)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, **self.options)
            return x

    model = awake(hf.attach(Model().eval(), spec))
    x = torch.randn(B, T, D)
    want = model(x)
    key = spec.startswith("key") and kind in ("normed", "grouped", "eva biases apart")
    if "fill" in spec and (key or kind == "normed"):
        with pytest.raises(UnsupportedError, match="has no bias of its own"):
            verify(model, {"x": x})
        return
    shown = verify(model, {"x": x})
    assert shown.ok, str(shown)
    assert len(shown.rows) == 2
    assert torch.equal(model(x), want)


def test_a_skipped_key_gate_fails_in_plain_models(monkeypatch: pytest.MonkeyPatch) -> None:
    model = awake(hf.attach(encoder().eval(), "key:headwise"))
    monkeypatch.setattr(Gate, "modulate", lambda self, x, source: x)
    assert not verify(model, {"src": inputs()[0]}).ok


def test_plain_models_need_no_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch; from gated_attn import attach, verify\n"
        "layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "model = attach(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 'paper')\n"
        "print(verify(model, {'src': torch.randn(2, 3, 8)}).ok)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
