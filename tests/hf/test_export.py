"""Exports: every target loads with stock transformers and answers as its source; what cannot be expressed is refused.

Sizes differ from each other, 1 < KV heads < heads, and gates have weights of std 5, so that no layout passes by luck.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gated_attn.errors import CheckpointError, MissingExtraError, UnsupportedError, VerificationError
from gated_attn.gate import Gate
from gated_attn.models.decoder import Decoder, DecoderConfig
from gated_attn.nn import Rope

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.lfm3")
pytest.importorskip("transformers.models.laguna")

from gated_attn.hf import export as exporting  # noqa: E402
from gated_attn.hf.canonical import LLAMA, canonical  # noqa: E402
from gated_attn.hf.export import TARGETS, export  # noqa: E402

SIZES = {
    "vocab_size": 61, "layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 8, "dim": 40, "ffn_dim": 56, "qk_norm": True,
    "norm_eps": 1e-5,
}  # fmt: skip

CASES = [
    ("none", "auto", "qwen3"),
    ("none", "auto", "llama"),
    ("none", "qwen3_5_text", "qwen3_5_text"),
    ("output:headwise:sigmoid", "auto", "lfm3"),
    ("output:headwise:sigmoid", "qwen3_5_text", "qwen3_5_text"),
    ("output:elementwise:sigmoid", "auto", "qwen3_5_text"),
    ("output:shared:sigmoid", "auto", "qwen3_5_text"),
    ("output:headwise:softplus", "auto", "laguna"),
    ("output:elementwise:softplus", "auto", "laguna"),
    ("weights:headwise:sigmoid", "auto", "lfm3"),
    ("output:headwise:2sigmoid", "auto", "lfm3"),
    ("output:elementwise:2sigmoid,init=identity", "auto", "qwen3_5_text"),
    ("output:headwise:sigmoid,in=7", "auto", "lfm3"),
    ("output:elementwise:sigmoid,rank=3", "auto", "qwen3_5_text"),
    ("output:headwise:softplus,in=7,rank=2", "auto", "laguna"),
    ("output:headwise:sigmoid,bias=1", "auto", "qwen3_5_text"),
    ("output:elementwise:2sigmoid,bias=-1,layers=1", "auto", "qwen3_5_text"),
    ("output:headwise:sigmoid,source=constant,bias=1", "auto", "qwen3_5_text"),
    ("output:headwise:sigmoid,layers=0,2", "auto", "lfm3"),
    ("output:elementwise:2sigmoid,layers=1", "auto", "qwen3_5_text"),
]
"""(gate, target asked for, target taken)."""


@torch.no_grad()
def wake(model: nn.Module) -> Any:
    """Norm weights about 1, gate weights of std 5, biases and all else of std 1, over the root of their inputs."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
        else:
            nn.init.normal_(parameter, std=(5 if "attn_gate" in name else 1) * parameter.shape[-1] ** -0.5)
    return model.eval()


def decoder(gate: str = "none", **options: Any) -> Decoder:
    return wake(Decoder(DecoderConfig(gate=gate, **(SIZES | options))))


def stock(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def tokens(batch: int = 3, length: int = 17) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(8))


@torch.no_grad()
def error(model: Any, other: Any) -> float:
    """Largest difference of logits as a share of the largest."""
    want, got = (m(input_ids=tokens()).logits.float() for m in (model, other))
    return float((want - got).abs().max() / want.abs().max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("gate", "asked", "taken"), CASES)
def test_the_export_is_the_source(gate: str, asked: str, taken: str, tied: bool, tmp_path: Path) -> None:
    options = {"qk_norm": False, "dim": 48} if taken == "llama" else {}
    model = decoder(gate, tie_embeddings=tied, rope_theta=3e4, **options)
    report = export(model, tmp_path / "out", asked, context=99)
    assert (report.target, report.folder) == (taken, tmp_path / "out")
    assert max(report.error, report.padded_error) <= report.tolerance
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    loaded = stock(tmp_path / "out")
    assert type(loaded).__module__.startswith("transformers.models.")
    assert loaded.config.max_position_embeddings == 99
    assert report.parameters == loaded.num_parameters()
    assert error(model, loaded) <= 1e-5
    prompt = tokens(2, 5)
    got = loaded.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    assert torch.equal(got, model.generate(prompt, 20))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_same_architecture_exports_without_any_error(tmp_path: Path) -> None:
    for gate in ("none", "output:headwise:sigmoid", "output:headwise:softplus", "output:elementwise:softplus"):
        report = export(decoder(gate), tmp_path / gate.replace(":", "-"))
        assert report.error == 0.0


def test_two_sigmoid_moves_into_the_out_projection_bit_for_bit(tmp_path: Path) -> None:
    twice = decoder("output:headwise:2sigmoid")
    once = decoder("output:headwise:sigmoid")
    once.load_state_dict(twice.state_dict())
    for name, model in (("twice", twice), ("once", once)):
        export(model, tmp_path / name)
    folded, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("twice", "once"))
    for name in plain:
        assert torch.equal(folded[name], plain[name] * (2 if "o_proj" in name else 1)), name


def test_config_says_what_other_engines_would_default(tmp_path: Path) -> None:
    report = export(decoder("output:headwise:2sigmoid,layers=0", rope_theta=5e5), tmp_path / "out", "qwen3_5_text")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["full_attention_interval"] == 1
    assert config["partial_rotary_factor"] == 1.0
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}
    assert config["layer_types"] == ["full_attention"] * 3
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["dtype"] == "float32"
    assert "auto_map" not in config
    assert report.notes == (
        "2sigmoid: sigmoid, with doubled out projections",
        "layers [1, 2] without a gate: gates of 1/2, with doubled out projections",
        "headwise gates: each row 8 times, once per channel",
    )


def test_headwise_rows_are_repeated_and_unread_channels_are_zero(tmp_path: Path) -> None:
    model = decoder("output:headwise:sigmoid,in=7")
    export(model, tmp_path / "out", "qwen3_5_text")
    packed = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    query, gate = packed.view(6, 2, 8, 40).unbind(1)
    ours = model.layers[1].attn
    assert torch.equal(query.reshape(48, 40), ours.q_proj.weight)
    assert torch.equal(gate[..., :7], ours.attn_gate.proj.weight[:, None].expand(6, 8, 7))
    assert not gate[..., 7:].any()


@pytest.mark.parametrize("target", ["lfm3", "qwen3_5_text"])
def test_bfloat16_stays_bfloat16(target: str, tmp_path: Path) -> None:
    model = decoder("output:headwise:2sigmoid").bfloat16()
    if target == "qwen3_5_text":
        with pytest.raises(UnsupportedError, match=r"less 1, not exact in torch.bfloat16 \(0.attn_norm.*model.float"):
            export(model, tmp_path / "out", target)
        with torch.no_grad():  # within a factor 2 of 1, w - 1 is exact
            [p.clamp_(0.5, 2.0) for name, p in model.named_parameters() if "norm" in name]
    report = export(model, tmp_path / "out", target)
    assert max(report.error, report.padded_error) <= report.tolerance
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert stock(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "partial"])
def test_rotary_positions_of_every_kind(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "linear": {"factor": 3.0},
        "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    }  # fmt: skip
    rope = Rope(8, scaling={"rope_type": kind, **options[kind]}) if kind in options else Rope(8, fraction=0.5)
    fits = {
        "none": "qwen3",
        "output:headwise": "lfm3",
        "output:elementwise": "qwen3_5_text",
        "output:headwise:softplus": "laguna",
    }
    for gate, target in fits.items():
        model = decoder(gate)
        for layer in model.layers:
            layer.attn.rope = rope
        if kind == "partial" and not TARGETS[target].partial:
            with pytest.raises(UnsupportedError, match=r"the model a share of 0\.5"):
                export(model, tmp_path / target, target)
        else:
            export(model, tmp_path / target, context=64)
            assert error(model, stock(tmp_path / target)) <= 1e-5


REFUSED = [
    ("value:headwise:sigmoid", {}, ["position value"]),
    ("dense:elementwise:sigmoid", {}, ["position dense"]),
    ("weights:pairwise:sigmoid", {}, ["query-key pair", "source=query_key"]),
    ("output:headwise:tanh", {}, ["activation tanh"]),
    ("output:headwise:sigmoid,source=query", {}, ["source=query"]),
    ("output:headwise:sigmoid,source=lse", {}, ["source=lse"]),
    ("output:headwise:silu,op=add", {}, ["op=add", "activation silu"]),
    ("output:headwise:sigmoid,top_k=2", {}, ["top_k=2"]),
    ("output:headwise:sigmoid,fill", {}, ["fill", "3 layers, gate output:headwise"]),
    ("output:headwise:nssigmoid,layers=1", {}, ["layer 1, gate", "activation nssigmoid"]),
    ("output:headwise:sigmoid", {"qk_norm": False},
     ["lfm3 normalises queries", "qwen3 has no gate", "--set model.qk_norm=true"]),
    ("output:headwise:softplus,bias=1", {}, ["laguna's gate has no bias", "lfm3's gate is sigmoid, the model has softplus"]),
    ("output:headwise:softplus,layers=1", {}, ["layers [0, 2] have no gate"]),
    ("none", {"qk_norm": False}, ["llama:", "hidden size (40)", "(6)"]),
]  # fmt: skip


@pytest.mark.parametrize(("gate", "options", "words"), REFUSED)
def test_refusals_name_what_and_why(gate: str, options: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        export(decoder(gate, **options), tmp_path / "out")
    for word in words:
        assert word in str(refusal.value)
    assert refusal.value.reasons
    assert not list(tmp_path.iterdir())


def test_a_target_that_does_not_fit_names_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="qwen3_5_text can\n  lfm3: lfm3's gate has 1 value a head, not 8"):
        export(decoder("output:elementwise"), tmp_path / "out", "lfm3")
    with pytest.raises(UnsupportedError, match=r"unknown target 'lfm'; known: auto, qwen3.*did you mean 'lfm3'"):
        export(decoder(), tmp_path / "out", "lfm")
    model = decoder()
    model.layers[1].attn.window = 4
    with pytest.raises(UnsupportedError, match=r"windows \[None, 4, None\]"):
        export(model, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="cannot export a Linear"):
        export(nn.Linear(2, 2), tmp_path / "out")


def _swapped(first: str, second: str) -> dict[str, str]:
    return {**LLAMA, first: LLAMA[second], second: LLAMA[first]}


G_PROJ = {**LLAMA, "gate": "model.layers.{i}.self_attn.g_proj"}
CORRUPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "two tensors change places": ({"names": _swapped("k", "v")}, "logits on random tokens"),
    "two norms change places": ({"names": _swapped("attn_norm", "ffn_norm")}, "logits on random tokens"),
    "norms are not offsets": ({"zero_centred": False}, "logits on random tokens"),
    "a name is wrong": ({"names": {**LLAMA, "norm": "model.n"}}, "1 missing_keys, such as model.norm.weight; 1 unexpected"),
    "the gate is apart": ({"fused": False, "names": G_PROJ}, "3 unexpected_keys.*3 mismatched_keys"),
    "positions are left to the default": ({"options": lambda c: {"layer_types": ["full_attention"] * 3}}, "logits on"),
}  # fmt: skip
"""What is wrong -> (the changes to qwen3_5_text, what is said)."""


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_a_corrupted_map_is_caught_and_leaves_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = CORRUPTIONS[what]
    monkeypatch.setitem(TARGETS, "qwen3_5_text", dataclasses.replace(TARGETS["qwen3_5_text"], **changes))
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers.modeling_utils"), "disabled", True)
    with pytest.raises(VerificationError, match=message):
        export(decoder("output:elementwise:2sigmoid"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_forgotten_fold_and_swapped_halves_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = exporting.state_dict

    def unfolded(name: str, c: Any) -> dict[str, Tensor]:
        return {key: t / 2 if "1.self_attn.o_proj" in key else t for key, t in right(name, c).items()}

    def swapped(name: str, c: Any) -> dict[str, Tensor]:
        tensors = right(name, c)
        key = "model.layers.2.self_attn.q_proj.weight"
        return tensors | {key: tensors[key].view(6, 2, 8, 40).flip(1).reshape(96, 40)}

    for wrong in (unfolded, swapped):
        monkeypatch.setattr(exporting, "state_dict", wrong)
        with pytest.raises(VerificationError, match="logits on random tokens differ"):
            export(decoder("output:elementwise:2sigmoid"), tmp_path / "out")


def test_other_greedy_tokens_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits agree, and generation with a cache does not."""
    model = decoder("output:headwise")
    right = transformers.generation.GenerationMixin.generate
    monkeypatch.setattr(
        transformers.generation.GenerationMixin, "generate", lambda *a, **k: (right(*a, **k) + 1) % SIZES["vocab_size"]
    )
    with pytest.raises(VerificationError, match="greedy generation differs"):
        export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists and is not overwritten: name another path"):
        export(decoder(), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_the_source_is_not_changed(tmp_path: Path) -> None:
    model = decoder("output:headwise:2sigmoid,layers=1", dropout=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(model, tmp_path / "out")
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def qwen3(gate: str, heads_gated: bool = True, **options: Any) -> Any:
    """transformers' Qwen3 with gates as children; `heads_gated` multiplies by them, as `attach` does by other means."""
    config = transformers.Qwen3Config(
        vocab_size=61, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-5, max_position_embeddings=77, eos_token_id=7,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **options,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    for layer in model.model.layers if gate != "none" else ():
        layer.self_attn.attn_gate = Gate(gate, 40, 6, kv_heads=2, head_dim=8)
    wake(model)
    if heads_gated and gate != "none":
        for layer in model.model.layers:
            layer.self_attn.forward = _Gated(layer.self_attn)
    return model


class _Gated:
    """Qwen3's attention with its out projection's input gated; a value, so that it survives deepcopy with its module."""

    def __init__(self, attention: nn.Module) -> None:
        self.attention = attention

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attention: Any = self.attention
        gate = attention.attn_gate(hidden_states)
        handle = attention.o_proj.register_forward_pre_hook(
            lambda _, args: ((args[0].unflatten(-1, (6, 8)) * gate).flatten(-2),)
        )
        try:
            return type(attention).forward(attention, hidden_states, **kwargs)
        finally:
            handle.remove()


def as_decoder(model: Any, gate: str, **options: Any) -> Decoder:
    """Our decoder with this Qwen3's weights."""
    ours = Decoder(DecoderConfig(gate=gate, tie_embeddings=False, **(SIZES | options)))
    names = {  # theirs -> ours
        "model.embed_tokens.": "embed.", "model.norm.": "norm.", "lm_head.": "head.", "model.layers.": "layers.",
        "self_attn.o_proj": "attn.out_proj", "self_attn.": "attn.", "mlp.": "ffn.", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    state = {}
    for name, tensor in model.state_dict().items():
        for theirs, mine in names.items():
            name = name.replace(theirs, mine)
        state[name] = tensor
    ours.load_state_dict(state)
    return ours.eval()


@pytest.mark.parametrize(
    ("gate", "target"),
    [
        ("none", "qwen3"),
        ("output:headwise:2sigmoid", "lfm3"),
        ("output:headwise:2sigmoid,init=identity", "lfm3"),
        ("output:elementwise:sigmoid,bias=1", "qwen3_5_text"),
        ("output:headwise:softplus", "laguna"),
    ],
)
def test_qwen3_with_gates(gate: str, target: str, tmp_path: Path) -> None:
    model = qwen3(gate)
    report = export(model, tmp_path / "out")
    assert report.target == target
    loaded = stock(tmp_path / "out")
    assert error(as_decoder(model, gate), loaded) <= 1e-5
    assert (loaded.config.eos_token_id, loaded.config.max_position_embeddings) == (7, 77)
    assert loaded.generation_config.eos_token_id == 7


def test_attached_gates(tmp_path: Path) -> None:
    attach = pytest.importorskip("gated_attn.hf.attach").attach
    for gate, target in (
        ("output:headwise:2sigmoid,init=identity", "lfm3"),
        ("output:elementwise:2sigmoid,layers=1", "qwen3_5_text"),
        ("output:headwise:softplus", "laguna"),
    ):
        model = qwen3("none")
        attach(model, gate)
        report = export(wake(model), tmp_path / target)
        assert report.target == target
        assert report.error <= report.tolerance


def test_attached_gates_without_query_and_key_norms_are_told_what_can_be_done(tmp_path: Path) -> None:
    """A recipe's switch is no help for a model of transformers; what is said to help does."""
    from gated_attn.hf.attach import attach, detach
    from gated_attn.hf.whole import load_pretrained

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=56, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=77,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for gate, target in (("paper-headwise", "auto"), ("paper", "qwen3_5_text")):
        wake(attach(model, gate))
        with pytest.raises(
            UnsupportedError, match=r"without query and key norms: keep this one with model\.save_pretrained"
        ) as refusal:
            export(model, tmp_path / "out", target)
        assert "qwen3_5_text: qwen3_5_text normalises queries and keys, and the model does not" in str(refusal.value)
        assert "--set" not in str(refusal.value)
        assert not (tmp_path / "out").exists()
        model.save_pretrained(tmp_path / target)
        assert torch.equal(load_pretrained(tmp_path / target)(tokens()).logits, model(tokens()).logits)
        detach(model)
    with pytest.raises(
        UnsupportedError, match="llama can\n  qwen3: qwen3 normalises queries and keys, and the model does not"
    ):
        export(model, tmp_path / "out", "qwen3")
    assert export(model, tmp_path / "out").target == "llama"


def test_qwen3_biases_come_along(tmp_path: Path) -> None:
    for gate, target in (("output:headwise", "lfm3"), ("output:elementwise,bias=1", "qwen3_5_text"), ("none", "qwen3")):
        assert export(qwen3(gate, attention_bias=True), tmp_path / target).target == target


def test_gates_that_the_source_does_not_apply_are_caught(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="logits on random tokens differ"):
        export(qwen3("output:headwise", heads_gated=False), tmp_path / "out")


def test_qwen3_refusals(tmp_path: Path) -> None:
    sliding = qwen3("none", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    other = qwen3("none", hidden_act="gelu")
    value = qwen3("none")
    value.model.layers[1].self_attn.v_proj.attn_gate = Gate("value:headwise", 40, 6, kv_heads=2, head_dim=8)
    adapted = qwen3("none")
    adapted.model.layers[2].mlp.up_proj.lora_a = nn.Linear(40, 2, bias=False)
    for model, message in (
        (sliding, "sliding attention"),
        (other, "hidden_act 'gelu'"),
        (value, "gate value:headwise:sigmoid: position value; stock models gate attention's output"),
        (adapted, "tensor model.layers.2.mlp.up_proj.lora_a.weight: no target has a place for it"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            export(model, tmp_path / "out")


def test_both_sources_have_one_canonical_form() -> None:
    theirs = qwen3("output:headwise:2sigmoid,rank=3,in=7")
    a, b = canonical(theirs), canonical(as_decoder(theirs, "output:headwise:2sigmoid,rank=3,in=7"), context=77)
    assert a.tensors.keys() == b.tensors.keys()
    assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    assert a.rope == b.rope
    assert a.sizes | {"eos_token_id": None} == b.sizes
    for mine, other in zip(a.gates, b.gates, strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine.weight_HGD, other.weight_HGD)
        assert mine.weight_HGD.shape == (6, 1, 40)


def test_without_transformers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"needs transformers.*gated-attn\[hf\]"):
        export(decoder(), tmp_path / "out")
