"""Laws 1, 2, 3, 4, 6 and 8 for gates in transformers models: every row of `families.py`, every position, awake gates.

The models are the tiny ones of `tests/hf/tiny.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from gated_attn.errors import SpecError, UnsupportedError
from gated_attn.hf import families
from gated_attn.hf.attach import attach, detach, gates, out_projection
from gated_attn.hf.verify import verify
from tests.hf import tiny
from tests.hf.tiny import IMAGE, LLM, TINY, spread, wake

EAGER_ONLY = ("gemma2", "gpt_oss")  # soft-capped scores, sinks: not served by PyTorch's fused attention
DECODERS = [
    "llama", "mistral", "qwen3", "gemma2", "gpt_oss", "gemma3", "olmo2", "cohere", "phi", "phi3", "gptj", "gpt2", "gpt_neox", "opt",
]  # fmt: skip
SEQUENCE = ("t5", "bart", "marian", "gpt2 cross")
SPECS = [
    "output:headwise:sigmoid",
    "output:elementwise:sigmoid,fill",
    "output:headwise:silu,op=add",
    "output:elementwise:sigmoid,source=query,bias=0",
    "output:headwise:sigmoid,in=5,top_k=2",
    "value:headwise:sigmoid",
    "value:elementwise:sigmoid,fill",
    "key:headwise:softplus",
    "key:elementwise:2sigmoid",
    "query:headwise:sigmoid",
    "query:elementwise:sigmoid,source=query",
    "dense:headwise:sigmoid",
    "dense:elementwise:sigmoid,fill",
]
INSIDE = ["output:headwise:sigmoid,source=lse,fill", "weights:pairwise:sigmoid,bias=1"]
IDENTITY = [
    f"{position}:{width}:2sigmoid,init=identity"
    for position in ("output", "value", "key", "query", "dense")
    for width in ("headwise", "elementwise")
]


SERVED = [(name, spec) for name in TINY for spec in [*SPECS, *INSIDE] if not (spec in INSIDE and name in EAGER_ONLY)]
"""Gates that are read from the scores inside attention need an implementation that shows them."""
PACKED = [name for name in DECODERS if name not in ("opt", "gpt_oss")]
"""Without a gate, too, OPT takes positions from its mask, and GPT-OSS makes its masks without positions (transformers 5.24)."""


def build(name: str, impl: str | None = None) -> Any:
    impl = impl or ("eager" if name in EAGER_ONLY else "sdpa")
    return spread(tiny.build(name, impl=impl).double())


def batch(name: str, padded: str = "") -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (2, 9), generator=made)
    if name in ("vit", "dinov2", "swin"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=made).double()}
    if name == "clip":
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16, generator=made).double()}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 30, generator=made).double(), "decoder_input_ids": ids}
    if name == "wav2vec2":
        return {"input_values": torch.randn(2, 400, generator=made).double()}
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, slice(0, 4) if padded == "left" else slice(5, 9)] = 0 if padded else 1
    found = {"input_ids": ids, "attention_mask": mask}
    return found | ({"decoder_input_ids": ids[:, :5]} if name in SEQUENCE else {})


def run(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    return [t for t in model(**inputs).to_tuple() if isinstance(t, Tensor)]


def close(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-10) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


def test_every_row_has_a_tiny_configuration() -> None:
    assert {one.row for one in TINY.values()} == {family.name for family in families.FAMILIES}


@pytest.mark.parametrize("name", TINY)
def test_the_row_says_where_things_are(name: str) -> None:
    model = build(name)
    found = list(families.find(model))
    assert TINY[name].row in {one.family.name for one in found}
    for one in found:
        size = families.sizes(one.module, one.family)
        out = out_projection(model, one)
        assert families.in_features(out) == size.heads * size.head_dim
        assert size.heads % size.kv_heads == 0
        for part in (one.family.q, one.family.k, one.family.v):
            assert families.in_features(families.read(one.module, part.child)) > 0


@pytest.mark.parametrize("spec", IDENTITY)
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_attaching_an_identity_changes_no_bit_and_detaching_restores_everything(name: str, spec: str) -> None:
    model, inputs = build(name).float(), {k: v.float() if v.is_floating_point() else v for k, v in batch(name).items()}
    want, keys = run(model, inputs), list(model.state_dict())
    types = [type(module) for module in model.modules()]
    assert attach(model, spec) is model
    assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), want, strict=True))
    added = set(model.state_dict()) - set(keys)
    assert added
    assert all(".attn_gate." in key for key in added)
    with pytest.raises(SpecError, match="has gates already"):
        attach(model, spec)
    wake(model)
    assert any(not torch.equal(a, b) for a, b in zip(run(model, inputs), want, strict=True))
    detach(model)
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == types
    assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), want, strict=True))
    with pytest.raises(SpecError, match="no gates to detach"):
        detach(model)


@pytest.mark.parametrize(("name", "spec"), SERVED)
def test_every_gate_is_wired_on_every_implementation(name: str, spec: str) -> None:
    impls = (
        ["eager"]
        if name in EAGER_ONLY
        else ["sdpa", "gated_attn"]
        if spec in INSIDE
        else ["eager", "sdpa", "gated_attn"]
    )
    model = attach(build(name), spec)
    if "op=add" in spec:
        with pytest.raises(UnsupportedError, match="adds"):
            verify(model, batch(name))
        return
    wake(model)
    for impl in impls:
        model.set_attn_implementation(impl)
        shown = verify(model, batch(name))
        assert shown.ok, str(shown)
        assert len(shown.rows) == len(gates(model))


@pytest.mark.parametrize(
    ("spec", "std"),
    [*((spec, 5.0) for spec in SPECS), ("output:headwise:sigmoid", 0.0), ("output:headwise:sigmoid", 1.0)],
)
@pytest.mark.parametrize("name", [name for name in TINY if name not in EAGER_ONLY])
@torch.no_grad()
def test_implementations_agree(name: str, spec: str, std: float) -> None:
    model, inputs = wake(attach(build(name), spec), std), batch(name)
    want = run(model, inputs)
    for impl, tolerance in (("gated_attn", 1e-10), ("eager", 1e-4)):  # eager softmax is float32 whatever the dtype
        model.set_attn_implementation(impl)
        close(run(model, inputs), want, tolerance)


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_the_gate_multiplies_what_its_position_says(name: str) -> None:
    """By hand: what the out projection reads is what it read, times the gate of the module's own input."""
    model, inputs = build(name), batch(name)
    first = next(families.find(model))
    read: dict[str, list[Tensor]] = {"x": [], "c": []}
    module, out = first.module, out_projection(model, first)
    hooks = [
        module.register_forward_pre_hook(lambda m, a, k: read["x"].append(a[0] if a else k["hidden_states"]), with_kwargs=True),
        out.register_forward_pre_hook(lambda m, a: read["c"].append(a[0])),
    ]  # fmt: skip
    run(model, inputs)
    wake(attach(model, "output:elementwise:sigmoid", names=[first.name]))
    assert list(gates(model)) == [f"{first.name}.attn_gate"]
    run(model, inputs)
    for hook in hooks:
        hook.remove()
    calls = len(read["c"]) // 2  # ALBERT's layers share one module
    assert torch.equal(read["x"][0], read["x"][calls])
    gate = gates(model)[f"{first.name}.attn_gate"](read["x"][0])
    assert torch.equal(read["c"][calls], read["c"][0] * gate.flatten(-2))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2", "cohere", "phi"])
@pytest.mark.parametrize("letter", ["q", "k"])
@torch.no_grad()
def test_key_and_query_gates_follow_the_norm(name: str, letter: str) -> None:
    """A headwise gate before the norm would be cancelled by it: the gated keys are the normed ones times the gate."""
    model, inputs = build(name), batch(name)
    first = next(families.find(model))
    norm = getattr(first.module, first.family.norms["qk".index(letter)])
    layer = getattr(first.module, f"{letter}_proj")
    seen: list[Tensor] = []
    read: list[Tensor] = []
    norm.register_forward_hook(lambda m, a, y: seen.append(y))
    layer.register_forward_pre_hook(lambda m, a: read.append(a[0]))
    run(model, inputs)
    wake(attach(model, f"{'query' if letter == 'q' else 'key'}:headwise:sigmoid", names=[first.name]))
    run(model, inputs)
    gate_BTHG = next(iter(gates(model).values()))(read[0])
    assert gate_BTHG.std() > 0.1
    if first.family.norm == "heads first":
        gate_BTHG = gate_BTHG.transpose(1, 2)
    heads = seen[0].unflatten(-1, (gate_BTHG.shape[2], -1)) if first.family.norm == "all" else seen[0]
    want = (heads * gate_BTHG).reshape(seen[0].shape)
    assert torch.equal(seen[1], want)


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, spec in SERVED if name in DECODERS])
@torch.no_grad()
def test_padding_batching_and_the_cache_change_nothing(name: str, spec: str) -> None:
    model, inputs = wake(attach(build(name), spec)), batch(name, "left")
    tolerance = 1e-9
    if name in EAGER_ONLY:  # eager softmax is float32: without a gate too, a float64 mask of finfo.min makes it NaN
        model, tolerance = model.float(), 1e-4
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    both = model(**inputs, position_ids=positions).logits
    for row, real in ((0, slice(0, 9)), (1, slice(4, 9))):
        alone = model(inputs["input_ids"][row : row + 1, real]).logits
        close([both[row : row + 1, real]], [alone], tolerance)
    ids = inputs["input_ids"][:1]
    whole, cache, parts = model(ids).logits, None, []
    for chunk in ids.split([3, 1, 4, 1], 1):
        out = model(chunk, cache=cache, use_cache=True)
        cache = out.cache if "cache" in out else out.past_key_values
        parts.append(out.logits)
    close([torch.cat(parts, 1)], [whole], tolerance)


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "t5", "bart", "marian"])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_padding_of_encoders_changes_nothing(name: str, spec: str) -> None:
    model, inputs = wake(attach(build(name), spec)), batch(name, "right")
    both = run(model, inputs)[0]
    alone = {key: value[1:2] for key, value in inputs.items()}
    alone["input_ids"], alone["attention_mask"] = alone["input_ids"][:, :5], alone["attention_mask"][:, :5]
    close([both[1:2, :5]], [run(model, alone)[0][:, :5]], 1e-9)


@pytest.mark.parametrize("name", TINY)
def test_only_gates_move_when_the_base_is_frozen(name: str) -> None:
    model, inputs = build(name).requires_grad_(False), batch(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attach(model, "output:headwise:2sigmoid,init=identity")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(p) for p in trained} == {id(p) for gate in gates(model).values() for p in gate.parameters()}
    sum(t.square().sum() for t in run(model, inputs)).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in trained)
    torch.optim.SGD(trained, lr=0.1).step()
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("spec", ["output:headwise:sigmoid", "key:headwise:sigmoid", "dense:elementwise:sigmoid"])
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_copies_and_pickles_are_gated_and_independent(name: str, spec: str) -> None:
    model, inputs = wake(attach(build(name), spec)), batch(name)
    want = run(model, inputs)
    twins = [copy.deepcopy(model)]
    if name != "wav2vec2":  # weight norm makes it a parametrized model, which PyTorch pickles through state_dict only
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twins += [pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for twin in twins:
        assert all(torch.equal(a, b) for a, b in zip(run(twin, inputs), want, strict=True))
        for gate in gates(twin).values():
            for parameter in gate.parameters():
                parameter.zero_()
        assert any(not torch.equal(a, b) for a, b in zip(run(twin, inputs), want, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), want, strict=True))
        detach(twin)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3", "phi3", "bert", "vit"])
def test_checkpointing_and_train_mode_change_no_gradient(name: str) -> None:
    for spec in ("output:elementwise:sigmoid", "key:elementwise:sigmoid", "dense:headwise:sigmoid"):
        model, inputs = wake(attach(build(name), spec)), batch(name)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        found = []
        for way in ("eval", "train", "checkpointed"):
            model.train(way != "eval")
            if way == "checkpointed":
                model.activation_checkpointing_enable()
            model.zero_grad()
            run(model, inputs)[0].square().sum().backward()
            found.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        assert any(".attn_gate." in key for key in found[0])
        for other in found[1:]:
            assert other.keys() == found[0].keys()
            close(list(other.values()), list(found[0].values()))


@pytest.mark.parametrize(
    "spec", ["output:elementwise:sigmoid", "key:headwise:sigmoid", "dense:headwise:sigmoid", *INSIDE]
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "bert", "t5", "vit"])
@torch.no_grad()
def test_one_graph_without_a_break(name: str, spec: str) -> None:
    torch._dynamo.reset()
    model, inputs = wake(attach(build(name), spec)), batch(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        close([t for t in compiled(**inputs).to_tuple() if isinstance(t, Tensor)], run(model, inputs))


@pytest.mark.parametrize(
    "spec", ["output:elementwise:sigmoid", "value:headwise:sigmoid", "dense:headwise:sigmoid", *INSIDE]
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "t5", "bart"])
@torch.no_grad()
def test_generation_is_the_same_with_every_cache(name: str, spec: str) -> None:
    model = wake(attach(build(name), spec))
    inputs = batch(name, "left" if name in DECODERS else "right")
    inputs.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(model.generate(**inputs, **options), want)
    if name in ("llama", "qwen3"):
        assert torch.equal(model.generate(**inputs, **options, cache_implementation="static"), want)
    beams = [model.generate(**inputs, **options, num_beams=3, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*beams)


@torch.no_grad()
def test_eager_still_gives_its_attention_weights() -> None:
    model, inputs = build("llama", "eager"), batch("llama")
    want = model(**inputs, output_attentions=True).attentions
    wake(attach(model, "output:headwise:sigmoid"))
    got = model(**inputs, output_attentions=True).attentions
    assert torch.equal(got[0], want[0]), "the first layer's weights are those before any gate"
    close([weights.sum(-1) for weights in got], [torch.ones_like(weights.sum(-1)) for weights in got], 1e-6)
    model.set_attn_implementation("gated_attn")
    with pytest.raises(UnsupportedError, match="output_attentions=True"):
        model(**inputs, output_attentions=True)


@torch.no_grad()
def test_what_an_implementation_cannot_serve_is_refused_with_its_value() -> None:
    for name, word in (("gemma2", "softcap=50.0"), ("gpt_oss", "s_aux=a tensor of shape")):
        model = attach(build(name), "output:headwise:sigmoid")
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = "gated_attn"
        with pytest.raises(UnsupportedError, match=word):
            model(**batch(name))
    model = attach(build("llama", "eager"), "output:headwise:sigmoid,source=lse")
    with pytest.raises(UnsupportedError, match="which attn_implementation='eager' does not show"):
        model(**batch("llama"))


def test_a_gate_that_does_not_arrive_is_an_error() -> None:
    """A forward that takes the keyword and calls no attention function would skip the gate in silence."""
    model = build("llama")
    module = next(families.find(model)).module
    own = type("LlamaAttention", (type(module),), {"__module__": type(module).__module__})

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states)), None

    own.forward = forward  # type: ignore[attr-defined]
    module.__class__ = own
    run(model, batch("llama"))
    attach(model, "paper")
    with pytest.raises(UnsupportedError, match="the gate did not reach the attention function of LlamaAttention"):
        run(model, batch("llama"))


def test_a_forward_patched_on_the_instance_is_refused() -> None:
    model = build("llama")
    types = [type(module) for module in model.modules()]
    module = list(families.find(model))[-1].module
    module.forward = module.forward
    with pytest.raises(UnsupportedError, match="would be skipped; attach before patching it"):
        attach(model, "paper")
    assert [type(module) for module in model.modules()] == types, "nothing is attached by halves"
    assert not gates(model)


@torch.no_grad()
def test_nothing_is_detached_by_halves() -> None:
    model, inputs = wake(attach(build("llama"), "value:headwise:sigmoid")), batch("llama")
    want, held = run(model, inputs), list(gates(model))
    value = model.model.layers[1].self_attn.v_proj
    nn.utils.parametrize.register_parametrization(value, "weight", nn.Identity())
    with pytest.raises(UnsupportedError, match="undo that before detaching"):
        detach(model)
    assert list(gates(model)) == held
    close(run(model, inputs), want)
    nn.utils.parametrize.remove_parametrizations(value, "weight")
    assert not gates(detach(model))


@pytest.mark.parametrize(("cls", "config", "word"), [
    ("DebertaV2Model", {**LLM}, "DeBERTa computes its attention itself"),
    ("BloomModel", {"vocab_size": 97, "hidden_size": 24, "n_layer": 2, "n_head": 4}, "BLOOM computes"),
    ("SiglipVisionModel", {**IMAGE, "vision_use_head": False}, "SiglipAttention: not of a known family"),
])  # fmt: skip
def test_attention_that_dispatches_elsewhere_is_refused_with_the_reason(
    cls: str, config: dict[str, Any], word: str
) -> None:
    model = getattr(hf, cls)._from_config(getattr(hf, cls.replace("Model", "Config"))(**config))
    types = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=word):
        attach(model, "paper")
    assert [type(module) for module in model.modules()] == types


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        ("papr", {}, SpecError, "did you mean 'paper'"),
        ("none", {}, SpecError, "'none' is no gate"),
        ("paper,layers=2", {}, SpecError, "'layers=2': the self attention of this model has layers 0 to 1"),
        ("paper", {"layers": [0, 7]}, SpecError, "'layers=7'"),
        ("paper", {"layers": []}, SpecError, r"layers=\[\] names no layer; this model has layers 0 to 1"),
        ("paper", {"names": []}, SpecError, r"no attention module is named \[\]"),
        ({"self": "none"}, {}, SpecError, "every kind of attention is given 'none'"),
        ("paper", {"names": ["model.layer.*"]}, SpecError, "no attention module is named model.layer"),
        ("paper,source=latent", {}, UnsupportedError, "llama attention has none"),
        ({"cros": "paper"}, {}, SpecError, "unknown kind of attention 'cros'.*did you mean 'cross'"),
        ({"cross": "paper"}, {}, SpecError, "this model has self attention only"),
    ],
)
def test_what_cannot_be_attached_is_one_sentence(
    spec: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = build("llama")
    with pytest.raises(error, match=message):
        attach(model, spec, **options)
    assert not gates(model)


def test_layers_names_and_kinds_choose() -> None:
    model = attach(build("llama"), "paper,layers=1")
    assert list(gates(model)) == ["model.layers.1.self_attn.attn_gate"]
    detach(model)
    attach(model, "paper,layers=1", layers=[0])
    assert list(gates(model)) == ["model.layers.0.self_attn.attn_gate"]
    model = attach(build("bart"), {"self": "paper-headwise", "cross": "value:elementwise"}, names=["model.decoder.*"])
    assert {name.rpartition("layers.")[2]: str(gate.spec) for name, gate in gates(model).items()} == {
        f"{layer}.{where}": spec
        for layer in (0, 1)
        for where, spec in (
            ("self_attn.attn_gate", "output:headwise:sigmoid"),
            ("encoder_attn.attn_gate", "value:elementwise:sigmoid"),
        )
    }


@torch.no_grad()
def test_cross_attention_is_gated_on_the_query_side() -> None:
    for name, where in (("bart", "encoder_attn"), ("t5", "EncDecAttention"), ("gpt2 cross", "crossattention")):
        model = wake(attach(build(name), {"cross": "paper-headwise"}))
        assert all(f".{where}.attn_gate" in gate for gate in gates(model))
        seen: list[Tensor] = []
        next(iter(gates(model).values())).register_forward_hook(lambda m, a, y, seen=seen: seen.append(y))
        inputs = batch(name)
        run(model, inputs)
        other = inputs | {"input_ids": inputs["input_ids"].flip(1)}
        run(model, other)
        assert seen[0].shape[1] == inputs["decoder_input_ids"].shape[1]
        assert torch.equal(*seen), "another memory, the same gates in the first layer"


@torch.no_grad()
def test_two_forwards_in_flight_do_not_meet() -> None:
    """Nothing is kept on a module: a forward inside another one's does not disturb it."""
    model, inputs = wake(attach(build("llama"), "paper")), batch("llama")
    other = {key: value.flip(0) for key, value in inputs.items()}
    want = run(model, inputs)
    state = [set(module.__dict__) for module in model.modules()]
    nested: list[list[Tensor]] = []

    def inner(module: nn.Module, args: Any, y: Tensor) -> None:
        if not nested:
            nested.append([])  # the forward below comes by here, too
            nested.append(run(model, other))

    hook = model.model.layers[1].self_attn.q_proj.register_forward_hook(inner)
    got = run(model, inputs)
    hook.remove()
    assert torch.equal(got[0], want[0])
    assert torch.equal(nested[1][0], run(model, other)[0])
    assert [set(module.__dict__) for module in model.modules()] == state


@pytest.mark.parametrize("spec", ["output:elementwise:sigmoid", "value:headwise:sigmoid", *INSIDE])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_query_that_sees_nothing_is_zero_whatever_says_so(name: str, spec: str) -> None:
    model = wake(attach(build(name), spec))
    model.set_attn_implementation("gated_attn")
    ids, found = batch(name)["input_ids"], []
    keep = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    keep[1, :, 4] = False
    for hidden in (None, -torch.inf, torch.finfo(torch.float64).min):
        mask = keep if hidden is None else torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, hidden)
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask).logits
        logits.square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([logits.detach(), *grads])
    for other in found[1:]:
        close(other, found[0])


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "vit"])
@torch.no_grad()
def test_gates_in_bfloat16_are_rounded_once_and_inputs_stay(name: str) -> None:
    model = wake(attach(build(name), "output:elementwise:sigmoid")).to(torch.bfloat16)
    inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in batch(name).items()}
    gate, seen = next(iter(gates(model).values())), []
    gate.register_forward_hook(lambda m, args, y: seen.append((args[0], args[0].clone(), args[0]._version, y)))
    run(model, inputs)
    x, before, version, values = seen[0]
    assert torch.equal(x, before)
    assert x._version == version
    assert torch.equal(values, torch.sigmoid(gate.logits(x).float()).to(torch.bfloat16))


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, spec in SERVED if name in PACKED])
@torch.no_grad()
def test_packed_documents_equal_each_alone(name: str, spec: str) -> None:
    """Positions that start anew mark documents, where there is neither a mask nor a cache."""
    model, tolerance = wake(attach(build(name), spec)), 1e-9
    if name in EAGER_ONLY:
        model, tolerance = model.float(), 1e-4
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(4))
    lengths = [5, 1, 6]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in ids.split(lengths, 1)]
    close([packed], [torch.cat(alone, 1)], tolerance)


@pytest.mark.parametrize("spec", ["output:elementwise:sigmoid", "key:headwise:sigmoid", "dense:headwise:sigmoid"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "vit"])
@torch.no_grad()
def test_exported_programs_are_gated(name: str, spec: str) -> None:
    model, inputs = wake(attach(build(name), spec)), batch(name)
    extra = {"use_cache": False} if name in DECODERS else {}
    program = torch.export.export(model, (), inputs | extra, strict=False)
    other = {key: value.flip(0) for key, value in inputs.items()}
    got = [t for t in program.module()(**other, **extra).to_tuple() if isinstance(t, Tensor)]
    close(got, run(model, other | extra))
