"""What `capture` sees against the eager maps of the same models, over every family; nothing it does changes an output."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from gated_attn import attach
from gated_attn.errors import SpecError, UnsupportedError
from gated_attn.hf.attach import gates
from gated_attn.measure.capture import AGAIN, Capture, Chosen, attention_modules, capture
from gated_attn.measure.streaming import Span, summarize_weights
from gated_attn.measure.totals import AttentionTotals
from tests.hf import tiny
from tests.hf.tiny import TINY, spread, wake

EAGER_ONLY = ("gemma2", "gpt_oss")
IMAGES = ("vit", "dinov2", "swin")
SHORT = Chosen(sink_tokens=4, sink_eps=0.2)
NUMBERS = ("first", "first_all", "sink", "sink_rate", "strongest", "entropy")


def batch(name: str, padded: str = "") -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (2, 9), generator=made)
    if name in IMAGES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=made)}
    if name == "clip":
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16, generator=made)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 30, generator=made), "decoder_input_ids": ids}
    if name == "wav2vec2":
        return {"input_values": torch.randn(2, 400, generator=made)}
    mask = torch.ones(2, 9, dtype=torch.long)
    if padded:
        mask[1, slice(0, 4) if padded == "left" else slice(5, 9)] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    return found | ({"decoder_input_ids": ids[:, :5]} if name in ("t5", "bart", "marian", "gpt2 cross") else {})


def eager_maps(model: Any, inputs: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Weights (B, H, T, S) of every call, from a model that is set to eager."""
    found: dict[str, list[Tensor]] = {name: [] for name in attention_modules(model)}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            maps = [one for one in out if isinstance(one, Tensor) and one.dim() == 4]
            found[name].append(maps[-1])

        return hook

    handles = [row.module.register_forward_hook(look(name)) for name, row in attention_modules(model).items()]
    with torch.no_grad():
        model(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    return found


def near(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    assert (got is None) == (want is None)
    if got is not None:
        assert got == pytest.approx(want, abs=tolerance, nan_ok=True)


def expected(weights_BHTS: Tensor, spans: list[Span]) -> AttentionTotals:
    totals = AttentionTotals(weights_BHTS.shape[1], 1, sink_tokens=SHORT.sink_tokens, sink_eps=SHORT.sink_eps)
    for span, summary in zip(spans, summarize_weights(weights_BHTS, spans), strict=True):
        totals.add(summary, torch.zeros(span.stop - span.start, totals.heads, 1), None, torch.zeros(()))
    return totals


def spans_of(seen: Capture, name: str, weights: Tensor, inputs: dict[str, Tensor]) -> list[Span]:
    """By hand: rows without their padding."""
    B, _, T, S = weights.shape
    mask = inputs.get("attention_mask", torch.ones(B, S, dtype=torch.long))
    row = seen.row_of(name)
    decoder = "decoder" in name.split(".") and "decoder_input_ids" in inputs
    spans = []
    for b in range(B):
        real = mask[b].nonzero()[:, 0].tolist() if mask.shape == (B, S) else list(range(S))
        keys = (0, S) if decoder and row.kind == "self" else (real[0], real[-1] + 1)
        queries = (0, T) if decoder else keys
        spans.append(Span(b, *queries, *keys))
    return spans


@pytest.mark.parametrize("padded", ["", "left", "right"])
@pytest.mark.parametrize("impl", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TINY)
def test_every_family_shows_what_its_eager_maps_show(name: str, impl: str, padded: str) -> None:
    if padded and ("attention_mask" not in batch(name) or (padded == "left" and name in ("opt",))):
        pytest.skip("it takes no padding")
    if impl == "sdpa" and name in EAGER_ONLY:
        pytest.skip("PyTorch's fused attention does not serve it")
    inputs = batch(name, padded)
    maps = eager_maps(spread(tiny.build(name, impl="eager")), inputs)
    model = spread(tiny.build(name, impl=impl))
    with torch.no_grad():
        want = model(**inputs)
        with capture(model, chosen=SHORT) as seen:
            got = model(**inputs)
    assert all(torch.equal(a, b) for a, b in zip(got.to_tuple(), want.to_tuple(), strict=True) if isinstance(a, Tensor))
    called = {
        f"{own}{AGAIN}{i}" if i else own: weights for own, calls in maps.items() for i, weights in enumerate(calls)
    }
    assert set(seen.attention) == set(called)
    for own, weights in called.items():
        totals, truth = seen.attention[own], expected(weights, spans_of(seen, own, weights, inputs))
        for number in NUMBERS:
            near(getattr(totals, number).value(totals.heads), getattr(truth, number).value(totals.heads))
        assert totals.queries == truth.queries


def test_the_model_is_as_before_afterwards() -> None:
    model = attach(spread(tiny.build("llama")), "output:headwise")
    classes = {module: type(module) for module in model.modules()}
    kept = {module: dict(module.__dict__) for module in model.modules()}
    with pytest.raises(IndexError), capture(model):
        model(torch.full((1, 3), 97))
    assert {module: type(module) for module in model.modules()} == classes
    for module in model.modules():
        assert module.__dict__.keys() == kept[module].keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def native(name: str) -> Any:
    """A tiny model with gates of its own in every layer."""
    settings = tiny.WIDE | {"layer_types": ["full_attention"] * 2}
    config = {"qwen3_5": "Qwen3_5TextConfig", "lfm3": "Lfm3Config", "laguna": "LagunaConfig", "afmoe": "AfmoeConfig"}[
        name
    ]
    settings |= {"pad_token_id": 0} | ({"gating": "per-head"} if name == "laguna" else {})
    if name == "afmoe":
        settings |= {"num_dense_layers": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    model = config.replace("TextConfig", "Config").removesuffix("Config") + "ForCausalLM"
    torch.manual_seed(7)
    return spread(getattr(hf, model)(getattr(hf, config)(**settings)).eval())


def outputs_read(model: Any, inputs: dict[str, Tensor], out: str = "o_proj") -> list[Tensor]:
    """What each layer's out projection reads, (B, T, H * E)."""
    found: list[Tensor] = []
    layers = [layer.self_attn for layer in model.model.layers]
    hooks = [getattr(one, out).register_forward_pre_hook(lambda _, args: found.append(args[0])) for one in layers]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["qwen3_5", "lfm3", "laguna", "afmoe"])
def test_gates_that_a_model_was_born_with_are_seen(name: str) -> None:
    model, inputs = native(name), batch("llama", "right")
    with torch.no_grad():
        want = model(**inputs).logits
        with capture(model) as seen:
            assert torch.equal(model(**inputs).logits, want)
    assert set(seen.gates) == set(gates(model))
    assert set(seen.attention) == {f"model.layers.{i}.self_attn" for i in range(2)}
    read = outputs_read(model, inputs)
    for totals, x_BTD in zip(seen.attention.values(), read, strict=True):
        real_THE = torch.cat([x_BTD[0], x_BTD[1, :5]]).unflatten(-1, (4, -1))
        near(totals.norm.value(4), real_THE.norm(dim=-1).mean(0).tolist())
    for totals in seen.gates.values():
        assert totals.tokens == 14
        assert float((totals.counts_HN > 0).sum()) > 8


@pytest.mark.parametrize(
    "spec",
    ["output:headwise", "output:elementwise", "value:elementwise", "key:headwise", "query:headwise,source=query",
     "dense:elementwise", "output:headwise,source=lse,bias=1", "output:headwise,source=lse,sink_key,bias=1",
     "output:shared", "output:headwise,fill"],
)  # fmt: skip
def test_attached_gates_are_seen_as_they_are_applied(spec: str) -> None:
    inputs = batch("llama", "left")
    model = wake(attach(spread(tiny.build("llama")), spec), std=1.0)
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        want = model(**inputs).logits
        with capture(model) as seen:
            assert torch.equal(model(**inputs).logits, want)
    assert set(seen.gates) == set(gates(model))
    if (
        "lse" in spec
    ):  # known inside attention only: what the out projection reads, over what it would read without the gate
        gated = outputs_read(model, inputs)[0].unflatten(-1, (4, -1))
        first = gates(model)["model.layers.0.self_attn.attn_gate"]
        first.bias.data.fill_(-1e4)
        first.spec  # noqa: B018 - the gate stays attached, and open
        bare = outputs_read(model, inputs)[0].unflatten(-1, (4, -1))
        g_BTH = (gated * bare).sum(-1) / bare.square().sum(-1)
        values["model.layers.0.self_attn.attn_gate"] = g_BTH[..., None]
    else:
        for name, gate in gates(model).items():
            gate.register_forward_hook(lambda _, args, out, name=name: values.update({name: out}))
        with torch.no_grad():
            model(**inputs)
    for name, g in values.items():
        real = torch.cat([g[0], g[1, 4:]]).double()
        totals = seen.gates[name]
        near((totals.total_H / totals.values).tolist(), real.mean((0, 2)).tolist())
        assert totals.tokens == 14
        near(
            totals.medians(),
            real.transpose(0, 1).flatten(1).sort(-1)[0][:, (real[:, 0].numel() - 1) // 2].tolist(),
            1e-3,
        )


def test_weights_are_those_before_the_gate_and_outputs_those_after() -> None:
    inputs = batch("llama")
    plain = spread(tiny.build("llama"))
    with torch.no_grad(), capture(plain, layers=[0]) as bare:
        plain(**inputs)
    gated = attach(plain, "output:headwise:sigmoid,source=constant,bias=-2")
    with torch.no_grad(), capture(gated, layers=[0]) as seen:
        gated(**inputs)
    (a,), (b,) = bare.attention.values(), seen.attention.values()
    near(b.first.value(4), a.first.value(4))
    near(b.norm.value(4), [x * float(torch.tensor(-2.0).sigmoid()) for x in a.norm.value(4)])  # type: ignore[operator]
    near(b.effective_ranks(), a.effective_ranks(), 1e-4)


def test_chosen_layers_heads_and_queries_are_the_same_numbers() -> None:
    model, inputs = spread(tiny.build("llama")), batch("llama", "left")
    maps = eager_maps(spread(tiny.build("llama", impl="eager")), inputs)
    with torch.no_grad(), capture(model, layers=[1], chosen=Chosen(heads=(3, 0), queries=(2, 5))) as seen:
        model(**inputs)
    assert list(seen.attention) == ["model.layers.1.self_attn"]
    totals, weights = seen.attention["model.layers.1.self_attn"], maps["model.layers.1.self_attn"][0]
    rows = torch.cat([weights[0, :, 2:5, 0], weights[1, :, 6:9, 4]], -1)
    near(totals.first.value(2), [float(rows[3].mean()), float(rows[0].mean())])
    assert totals.queries == 6
    with (
        pytest.raises(SpecError, match="layer 2 is not there; this model has layers 0 to 1"),
        capture(model, layers=[2]),
    ):
        pass


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_is_watched_once_and_its_gradients_stay(reentrant: bool | None) -> None:
    """Gradient checkpointing calls every module again in the backward pass."""
    inputs = {**batch("llama"), "labels": batch("llama")["input_ids"]}

    def step(watched: bool) -> tuple[list[Tensor], dict[str, AttentionTotals]]:
        model = wake(attach(spread(tiny.build("llama")), "output:headwise"), std=1.0).train()
        if reentrant is not None:
            with warnings.catch_warnings():  # the name of transformers 5.0, which we support
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if not watched:
            model(**inputs).loss.backward()
            return [p.grad for p in model.parameters()], {}
        with capture(model) as seen:
            model(**inputs).loss.backward()
        assert all(totals.tokens == 18 for totals in (*seen.streams.values(), *seen.gates.values()))
        return [p.grad for p in model.parameters()], seen.attention

    (want, _), (got, attention) = step(False), step(True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert [totals.queries for totals in attention.values()] == [18, 18]


def test_heads_that_are_not_there_and_two_captures_are_refused() -> None:
    model = spread(tiny.build("llama"))
    with (
        pytest.raises(SpecError, match=r"head 4 is not there; model\.layers\.0\.self_attn has heads 0 to 3"),
        torch.no_grad(),
        capture(model, chosen=Chosen(heads=(0, 4))),
    ):
        model(**batch("llama"))
    with capture(model), pytest.raises(SpecError, match="is watched already"), capture(model):
        pass
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"


def test_packed_documents_are_each_their_own() -> None:
    ids = batch("llama")["input_ids"][:1]
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    for impl in ("sdpa", "eager"):
        model = spread(tiny.build("llama", impl=impl))
        with torch.no_grad(), capture(model) as seen:
            model(**packed, use_cache=False)
        with torch.no_grad(), capture(model) as alone:
            model(input_ids=ids[:, :4])
            model(input_ids=ids[:, 4:])
        for a, b in zip(seen.attention.values(), alone.attention.values(), strict=True):
            for number in ("first", "first_all", "strongest", "entropy", "norm"):
                near(getattr(a, number).value(4), getattr(b, number).value(4))
            assert a.sequences == b.sequences == 2


def test_a_model_that_looks_across_packed_documents_is_told_so() -> None:
    packed = {"input_ids": batch("llama")["input_ids"][:1], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    model = spread(tiny.build("llama"))
    with pytest.raises(UnsupportedError, match="token 4 of row 0 begins a sequence"), torch.no_grad(), capture(model):
        model(**packed, use_cache=True)


@pytest.mark.parametrize("padded", ["left", ""])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generating_is_the_same_as_reading_it_all(cache: str, padded: str) -> None:
    model = spread(tiny.build("llama"))
    inputs = batch("llama", padded)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    with torch.no_grad():
        want = model.generate(**inputs, **options)
        given = inputs if padded else {"input_ids": inputs["input_ids"]}  # without padding there may be no mask
        with capture(model) as seen:
            got = model.generate(**given, **options)
    assert torch.equal(got, want)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
    with torch.no_grad(), capture(model) as whole:
        model(input_ids=got[:, :-1], attention_mask=mask)
    for a, b in zip(seen.attention.values(), whole.attention.values(), strict=True):
        assert a.queries == b.queries
        assert a.sequences == b.sequences == 2
        for number in ("first", "first_all", "entropy", "norm"):
            near(getattr(a, number).value(4), getattr(b, number).value(4))


@pytest.mark.parametrize("padded", ["", "right"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_generating_in_a_decoder_is_the_same_as_reading_it_all(name: str, padded: str) -> None:
    """`generate` calls the encoder by itself, and the model without its tokens."""
    model = spread(tiny.build(name))
    inputs = {key: value for key, value in batch(name, padded).items() if "decoder" not in key}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    turned = {key: value.flip(0) for key, value in inputs.items()}
    with torch.no_grad(), capture(model) as seen:
        got = [model.generate(**one, **options) for one in (inputs, turned)]
    with torch.no_grad(), capture(model) as whole:
        for one, ids in zip((inputs, turned), got, strict=True):
            model(**one, decoder_input_ids=ids[:, :-1])
    same_numbers(seen, whole)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_loses_sight_of_the_first_token_and_not_of_the_sequence(name: str) -> None:
    model, inputs = spread(tiny.build(name)), batch(name, "left")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad(), capture(model) as seen:
        got = model.generate(**inputs, **options)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
    with torch.no_grad(), capture(model) as whole:
        model(input_ids=got[:, :-1], attention_mask=mask)
    same_numbers(seen, whole)
    assert all(totals.sequences == 2 for totals in seen.attention.values())


def same_numbers(seen: Capture, whole: Capture) -> None:
    assert seen.attention.keys() == whole.attention.keys()
    for own, b in whole.attention.items():
        a = seen.attention[own]
        assert (a.queries, a.sequences) == (b.queries, b.sequences), own
        for number in ("first", "first_all", "entropy", "norm", "early"):
            near(getattr(a, number).value(4), getattr(b, number).value(4))
    for own, stream in whole.streams.items():
        assert seen.streams[own].tokens == stream.tokens, own
        near(seen.streams[own].max_abs, stream.max_abs, 1e-4)


def test_a_tower_for_images_does_not_count_by_the_text_s_padding() -> None:
    model = spread(tiny.build("clip"))
    for length in (9, 17, 20):  # the images have 17 places
        inputs = batch("clip") | {"input_ids": torch.arange(3, 3 + 2 * length).view(2, length)}
        inputs["attention_mask"] = torch.ones(2, length, dtype=torch.long)
        inputs["attention_mask"][1, 5:] = 0
        with torch.no_grad(), capture(model) as seen:
            model(**inputs)
        counts = {("vision" in name, totals.queries) for name, totals in seen.attention.items()}
        assert counts == {(True, 34), (False, length + 5)}
        assert {("vision" in name, s.tokens) for name, s in seen.streams.items()} == counts


def test_the_base_model_alone_is_watched_anew_each_time() -> None:
    model, inputs = spread(tiny.build("llama")), batch("llama", "left")
    with torch.no_grad(), capture(model) as seen:
        model.model(**inputs)
        model.model(**inputs)
    assert set(seen.attention) == {f"model.layers.{i}.self_attn" for i in range(2)}
    assert {totals.queries for totals in seen.attention.values()} == {28}


def test_sound_is_counted_by_the_mask_of_its_frames() -> None:
    model = spread(tiny.build("wav2vec2"))
    inputs = batch("wav2vec2") | {"attention_mask": torch.ones(2, 400, dtype=torch.long)}
    inputs["attention_mask"][1, 200:] = 0
    frames = int(model._get_feat_extract_output_lengths(torch.tensor(400)))
    real = frames + int(model._get_feat_extract_output_lengths(torch.tensor(200)))
    with torch.no_grad(), capture(model) as seen:
        model(**inputs)
    assert {totals.queries for totals in seen.attention.values()} == {real} != {2 * frames}
    assert {totals.tokens for totals in seen.streams.values()} == {real}


def test_nan_is_named_where_it_begins() -> None:
    model = spread(tiny.build("llama"))
    model.model.layers[1].mlp.down_proj.weight.data[3, 1] = torch.nan
    told = r"stream behind model\.layers\.1: \d+ of 216 values"
    with pytest.raises(UnsupportedError, match=told), torch.no_grad(), capture(model):
        model(**batch("llama"))
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"


def test_a_watched_model_is_not_copied() -> None:
    model = spread(tiny.build("llama"))
    with capture(model), pytest.raises(SpecError, match="copy or pickle it before or after"):
        copy.deepcopy(model)
    copy.deepcopy(model)(**batch("llama"))


def test_virtual_tokens_are_refused() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(spread(tiny.build("llama")), config)
    with pytest.raises(UnsupportedError, match="virtual tokens in front"), capture(model):
        pass


@pytest.mark.parametrize(
    "wrong",
    [{"heads": ()}, {"heads": (1, 1)}, {"heads": (-1,)}, {"queries": (5, 5)}, {"shown": -1}, {"sink_tokens": 0}],
)
def test_choices_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(wrong))}="):
        Chosen(**wrong)


def test_in_bfloat16_scores_are_those_of_its_queries_and_keys() -> None:
    model, inputs = spread(tiny.build("llama", impl="eager")).bfloat16(), batch("llama")
    maps = eager_maps(model, inputs)
    with torch.no_grad(), capture(model) as seen:
        model(**inputs)
    for name, totals in seen.attention.items():
        share = maps[name][0][:, :, 1:, 0].float().mean((0, 2))
        near(totals.first.value(4), share.tolist(), 2**-7)


@pytest.mark.slow
def test_a_compiled_model_is_watched_uncompiled() -> None:
    model, inputs = spread(tiny.build("llama")), batch("llama")
    with torch.no_grad(), capture(model) as want:
        model(**inputs)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        before = compiled(**inputs).logits
        with capture(compiled) as seen:
            compiled(**inputs)
        assert torch.equal(compiled(**inputs).logits, before)
    for name, totals in seen.attention.items():
        assert totals.first.value(4) == want.attention[name].first.value(4)


def test_a_decoder_that_shifts_its_labels_does_not_count_by_the_encoder_s_padding() -> None:
    model, inputs = spread(tiny.build("t5")), batch("t5", "right")
    labels = inputs.pop("decoder_input_ids").contiguous()
    with torch.no_grad(), capture(model) as seen:
        model(**inputs, labels=labels)
    queries = {name: totals.queries for name, totals in seen.attention.items()}
    assert {count for name, count in queries.items() if name.startswith("decoder")} == {2 * labels.shape[1]}
    assert {count for name, count in queries.items() if name.startswith("encoder")} == {9 + 5}


def test_what_capture_does_not_understand_it_refuses() -> None:
    deberta = hf.DebertaV2Model(
        hf.DebertaV2Config(vocab_size=97, hidden_size=24, num_hidden_layers=1, num_attention_heads=4)
    )
    with pytest.raises(UnsupportedError, match="DeBERTa computes its attention itself"), capture(deberta):
        pass
    model = spread(tiny.build("llama"))
    with pytest.raises(UnsupportedError, match="what temperature=float does"), torch.no_grad(), capture(model):
        model(**batch("llama"), temperature=2.0)


@pytest.mark.parametrize("name", ["llama", "mistral", "t5"])
def test_what_is_one_number_per_sequence_counts_all_of_what_is_generated(name: str) -> None:
    """The strongest key, the early one and the sink need queries that one call after the other brings."""
    torch.manual_seed(0)
    model = spread(tiny.build(name, max_position_embeddings=128) if name != "t5" else tiny.build(name))
    ids = torch.randint(3, 90, (2, 50))
    options = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    with torch.no_grad(), capture(model) as seen:
        got = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    read = {"input_ids": got[:, :-1]} if name != "t5" else {"input_ids": ids, "decoder_input_ids": got[:, :-1]}
    with torch.no_grad(), capture(model) as whole:
        model(**read)
    assert seen.attention.keys() == whole.attention.keys()
    for own, b in whole.attention.items():
        for number in ("sink", "sink_rate", "strongest", "early"):
            near(getattr(seen.attention[own], number).value(4), getattr(b, number).value(4))
        assert [sorted(at for at, _ in heads.elements()) for heads in seen.attention[own].strongest_at] == [
            sorted(at for at, _ in heads.elements()) for heads in b.strongest_at
        ]


@pytest.mark.parametrize("pad", [0, None])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_what_generate_puts_behind_the_end_of_a_row_does_not_count(name: str, pad: int | None) -> None:
    """It is padding, and the mask that `generate` makes says otherwise, since other rows go on."""
    torch.manual_seed(2)
    model, ids = spread(tiny.build(name)), torch.randint(3, 90, (3, 6))
    model.generation_config.pad_token_id = model.config.pad_token_id = None
    own, start = ("input_ids", 6) if name == "llama" else ("decoder_input_ids", 1)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        end = int(model.generate(ids, eos_token_id=None, pad_token_id=0, **options)[0, start + 3])
        with capture(model) as seen:
            got = model.generate(ids, eos_token_id=end, pad_token_id=pad, **options)
        lengths = [row.index(end) + 1 + start if end in row else len(row) + start for row in got[:, start:].tolist()]
        assert min(lengths) < max(lengths) - 1
        with capture(model) as alone:
            for row, length in enumerate(lengths):
                written = {own: got[row : row + 1, : min(length, got.shape[1] - 1)]}
                model(**{"input_ids": ids[row : row + 1]} | written)
    for name, b in alone.attention.items():
        a = seen.attention[name]
        assert (a.queries, a.sequences) == (b.queries, b.sequences), name
        for number in ("first", "entropy", "norm", "strongest"):
            near(getattr(a, number).value(4), getattr(b, number).value(4))
    assert all(seen.streams[name].tokens == b.tokens for name, b in alone.streams.items())


@pytest.mark.parametrize("option", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": True}])
def test_candidates_that_generate_takes_back_are_refused(option: dict[str, Any]) -> None:
    model, ids = spread(tiny.build("llama")), batch("llama")["input_ids"][:1]
    if "assistant_model" in option:
        option = {"assistant_model": tiny.build("llama", num_hidden_layers=1)}
    with pytest.raises(UnsupportedError, match="taken back"), torch.no_grad(), capture(model):
        model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **option)
    assert "generate" not in model.__dict__


def test_a_cache_that_was_cut_is_refused() -> None:
    model, ids = spread(tiny.build("llama")), batch("llama")["input_ids"]
    with torch.no_grad(), capture(model):
        out = model(input_ids=ids, use_cache=True)
        word = "cache" if "cache" in out else "past_key_values"
        model(input_ids=ids[:, :3], **{word: out[word]})
        out[word].crop(-2)
        with pytest.raises(UnsupportedError, match="taken back"):
            model(input_ids=ids[:, -2:], **{word: out[word]})


@pytest.mark.parametrize("padded", ["", "left"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_static_cache_behind_a_window_goes_on_with_the_sequence(name: str, padded: str) -> None:
    """Its masks, Gemma's by kind of layer, tell of the last keys alone."""
    model, inputs = spread(tiny.build(name)), batch(name, padded)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad(), capture(model) as seen:
        got = model.generate(**inputs, cache_implementation="static", **options)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
    with torch.no_grad(), capture(model) as whole:
        model(input_ids=got[:, :-1], attention_mask=mask)
    same_numbers(seen, whole)


def test_of_whole_sequences_nothing_is_kept() -> None:
    """Small tensors that live on between large ones made 8,192 tokens of SmolLM2 take 300 MB more."""
    model, inputs = spread(tiny.build("llama")), batch("llama", "right")
    with torch.no_grad(), capture(model, chosen=SHORT) as seen:
        model(**inputs)
    with torch.no_grad(), capture(model, chosen=dataclasses.replace(SHORT, whole=True)) as whole:
        model(**inputs)
    for own, totals in whole.attention.items():
        assert not totals._unfinished
        assert seen.attention[own]._unfinished
        assert totals.strongest_at == seen.attention[own].strongest_at
        for number in NUMBERS:
            assert getattr(totals, number).value(4) == getattr(seen.attention[own], number).value(4)
