"""`diagnose`: a record of what was seen, whose numbers are those of the maps, with every definition beside it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from gated_attn import attach, samples
from gated_attn.errors import RecipeError, RecordError
from gated_attn.hf.attach import gates
from gated_attn.measure.diagnose import DEAD, diagnose
from gated_attn.measure.images import patch_labels
from gated_attn.measure.memory import PeakMemory
from gated_attn.measure.statistics import effective_rank, gram, kurtosis, massive, token_entropy, token_norm_ratio
from gated_attn.measure.texts import CLASSES, classifier, python_help, text_batches
from gated_attn.records import Diagnosis, diff
from tests.hf import tiny
from tests.hf.tiny import TINY, spread, wake

IDS = torch.randint(3, 90, (3, 17), generator=torch.Generator().manual_seed(3))
BATCHES = [{"input_ids": IDS[:2]}, {"input_ids": IDS[2:], "attention_mask": (torch.arange(17) < 11).long()[None]}]
OPTIONS: dict[str, Any] = {"sink_tokens": 9, "text": "random", "name": "tiny"}


def llama(spec: str | None = None) -> Any:
    model = spread(tiny.build("llama"))
    return model if spec is None else wake(attach(model, spec), std=1.0)


def test_numbers_are_those_of_the_maps_and_the_model_stays_as_it_was() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    made = diagnose(model, BATCHES, **OPTIONS)
    assert [module.training for module in model.modules()] == modes
    eager = spread(tiny.build("llama", impl="eager"))
    with torch.no_grad():
        outs = [eager(**batch, output_attentions=True, output_hidden_states=True) for batch in BATCHES]
    rows = [(0, 0, 17), (0, 1, 17), (1, 0, 11)]
    for layer, module in enumerate(made.attention):
        maps = [outs[b].attentions[layer][r, :, :n, :n] for b, r, n in rows]
        shares = torch.cat([a[:, 1:, 0] for a in maps], 1).mean(1)
        sinks = torch.stack([(a[:, :9, 0].mean(1) > 0.3).double() for a in maps]).mean(0)
        for head in module.heads:
            assert head.first_token_share == pytest.approx(float(shares[head.head]), abs=1e-5)
            assert head.sink_rate == pytest.approx(float(sinks[head.head]))
        assert module.queries == 45
    assert (made.tokens, made.sequences, made.shortest, made.longest) == (45, 3, 11, 17)
    assert made.first_token_share == pytest.approx(
        sum(h.first_token_share or 0 for m in made.attention for h in m.heads) / 8
    )
    streams = [torch.cat([outs[b].hidden_states[1][r, :n] for b, r, n in rows])]
    assert made.streams[0].max_abs == pytest.approx(float(streams[0].abs().max()))
    assert made.gate_mean is None
    assert made.plain_seconds is not None
    assert made.peak_extra_bytes is None or made.peak_extra_bytes >= 0


def test_it_is_a_record_that_prints_within_a_terminal() -> None:
    made = diagnose(llama("output:headwise"), BATCHES, **OPTIONS)
    again = Diagnosis.from_json(made.to_json())
    assert again == made
    shown = str(made)
    assert max(map(len, shown.splitlines())) <= 80
    assert "first" in shown
    assert f"{made.gate_mean:.3f}"[:4] in shown
    rows = made.rows()
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(row["gate_mean"] is not None and row["max_abs"] > 0 for row in rows)


def test_every_number_has_its_definition_with_t_queries_and_tokens() -> None:
    made = diagnose(llama("output:headwise"), BATCHES, **OPTIONS, queries=(2, 12))
    told = made.definitions
    numbers = {*made.summary(), *(key for row in made.rows() for key in row)} - {
        "name", "layer", "kind", "strongest_position", "strongest_token", "dead_heads"
    }  # fmt: skip
    assert not numbers - {*told}, numbers - {*told}
    assert "T = 9" in told["sink_rate"]
    assert "queries at positions 2 to 11 of 3 sequences" in told["first_token_share"]
    assert "random, sha256 " in made.text
    other = diagnose(llama("output:headwise"), [{"input_ids": IDS[:1]}], **OPTIONS)
    assert other.text != made.text, "another text has another hash"


def test_before_and_after_are_paired_and_unlike_things_are_not() -> None:
    before = diagnose(llama(), BATCHES, **OPTIONS)
    after = diagnose(llama("output:headwise"), BATCHES, **OPTIONS)
    change = diff(before, after)
    by_name = {one.name: one for one in change.changes}
    assert by_name["first_token_share"].difference == pytest.approx(after.first_token_share - before.first_token_share)  # type: ignore[operator]
    assert by_name["gate_mean"].before is None
    assert by_name["gate_mean"].difference is None
    assert len(change.heads) == 8
    assert "lower in" in str(change)
    with pytest.raises(RecordError, match="do not compare: text is"):
        diff(before, diagnose(llama(), BATCHES[:1], **OPTIONS))
    with pytest.raises(RecordError, match="do not compare: sink_tokens is '9' before and '8' after"):
        diff(before, diagnose(llama(), BATCHES, **{**OPTIONS, "sink_tokens": 8}))


def test_only_the_same_layers_and_heads_are_compared() -> None:
    before = diagnose(llama(), BATCHES, **OPTIONS, layers=[0])
    with pytest.raises(RecordError, match=r"head 0 of model\.layers\.0\.self_attn is in one of them only"):
        diff(before, diagnose(llama(), BATCHES, **OPTIONS, layers=[1]))
    with pytest.raises(RecordError, match="in one of them only"):
        diff(before, diagnose(llama(), BATCHES, **OPTIONS, layers=[0], heads=[1]))


def test_layers_that_share_a_module_have_rows_of_their_own() -> None:
    model = wake(attach(spread(tiny.build("albert")), "output:headwise"), std=1.0)
    made = diagnose(model, BATCHES, **OPTIONS)
    rows = made.rows()
    assert [row["max_abs"] for row in rows] == [stream.max_abs for stream in made.streams]
    assert rows[0]["max_abs"] != rows[1]["max_abs"]
    assert [row["gate_mean"] for row in rows] == [pytest.approx(sum(gate.mean) / 4) for gate in made.gates]


def test_chosen_queries_do_not_stand_for_the_first_tokens() -> None:
    made = diagnose(llama("output:headwise"), BATCHES, **OPTIONS, queries=(4, 9))
    assert made.view is None
    assert (made.tokens, made.attention[0].queries) == (45, 15)
    with pytest.raises(RecipeError, match="no sequence has queries at positions 90 and on"):
        diagnose(llama(), BATCHES, **OPTIONS, queries=(90, 99))


def test_a_first_batch_of_padding_alone_is_passed_over() -> None:
    empty = {"input_ids": IDS[:1], "attention_mask": torch.zeros(1, 17, dtype=torch.long)}
    made = diagnose(llama(), [empty, *BATCHES], **OPTIONS)
    assert (made.tokens, made.sequences) == (45, 3)
    with pytest.raises(RecipeError, match="hold no real tokens"):
        diagnose(llama(), [empty], **OPTIONS)


def test_a_shut_head_is_dead() -> None:
    model = attach(llama(), "output:headwise")
    first = gates(model)["model.layers.0.self_attn.attn_gate"]
    first.proj.weight.data[2] = 0
    first.proj.weight.data[1] = -1000 * first.proj.weight.data[1].sign()
    model.model.layers[0].self_attn.v_proj.weight.data[10:] = 0
    made = diagnose(model, BATCHES, **OPTIONS)
    assert [head.dead for head in made.attention[0].heads] == [False, False, True, True]
    assert not any(head.dead for head in made.attention[1].heads)
    assert made.rows()[0]["dead_heads"] == 2
    alone = diagnose(model, BATCHES, **OPTIONS, heads=[3, 0])
    assert [(head.head, head.dead) for head in alone.attention[0].heads] == [(3, True), (0, False)]
    assert DEAD == 0.01


@pytest.mark.parametrize("name", TINY)
def test_every_family_is_diagnosed(name: str) -> None:
    from gated_attn.hf.inputs import example_inputs

    model = spread(tiny.build(name))
    made = diagnose(model, [example_inputs(model)], shown=4)
    assert made.attention
    assert made.streams
    assert Diagnosis.from_json(made.to_json()) == made
    assert {m.kind for m in made.attention} <= {"self", "cross"}
    if name == "albert":  # one module, called once for each layer
        assert [m.layer for m in made.attention] == [0, 1]
        assert [s.layer for s in made.streams] == [0, 1]


def test_nothing_to_read_is_said() -> None:
    with pytest.raises(RecipeError, match="nothing to read"):
        diagnose(llama(), [])


# Statistics by hand


def test_effective_rank_is_that_of_the_singular_values() -> None:
    x_THE = torch.randn(23, 3, 5, generator=torch.Generator().manual_seed(1))
    x_THE[:, 1] = x_THE[:, 1, :1]  # all channels alike: rank 1
    x_THE[:, 2] = 0
    sigma = torch.linalg.svdvals(x_THE[:, 0].double())
    p = sigma / sigma.sum()
    got = effective_rank(gram(x_THE[:9]) + gram(x_THE[9:]))
    assert got.tolist() == pytest.approx([float((-(p * p.log()).sum()).exp()), 1.0, 0.0], abs=1e-5)
    assert float(effective_rank(gram(torch.eye(5)[:, None]))) == pytest.approx(5.0)


def test_outliers_by_hand() -> None:
    x_TD = torch.full((4, 50), 0.1)
    x_TD[2, 7], x_TD[3, 1], x_TD[0, 0] = 150.0, -99.0, 101.0
    assert massive(x_TD) == 2
    x_TD.mul_(10)
    assert massive(x_TD) == 2, "1000 times the median is 1000 now, and 990 is below it"
    ratio, at = token_norm_ratio(torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 2.0]]))
    assert (ratio, at) == (2.5, 0)
    made = torch.Generator().manual_seed(2)
    assert kurtosis(torch.randn(1000, 100, generator=made)) == pytest.approx(3.0, abs=0.1)
    assert kurtosis(torch.tensor([[-1.0, 1.0, -1.0, 1.0]])) == pytest.approx(1 / ((4 / 3) ** 2 + 1e-6))


def test_gate_entropy_over_tokens_by_hand() -> None:
    g = torch.tensor([[0.5, 0.5, 0.5, 0.5], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    got = token_entropy(g.sum(1), torch.xlogy(g, g).sum(1), 4)
    assert got.tolist() == pytest.approx([1.0, 0.0])
    assert token_entropy(g.sum(1), g.sum(1), 1).isnan().all()


# Texts, images, memory


def test_patches_have_names_on_any_grid() -> None:
    model = tiny.build("dinov2")
    assert patch_labels(model, torch.zeros(1, 3, 8, 12)) == [
        "[CLS]", "(0, 0)", "(0, 1)", "(0, 2)", "(1, 0)", "(1, 1)", "(1, 2)",
    ]  # fmt: skip
    pixels = torch.randn(2, 3, 8, 12)
    made = diagnose(spread(model), [{"pixel_values": pixels}], labels=patch_labels(model, pixels), shown=5)
    assert made.view is not None
    assert made.view.tokens == ("[CLS]", "(0, 0)", "(0, 1)", "(0, 2)", "(1, 0)")
    head = made.attention[0].heads[0]
    assert head.strongest_token == patch_labels(model, pixels)[head.strongest_position]  # type: ignore[index]
    assert patch_labels(tiny.build("swin"), pixels) is None


@pytest.fixture
def words() -> Any:
    if samples.cached()["minilm"] is None:
        pytest.skip("sample minilm is not cached: run python -m gated_attn.samples fetch minilm")
    from gated_attn.hf.pretrained import tokenizer

    return tokenizer("minilm")


def test_texts_become_whole_sequences_with_special_tokens(words: Any) -> None:
    batches = list(text_batches(words, python_help(), tokens=100, length=20, rows=2))
    assert [tuple(b["input_ids"].shape) for b in batches] == [(2, 20), (2, 20), (1, 20)]
    ids = torch.cat([b["input_ids"] for b in batches])
    assert set(ids[:, 0].tolist()) == {words.cls_token_id}
    assert set(ids[:, -1].tolist()) == {words.sep_token_id}
    assert (
        ids[:, 1:-1].flatten().tolist() == words(python_help(), add_special_tokens=False, verbose=False).input_ids[:90]
    )
    with pytest.raises(RecipeError, match="do not fill one sequence of 50"):
        list(text_batches(words, "short", tokens=100, length=50))


def test_tokens_are_of_one_kind_and_new_or_repeated(words: Any) -> None:
    ids = torch.tensor([words("The gate, the gate: 12 unbelievabilities!")["input_ids"]])
    classes_LC = classifier(words)(ids)[0]
    assert (classes_LC[:, :6].sum(-1) == 1).all()
    assert (classes_LC[:, 6:].sum(-1) == 1).all()
    told = [
        (word, *[CLASSES[i] for i in row.nonzero()[:, 0]])
        for word, row in zip(words.convert_ids_to_tokens(ids[0].tolist()), classes_LC, strict=True)
    ]
    assert told[:6] == [
        ("[CLS]", "special", "first occurrence"), ("the", "word start", "first occurrence"),
        ("gate", "word start", "first occurrence"), (",", "punctuation", "first occurrence"), ("the", "word start", "repeated"),
        ("gate", "word start", "repeated"),
    ]  # fmt: skip
    assert ("12", "number", "first occurrence") in told
    assert any(kind == "word piece" for _, kind, _ in told)


def test_gates_by_class_are_means_over_its_tokens(words: Any) -> None:
    model = tiny.build("bert", vocab_size=len(words))
    model = wake(attach(spread(model), "output:elementwise"), std=1.0)
    batch = dict(words(["The gate, the gate.", "12, 12: one more gate?"], return_tensors="pt", padding=True))
    seen: list[Tensor] = []
    gate = next(iter(gates(model).values()))
    handle = gate.register_forward_hook(lambda _, args, out: seen.append(out))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    made = diagnose(model, [batch], tokenizer=words)
    classes_BLC = classifier(words)(batch["input_ids"])
    real_BL = batch["attention_mask"].bool()
    for i, name in enumerate(CLASSES):
        here_BL = classes_BLC[..., i] & real_BL
        if here_BL.any():
            assert made.gates[0].by_class[name] == pytest.approx(float(seen[0][here_BL].mean()), abs=1e-6)
        else:
            assert name not in made.gates[0].by_class
    assert made.view is not None
    assert made.view.gates is not None
    assert made.view.tokens[:3] == ("[CLS]", "the", "gate")


def test_peak_memory_sees_what_was_held_for_a_moment() -> None:
    peak = PeakMemory()
    if not peak.known:
        pytest.skip("this system does not tell a process's memory")
    with peak:
        held = torch.ones(64 << 20, dtype=torch.uint8)
        copy.copy(held.sum())
        del held
    assert peak.bytes > 32 << 20
    before = peak.bytes
    with peak:
        json.dumps([])
    assert peak.bytes == before
