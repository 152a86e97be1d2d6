"""`Decoder`: one answer padded, packed and cached; a loss that counts tokens; and weights where they were put."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from gated_attn.errors import ShapeError, SpecError
from gated_attn.models import Decoder, DecoderConfig
from gated_attn.models.decoder import token_loss

CONFIG = DecoderConfig(vocab_size=29, layers=2, heads=6, kv_heads=3, head_dim=10, dim=23, ffn_dim=31)
GATES = [
    "none",
    "paper",
    "paper-headwise,layers=1",
    "output:headwise,source=query",
    "sink,sink_key,fill",
    "weights:pairwise",
    "key:elementwise",
]


def make(gate: str = "paper", **options: object) -> Decoder:
    torch.manual_seed(7)
    model = Decoder(replace(CONFIG, gate=gate, **options)).double()  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # far from the start, so that attention, gates and logits all matter
            torch.nn.init.normal_(parameter, std=(5 if ".attn_gate." in name else 1) * parameter.shape[-1] ** -0.5)
    return model.eval()


def tokens(batch: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("gate", GATES)
def test_padding_on_either_side_changes_nothing(gate: str) -> None:
    model, ids = make(gate), tokens(1, 7)
    want = model(ids).logits
    junk = tokens(1, 4)
    mask = torch.tensor([[0] * 4 + [1] * 7])
    left = model(torch.cat([junk, ids], 1), attention_mask=mask).logits[:, 4:]
    right = model(torch.cat([ids, junk], 1), attention_mask=mask.flip(1)).logits[:, :7]
    assert (left - want).abs().max() < 1e-11
    assert (right - want).abs().max() < 1e-11


@pytest.mark.parametrize("gate", GATES)
def test_packed_documents_equal_each_alone(gate: str) -> None:
    model, ids = make(gate), tokens(1, 11)
    docs = torch.tensor([[0] * 4 + [1] + [2] * 6])
    alone = torch.cat([model(part).logits for part in ids.split([4, 1, 6], 1)], 1)
    assert (model(ids, doc_ids=docs).logits - alone).abs().max() < 1e-11


@pytest.mark.parametrize("gate", GATES)
def test_chunks_through_the_cache_equal_one_pass(gate: str) -> None:
    model, ids = make(gate), tokens()
    cache, parts = model.new_cache(), []
    for part in ids.split([5, 3, 1, 1, 1], 1):
        output = model(part, cache=cache)
        parts.append(output.logits)
        cache = output.cache
    assert (torch.cat(parts, 1) - model(ids).logits).abs().max() < 1e-11
    mask = torch.tensor([[0, 0, 0] + [1] * 8, [1] * 11])
    whole = model(ids, attention_mask=mask).logits
    first = model(ids[:, :6], attention_mask=mask[:, :6], cache=model.new_cache())
    rest = model(ids[:, 6:], attention_mask=mask, cache=first.cache).logits
    assert (rest - whole[:, 6:]).abs().max() < 1e-11


@pytest.mark.parametrize("gate", GATES)
def test_generation_with_the_cache_is_generation_without(gate: str) -> None:
    model, ids = make(gate), tokens(2, 3)
    got = model.generate(ids, 9)
    want = ids
    for _ in range(9):
        want = torch.cat([want, model(want).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(got, want)
    assert torch.equal(model.generate(ids, 0), ids)


def test_generation_has_no_dropout_and_leaves_the_mode() -> None:
    model, ids = make(dropout=0.5), tokens(2, 3)
    want = model.generate(ids, 9)
    assert torch.equal(model.train().generate(ids, 9), want)
    assert model.training


def test_drawn_generation_follows_its_generator_and_its_temperature() -> None:
    model, ids = make(), tokens(1, 3)

    def draw(seed: int, temperature: float) -> list[int]:
        return model.generate(ids, 20, temperature=temperature, generator=torch.Generator().manual_seed(seed))[
            0
        ].tolist()

    assert draw(1, 1.0) == draw(1, 1.0)
    assert draw(1, 1.0) != draw(2, 1.0)
    assert draw(1, 1e-4) == model.generate(ids, 20)[0].tolist()
    with pytest.raises(ShapeError, match=r"\(1, 0\); generation starts from at least one token"):
        model.generate(ids[:, :0], 3)


@torch.no_grad()
def test_the_loss_is_torchs_and_counts_tokens() -> None:
    model, ids = make(), tokens()
    labels = ids.clone()
    labels[0, 2:] = -100
    output = model(ids, labels=labels)
    want = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert float(output["loss"]) == pytest.approx(float(want))
    total = model(ids, labels=labels, num_items_in_batch=1).loss
    counted = int((labels[:, 1:] != -100).sum())
    assert float(total / counted) == pytest.approx(float(want))
    halves = sum(model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=counted).loss for i in range(2))
    assert float(halves) == pytest.approx(float(want)), "parts of a batch add up to the batch"
    assert float(token_loss(output.logits, torch.full_like(ids, -100))) == 0.0
    assert "loss" not in model(ids)
    with pytest.raises(AttributeError):
        _ = model(ids).loss


def test_an_untrained_model_guesses() -> None:
    model, ids = Decoder(CONFIG), tokens(16, 64)
    assert model(ids, labels=ids).loss.item() == pytest.approx(math.log(29), abs=0.05)


@pytest.mark.parametrize("tie", [True, False])
def test_embeddings_are_tied_on_request(tie: bool) -> None:
    model = make(tie_embeddings=tie)
    names = [name for name, _ in model.named_parameters()]
    assert ("head.weight" in names) == (not tie)
    assert Decoder(replace(CONFIG, gate="paper", tie_embeddings=tie)).load_state_dict(model.state_dict())


def test_weights_start_as_documented_and_gates_as_their_spec_says() -> None:
    config = replace(CONFIG, dim=230, ffn_dim=310, gate="output:headwise:2sigmoid,init=identity")
    torch.manual_seed(0)
    model = Decoder(config)
    layer = model.layers[0]
    assert layer.attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.attn.out_proj.weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert layer.ffn.down_proj.weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert not layer.attn.attn_gate.proj.weight.any()
    assert (layer.attn_norm.weight == 1).all()


def test_an_identity_gate_leaves_every_logit_bit_for_bit() -> None:
    plain = make("none")
    gated = Decoder(replace(CONFIG, gate="output:headwise:2sigmoid,init=identity")).double().eval()
    missing = gated.load_state_dict(plain.state_dict(), strict=False)
    assert all("attn_gate" in name for name in missing.missing_keys)
    assert not missing.unexpected_keys
    assert torch.equal(gated(tokens()).logits, plain(tokens()).logits)


def test_only_the_layers_named_get_a_gate() -> None:
    gates = [layer.attn.attn_gate is not None for layer in make("paper,layers=1").layers]
    assert gates == [False, True]


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        (torch.zeros(5, dtype=torch.long), None, r"torch.int64 of shape \(5,\); pass token numbers \(batch, tokens\)"),
        (torch.zeros(2, 5), None, r"torch.float32 of shape \(2, 5\)"),
        (
            torch.zeros(2, 5, dtype=torch.long),
            torch.zeros(2, 4, dtype=torch.long),
            r"labels of shape \(2, 4\) for input_ids of shape \(2, 5\)",
        ),
    ],
)
def test_wrong_tokens(ids: torch.Tensor, labels: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        make()(ids, labels=labels)


def test_labels_may_be_int32() -> None:
    ids = tokens()
    assert make()(ids, labels=ids.int()).loss == make()(ids, labels=ids).loss


def test_what_would_be_silently_wrong_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"attention_mask is torch.float32 .* pass bool or int"):
        make()(tokens(), attention_mask=torch.zeros(2, 11))
    with pytest.raises(ShapeError, match=r"attention_mask is torch.bool of shape \(2, 12\).*of shape \(2, 11\)"):
        make()(tokens(), attention_mask=torch.ones(2, 12, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"a cache of 1 layers for a model of 2"):
        make()(tokens(), cache=make().new_cache()[:1])
    with pytest.raises(SpecError, match=r"'layers=2' in .*this model has layers 0 to 1"):
        make("paper,layers=2")


@pytest.mark.parametrize("gate", ["paper", "sink,fill", "weights:pairwise"])
def test_it_compiles_and_copies(gate: str) -> None:
    torch._dynamo.reset()
    model, ids = make(gate), tokens()
    want = model(ids, labels=ids)
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, labels=ids)
    assert (got["logits"] - want.logits).abs().max() < 1e-11
    assert torch.equal(copy.deepcopy(model)(ids).logits, want.logits)


@pytest.mark.parametrize("gate", ["paper", "sink,fill"])
def test_it_exports_with_dynamic_sizes(gate: str) -> None:
    model, ids = make(gate), tokens()
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=60)
    program = torch.export.export(model, (ids,), dynamic_shapes=({0: batch, 1: length},))
    other = tokens(3, 17)
    assert (program.module()(other).logits - model(other).logits).abs().max() < 1e-11


def test_the_stock_trainer_drives_it(tmp_path: Path) -> None:
    model = Decoder(replace(CONFIG, gate="paper-headwise"))
    rows = [{"input_ids": row, "labels": row.clone()} for row in tokens(24, 11)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=6, learning_rate=0.01, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    batch = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")}
    before = model(**batch).loss.item()
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert model(**batch).loss.item() < before
