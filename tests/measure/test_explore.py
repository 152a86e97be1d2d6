"""What the explorer's core says of every head of every family, against eager maps, weights of the out projection and captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gated_attn import attach
from gated_attn.errors import RecipeError, UnsupportedError
from gated_attn.measure.capture import AGAIN, Chosen, attention_modules, capture
from gated_attn.measure.edits import out_of, scaled, width_of
from gated_attn.measure.explore import LIMIT, Prediction, look, read, shift
from tests.hf import test_native, tiny
from tests.hf.tiny import TINY, spread, wake
from tests.measure.test_capture import EAGER_ONLY, batch, eager_maps, native
from tests.measure.test_edits import NATIVE

SPARSE = ("inkling2", "hy_v4", "dots3_note")  # whose attention takes keywords that `capture` does not read

ONE = [name for name in TINY if name != "swin"]


def one(name: str) -> dict[str, Tensor]:
    return {key: value[:1] for key, value in batch(name).items()}


def words(count: int = 90) -> Any:
    """A tokenizer of the words w0, w1, ..., and [MASK]."""
    known = {f"w{i}": i for i in range(count)} | {"[MASK]": count, "[UNK]": count + 1}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", unk_token="[UNK]")


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ONE)
def test_every_family_shows_what_its_eager_maps_show(name: str, impl: str) -> None:
    if impl == "sdpa" and name in EAGER_ONLY:
        pytest.skip("PyTorch's fused attention does not serve it")
    inputs = one(name)
    maps = eager_maps(spread(tiny.build(name, impl="eager")), inputs)
    model = spread(tiny.build(name, impl=impl))
    with torch.no_grad():
        want = model(**inputs)
    view = look(model, inputs)
    called = {f"{own}{AGAIN}{i}" if i else own: one for own, calls in maps.items() for i, one in enumerate(calls)}
    assert set(view.sites) == set(called)
    for own, weights_BHTS in called.items():
        site = view.sites[own]
        T, S = weights_BHTS.shape[2:]
        torch.testing.assert_close(site.first_HT, weights_BHTS[0, :, :, 0], atol=1e-5, rtol=0)
        rows = torch.stack([site.weights(token) for token in range(T)], 1)
        torch.testing.assert_close(rows, weights_BHTS[0], atol=1e-5, rtol=0)
        assert (len(view.tokens[site.queries]), len(view.tokens[site.keys])) == (T, S)
        assert site.gate is site.gate_HT is None
    if view.predicted is not None:
        place = view.predicted.token
        torch.testing.assert_close(view.predicted.log_V, want.logits[0, place].log_softmax(-1))
    causal = TINY[name].model.endswith(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel", "DecoderModel")
    )
    assert (view.predicted is not None) == causal  # a masked language model was given no mask


@pytest.mark.parametrize("name", ONE)
def test_what_a_head_adds_is_its_part_of_the_out_projection(name: str) -> None:
    model, inputs, read_by = spread(tiny.build(name)), one(name), {}
    hooks = []
    for own, row in attention_modules(model).items():
        keep = read_by.setdefault(own, [])
        hooks.append(out_of(model, row).register_forward_pre_hook(lambda _, args, keep=keep: keep.append(args[0][0])))
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    view = look(model, inputs)
    for own, row in attention_modules(model).items():
        out, (H, E) = out_of(model, row), width_of(row)
        weight_DI = out.weight.T if hasattr(out, "nx") else out.weight
        for number, x_TI in enumerate(read_by[own]):
            parts_HTD = torch.einsum("the,dhe->htd", x_TI.unflatten(-1, (H, E)), weight_DI.unflatten(-1, (H, E)))
            site = view.sites[f"{own}{AGAIN}{number}" if number else own]
            torch.testing.assert_close(site.added_HT, parts_HTD.norm(dim=-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "groups"),
    [("output:headwise", 4), ("output:elementwise", 4), ("output:shared", 1), ("value:elementwise", 2), ("query:headwise", 4),
     ("key:headwise", 2), ("dense:elementwise", 1), ("output:headwise,source=lse,sink_key,bias=1", 4),
     ("output:headwise,source=query", 4)],
)  # fmt: skip
def test_attached_gates_are_shown_for_each_head(spec: str, groups: int) -> None:
    model, inputs = wake(attach(spread(tiny.build("llama")), spec), std=1.0), one("llama")
    with torch.no_grad(), capture(model, chosen=Chosen(shown=9)) as seen:
        want = model(**inputs).logits
    view = look(model, inputs)
    assert torch.equal(view.predicted.log_V, want[0, -1].log_softmax(-1))
    for own, site in view.sites.items():
        values_GT = seen.gate_values[f"{own}.attn_gate"]
        assert len(values_GT) == groups
        torch.testing.assert_close(site.gate_HT, values_GT.repeat_interleave(4 // groups, 0))
        assert site.gate == seen.specs[f"{own}.attn_gate"]
        assert len({tuple(row) for row in site.gate_HT.tolist()}) == groups


def test_a_constant_gate_and_a_pairwise_one() -> None:
    view = look(wake(attach(spread(tiny.build("llama")), "output:headwise,source=constant")), one("llama"))
    for site in view.sites.values():
        assert site.gate_HT.shape == (4, 9)
        assert (site.gate_HT == site.gate_HT[:, :1]).all()
    view = look(attach(spread(tiny.build("llama")), "weights:pairwise"), one("llama"))
    assert all(site.gate.startswith("weights:pairwise") and site.gate_HT is None for site in view.sites.values())


def test_a_gate_over_the_out_projection_is_part_of_what_heads_add() -> None:
    inputs = one("llama")
    bare = look(spread(tiny.build("llama")), inputs)
    shut = attach(spread(tiny.build("llama")), "dense:headwise,source=constant")
    for module in shut.modules():
        if hasattr(module, "attn_gate"):
            module.attn_gate.bias.data.fill_(0.0)
    name = "model.layers.0.self_attn"
    torch.testing.assert_close(look(shut, inputs).sites[name].added_HT, bare.sites[name].added_HT / 2)


@pytest.mark.parametrize("name", [name for name in NATIVE if name not in SPARSE])
def test_gates_that_a_model_was_born_with(name: str) -> None:
    model = test_native.build(name)
    inputs = {"input_ids": torch.arange(9)[None] + 3}
    with torch.no_grad(), capture(model, chosen=Chosen(shown=9)) as seen:
        model(**inputs)
    view = look(model, inputs)
    assert list(view.sites) == list(seen.attention)
    for values_HT in seen.gate_values.values():
        assert any(torch.allclose(values_HT, site.gate_HT) for site in view.sites.values())
    assert all(site.gate is not None for site in view.sites.values())


def test_shut_heads_add_nothing_and_the_rest_sees_it() -> None:
    model, inputs = native("lfm3"), one("llama")
    name = next(iter(attention_modules(model)))
    before = look(model, inputs)
    with scaled(model, {(name, 1): 0.0, (name, 2): 2.0}):
        after = look(model, inputs)
    added = after.sites[name].added_HT
    assert not added[1].any()
    torch.testing.assert_close(added[2], 2 * before.sites[name].added_HT[2])
    assert torch.equal(added[0], before.sites[name].added_HT[0])
    rows, moved = shift(before.predicted, after.predicted)
    assert moved > 0
    assert len(rows) == 10
    assert [max(row.before, row.after) for row in rows] == sorted((max(r.before, r.after) for r in rows), reverse=True)


def test_kl_divergence_by_hand() -> None:
    before = Prediction("next", 0, torch.tensor([0.5, 0.5, 0.0]).log())
    after = Prediction("next", 0, torch.tensor([0.25, 0.75, 0.0]).log())
    rows, moved = shift(before, after, k=2)
    assert moved == pytest.approx(0.143841, abs=1e-5)  # 0.5 ln 2 + 0.5 ln(2/3)
    assert [(row.id, row.before, row.after) for row in rows] == [(1, 0.5, 0.75), (0, 0.5, 0.25)]
    assert shift(before, before)[1] == 0


def test_texts_become_inputs() -> None:
    tokens = words()
    model = spread(tiny.build("llama"))
    inputs = read(model, tokens, "w3 w5 w3")
    view = look(model, inputs, tokens)
    assert view.tokens == {"text": ("w3", "w5", "w3")}
    assert (view.predicted.kind, view.predicted.token) == ("next", 2)
    with pytest.raises(RecipeError, match="the text has no tokens"):
        read(model, tokens, " ")
    with pytest.raises(RecipeError, match="65 tokens, and at most 64 are shown"):
        read(model, tokens, "w1 " * 65)
    long = tiny.build("llama", max_position_embeddings=4096)
    with pytest.raises(RecipeError, match=f"at most {LIMIT}"):
        read(long, tokens, "w1 " * 2000)


def test_a_masked_language_model_predicts_at_its_first_mask() -> None:
    model, tokens = spread(tiny.build("bert")), words()
    view = look(model, read(model, tokens, "w3 [MASK] w5 [MASK]"), tokens)
    assert (view.predicted.kind, view.predicted.token) == ("mask", 1)
    assert look(model, read(model, tokens, "w3 w5"), tokens).predicted is None


def test_behind_an_encoder_each_side_has_its_tokens() -> None:
    model, tokens = spread(tiny.build("t5")), words()
    view = look(model, read(model, tokens, "w3 w5 w7", "w9 w11"), tokens)
    assert view.tokens == {"text": ("w3", "w5", "w7"), "target": ("w0", "w9", "w11")}
    sides = {(site.kind, site.queries, site.keys) for site in view.sites.values()}
    assert sides == {("self", "text", "text"), ("self", "target", "target"), ("cross", "target", "text")}
    assert view.predicted.token == 2


def test_the_model_is_as_before_afterwards_and_its_mode_too() -> None:
    model = attach(spread(tiny.build("llama")), "output:headwise").train()
    classes = {module: type(module) for module in model.modules()}
    kept = {module: set(module.__dict__) for module in model.modules()}
    look(model, one("llama"))
    with pytest.raises(IndexError):
        look(model, {"input_ids": torch.full((1, 3), 97)})
    assert model.training
    for module in model.modules():
        assert type(module) is classes[module]
        assert set(module.__dict__) == kept[module]
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="reads 16 rows where one"):
        look(spread(tiny.build("swin")), one("swin"))
    with pytest.raises(UnsupportedError, match="reads 2 rows"):
        look(spread(tiny.build("llama")), batch("llama"))


def test_compiled_and_in_bfloat16() -> None:
    model, inputs = spread(tiny.build("llama")).to(torch.bfloat16), one("llama")
    want = look(model, inputs)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(**inputs)
    with scaled(compiled, {("model.layers.1.self_attn", 0): 0.0}):
        changed = look(compiled, inputs)
    again = look(compiled, inputs)
    assert torch.equal(again.predicted.log_V, want.predicted.log_V)
    assert not torch.equal(changed.predicted.log_V, want.predicted.log_V)
