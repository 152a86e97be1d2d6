"""Gates on disk: beside a base model, and in a whole model that the stock classes refuse or load with its gates."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from gated_attn.errors import CheckpointError, RecordError, SpecError, UnsupportedError
from gated_attn.hf.attach import attach, attach_each, detach, gates
from gated_attn.hf.config import MODEL_TYPE, GatedConfig
from gated_attn.hf.store import base_hash, load_gates, placed, save_gates
from gated_attn.hf.whole import load_pretrained
from gated_attn.hf.wiring import GATE
from tests.hf.tiny import GPT, IMAGE, LLM, TINY, WIDE, wake

INSTALL = "pip install 'gated-attn[hf]'"

IDS = torch.arange(1, 12)[None]

# name -> (class, configuration, Auto class, specs, inputs)
FAMILIES: dict[str, tuple[Any, Any, Any, Any, dict[str, Tensor]]] = {
    "llama": (
        hf.LlamaForCausalLM, hf.LlamaConfig(**WIDE), hf.AutoModelForCausalLM, "output:elementwise:sigmoid,bias=0.5,layers=1",
        {"input_ids": IDS},
    ),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**WIDE), hf.AutoModelForCausalLM, "key:headwise", {"input_ids": IDS}),
    "gpt2": (
        hf.GPT2LMHeadModel, hf.GPT2Config(**GPT), hf.AutoModelForCausalLM, "value:headwise,rank=3", {"input_ids": IDS},
    ),
    "bert": (hf.BertForMaskedLM, hf.BertConfig(**LLM), hf.AutoModelForMaskedLM, "dense:elementwise", {"input_ids": IDS}),
    "t5": (
        hf.T5ForConditionalGeneration, hf.T5Config(**TINY["t5"].settings), hf.AutoModelForSeq2SeqLM,
        {"self": "output:headwise", "cross": "output:shared:2sigmoid"}, {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]},
    ),
    "vit": (
        hf.ViTForImageClassification, hf.ViTConfig(**IMAGE, num_labels=3), hf.AutoModelForImageClassification,
        "output:headwise,fill", {"pixel_values": torch.linspace(-1, 1, 768).reshape(1, 3, 16, 16)},
    ),
}  # fmt: skip


def base(name: str, seed: int = 0) -> Any:
    cls, config = FAMILIES[name][:2]
    torch.manual_seed(seed)
    return cls(copy.deepcopy(config)).eval()


def gated(name: str) -> Any:
    return wake(attach(base(name), FAMILIES[name][3]))


def logits(name: str, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**FAMILIES[name][4]).logits


def same_state(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def gate_keys(model: nn.Module) -> set[str]:
    return {name for name in model.state_dict() if f".{GATE}." in name}


# PEFT asks transformers for a name that it has deprecated.
peft_warns = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


# Beside a base model.


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_gates_give_the_same_model_again(name: str, tmp_path: Path) -> None:
    model = gated(name)
    assert save_gates(model, tmp_path / "new" / "gates") == tmp_path / "new" / "gates"
    assert sorted(path.name for path in (tmp_path / "new" / "gates").iterdir()) == ["gates.json", "gates.safetensors"]
    again = load_gates(base(name), tmp_path / "new" / "gates")
    assert same_state(again, model)
    assert [str(gate.spec) for gate in gates(again).values()] == [str(gate.spec) for gate in gates(model).values()]
    assert torch.equal(logits(name, again), logits(name, model))
    assert not torch.equal(logits(name, again), logits(name, base(name)))
    assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]


def test_the_files_hold_the_gates_and_nothing_else(tmp_path: Path) -> None:
    model = gated("llama")
    save_gates(model, tmp_path)
    numbers = sum(parameter.numel() for gate in gates(model).values() for parameter in gate.parameters())
    assert numbers == 24 * 40 + 40  # layer 1 only
    assert 4 * numbers < (tmp_path / "gates.safetensors").stat().st_size < 4 * numbers + 400
    record = json.loads((tmp_path / "gates.json").read_text())
    assert record == {
        "format": "gated-attn.gates", "version": 1, "base": "LlamaForCausalLM", "base_hash": base_hash(base("llama")),
        "gates": {
            "model.layers.1.self_attn": {
                "spec": "output:elementwise:sigmoid,bias=0.5,layers=1", "dim": 24, "heads": 4, "kv_heads": 2, "head_dim": 10,
            }
        },
    }  # fmt: skip


def test_several_specs_in_one_model(tmp_path: Path) -> None:
    specs = {"model.layers.0.self_attn": "value:headwise", "model.layers.1.self_attn": "output:elementwise,rank=2"}
    model = wake(attach_each(base("llama"), specs))
    save_gates(model, tmp_path)
    assert same_state(load_gates(base("llama"), tmp_path), model)
    with pytest.raises(
        SpecError, match=r"no attention module is named 'model.layers.7.self_attn'; there are model.layers.0"
    ):
        attach_each(base("llama"), {"model.layers.7.self_attn": "value:headwise"})


def test_where_gates_are_attached_already_only_values_are_read(tmp_path: Path) -> None:
    model = gated("llama")
    save_gates(model, tmp_path)
    other = attach(base("llama"), FAMILIES["llama"][3])
    held = list(other.parameters())
    load_gates(other, tmp_path)
    assert same_state(other, model)
    assert all(one is two for one, two in zip(held, other.parameters(), strict=True))
    wrong = attach(base("llama"), "output:elementwise:sigmoid,bias=0.5")
    with pytest.raises(
        RecordError,
        match=r"gates.json: holds gates of 1 modules, and the model has gates in 2: .*only in the model model.layers.0",
    ):
        load_gates(wrong, tmp_path)
    wrong = attach(base("llama"), "output:elementwise:2sigmoid,bias=0.5,layers=1")
    before = copy.deepcopy(wrong.state_dict())
    with pytest.raises(
        RecordError, match=r"is 'output:elementwise:sigmoid.* and the model has 'output:elementwise:2sigmoid"
    ):
        load_gates(wrong, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in wrong.state_dict().items())


def test_another_base_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    model = gated("llama")
    save_gates(model, tmp_path)
    other = base("llama", seed=3)
    with pytest.raises(
        RecordError, match=r"gates.json: saved for the base 'LlamaForCausalLM' with hash \w{12}, .*base='any'"
    ):
        load_gates(other, tmp_path)
    assert not gates(other)
    load_gates(other, tmp_path, base="any")
    assert all(torch.equal(other.state_dict()[name], model.state_dict()[name]) for name in gate_keys(model))
    for change in ({"num_key_value_heads": 4}, {"num_attention_heads": 2, "head_dim": 20}):
        sizes = hf.LlamaForCausalLM(hf.LlamaConfig(**WIDE | change))
        with pytest.raises(RecordError, match=r"model.layers.1.self_attn is .*D=24, H=4, K=2, E=10, and the model has"):
            load_gates(sizes, tmp_path, base="any")
        assert not gates(sizes)
    with pytest.raises(
        RecordError, match=r"no attention module is named 'model.layers.1.self_attn' in this BertForMaskedLM"
    ):
        load_gates(base("bert"), tmp_path, base="any")
    with pytest.raises(SpecError, match="legal: same, any"):
        load_gates(other, tmp_path, base="none")


def test_the_base_hash_is_of_the_base_alone() -> None:
    model = base("llama")
    known = base_hash(model)
    assert base_hash(attach(copy.deepcopy(model), "value:headwise")) == known
    assert base_hash(copy.deepcopy(model).to(torch.bfloat16)) == known
    assert base_hash(hf.LlamaForCausalLM(hf.LlamaConfig(**WIDE)).to("meta")) is None
    changed = copy.deepcopy(model)
    changed.model.norm.weight.data[-1] += 0.1
    assert base_hash(changed) != known
    assert base_hash(model.model) != known


def test_weights_that_are_not_in_memory_are_taken_on_trust_only(tmp_path: Path) -> None:
    model = attach(base("llama").to("meta"), "output:headwise")
    with pytest.raises(
        UnsupportedError, match=r"model.layers.0.self_attn.attn_gate.proj.weight, .*: on the meta device"
    ):
        save_gates(model, tmp_path / "meta")
    save_gates(gated("llama"), tmp_path)
    with pytest.raises(RecordError, match=r"this model has weights that are not in memory.*base='any'"):
        load_gates(base("llama").to("meta"), tmp_path)
    empty = base("llama").to("meta")
    with pytest.raises(UnsupportedError, match=r"attn_gate.proj.weight of this model is sharded or on the meta device"):
        load_gates(empty, tmp_path, base="any")
    assert not gates(empty)


def test_damaged_files_are_named_and_leave_the_model_as_it_was(tmp_path: Path) -> None:
    model = gated("bert")
    save_gates(model, tmp_path)
    tensors, record = tmp_path / "gates.safetensors", tmp_path / "gates.json"
    whole, told = tensors.read_bytes(), record.read_text()

    def refused(pattern: str) -> None:
        fresh = base("bert")
        state = list(fresh.state_dict())
        with pytest.raises(RecordError, match=pattern):
            load_gates(fresh, tmp_path)
        assert list(fresh.state_dict()) == state
        assert type(fresh) is hf.BertForMaskedLM

    tensors.write_bytes(whole[:-100])
    refused(r"gates.safetensors: cannot be read, or cut short")
    save_gates(gated("t5"), tmp_path / "other")
    tensors.write_bytes((tmp_path / "other" / "gates.safetensors").read_bytes())
    refused(
        r"gates.safetensors: 2 missing tensors \(bert.encoder.layer.0.attention.self.attn_gate.*, .*unexpected ones"
    )
    tensors.write_bytes(whole)
    record.write_text(told.replace("dense:elementwise:sigmoid", "dense:headwise:sigmoid"))
    refused(r"gates.safetensors: .* has shape \(24, 24\), and the model's gate \(1, 24\)")
    record.write_text(told.replace('"version": 1', '"version": 2'))
    refused(r"gates.json: .*version 2 cannot be read")
    record.write_text(told[:40])
    refused(r"gates.json: not JSON, or cut short")
    record.write_text(told.replace("dense:elementwise:sigmoid", "dense:elementwise:sigmund"))
    refused(r"gates.json: unknown activation 'sigmund'")
    record.unlink()
    refused(r"cannot read a gated-attn.gates record from .*gates.json")
    with pytest.raises(SpecError, match="no gates to save"):
        save_gates(base("bert"), tmp_path)


def test_a_failed_save_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_gates(gated("bert"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("gated_attn.hf.store.os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        save_gates(wake(gated("bert"), seed=2), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_bfloat16_gates_keep_their_bits(tmp_path: Path) -> None:
    model = gated("qwen3").to(torch.bfloat16)
    save_gates(model, tmp_path)
    again = load_gates(base("qwen3").to(torch.bfloat16), tmp_path)
    assert {value.dtype for value in again.state_dict().values()} == {torch.bfloat16}
    assert same_state(again, model)


def test_shared_layers_are_saved_once(tmp_path: Path) -> None:
    sizes = LLM | {"embedding_size": 12, "num_hidden_layers": 3}
    torch.manual_seed(0)
    model = hf.AlbertForMaskedLM(hf.AlbertConfig(**sizes)).eval()
    fresh = copy.deepcopy(model)
    wake(attach(model, "output:headwise"))
    assert len(placed(model)) == 1
    save_gates(model, tmp_path)
    again = load_gates(fresh, tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(hf.AutoModelForMaskedLM.from_pretrained(tmp_path / "whole")(IDS).logits, model(IDS).logits)


@peft_warns
@pytest.mark.parametrize("gates_first", [True, False])
def test_gates_of_a_lora_model_go_by_the_names_of_its_base(gates_first: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    spec = "value:headwise"

    def with_lora(model: nn.Module) -> Any:
        torch.manual_seed(5)
        return peft.get_peft_model(model, lora)

    model = with_lora(attach(base("llama"), spec)) if gates_first else attach(with_lora(base("llama")), spec)
    wake(model)
    save_gates(model, tmp_path)
    record = json.loads((tmp_path / "gates.json").read_text())
    assert list(record["gates"]) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert record["base_hash"] == base_hash(base("llama"))
    plain = load_gates(base("llama"), tmp_path)
    expected = wake(attach(base("llama"), spec))
    assert same_state(plain, expected)
    again = load_gates(with_lora(base("llama")), tmp_path)
    assert torch.equal(logits("llama", again), logits("llama", model))
    with torch.no_grad():
        for gate in gates(again).values():
            gate.proj.weight.zero_()
    load_gates(again, tmp_path)
    assert torch.equal(logits("llama", again), logits("llama", model))


@peft_warns
def test_gates_that_peft_trains_are_saved_from_the_active_copy(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        attach(base("llama"), "output:headwise"), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[GATE])
    )
    copies = [gate for name, gate in gates(model).items() if "modules_to_save" in name]
    assert len(copies) == 2
    with torch.no_grad():
        for gate in copies:
            gate.proj.weight.fill_(0.25)
    save_gates(model, tmp_path)
    plain = load_gates(base("llama"), tmp_path)
    assert all(bool((gate.proj.weight == 0.25).all()) for gate in gates(plain).values())


def test_wrapped_models_save_the_names_inside(tmp_path: Path) -> None:
    model = gated("llama")
    save_gates(torch.compile(model), tmp_path)
    assert same_state(load_gates(base("llama"), tmp_path), model)
    outer = nn.DataParallel(base("llama"))
    assert load_gates(outer, tmp_path) is outer
    assert same_state(outer.module, model)


def test_gates_outside_attention_modules_are_refused(tmp_path: Path) -> None:
    model = gated("llama")
    model.lm_head.add_module(GATE, copy.deepcopy(next(iter(gates(model).values()))))
    with pytest.raises(UnsupportedError, match=r"lm_head.attn_gate"):
        save_gates(model, tmp_path)


# A whole model.


@pytest.mark.parametrize("name", FAMILIES)
def test_the_auto_classes_load_a_whole_model_with_its_gates(name: str, tmp_path: Path) -> None:
    cls, config, auto, _, _ = FAMILIES[name]
    model = gated(name)
    assert type(model).__name__ == cls.__name__
    model.save_pretrained(tmp_path)
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert same_state(again, model)
    assert torch.equal(logits(name, again), logits(name, model))
    assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
    assert type(again.config) is type(config)
    assert not again.training
    assert same_state(type(model).from_pretrained(tmp_path), model)
    assert same_state(load_pretrained(tmp_path, auto), model)
    detach(again)
    assert [type(module) for module in again.modules()] == [type(module) for module in base(name).modules()]
    assert same_state(again, base(name))
    again.save_pretrained(tmp_path / "stock")
    assert same_state(cls.from_pretrained(tmp_path / "stock"), base(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_class_called_by_its_name_refuses_and_says_what_to_install(name: str, tmp_path: Path) -> None:
    gated(name).save_pretrained(tmp_path)
    for options in ({}, {"ignore_mismatched_sizes": True}, {"dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=r"pip install 'gated-attn\[hf\]', import gated_attn.hf"):
            FAMILIES[name][0].from_pretrained(tmp_path, **options)


def test_every_way_of_loading_keeps_the_bits(tmp_path: Path) -> None:
    model = gated("llama")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    ways: list[dict[str, Any]] = [
        {},
        {"device_map": {"": "cpu"}},
        {"device_map": "auto"},
        {"attn_implementation": "eager"},
        {"dtype": "auto"},
    ]
    for options in ways:
        assert same_state(hf.AutoModelForCausalLM.from_pretrained(tmp_path, **options), model), options
    low = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert same_state(low, copy.deepcopy(model).to(torch.bfloat16))
    low.save_pretrained(tmp_path / "low")
    assert same_state(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "low"), low)
    assert (
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").config._attn_implementation
        == "eager"
    )


def test_gates_keep_their_start_on_every_path(tmp_path: Path) -> None:
    spec = "output:headwise:2sigmoid,init=identity"
    model = attach(base("bert"), spec)
    model.save_pretrained(tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, GatedConfig)
    made = hf.AutoModelForMaskedLM.from_config(config)
    loaded = hf.AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for one in (model, made, loaded):
        assert len(gates(one)) == 2
        for gate in gates(one).values():
            assert not gate.proj.weight.any()
    made.post_init()
    made.init_weights()
    assert all(not gate.proj.weight.any() for gate in gates(made).values())


def test_a_model_made_on_meta_takes_the_saved_weights(tmp_path: Path) -> None:
    model = gated("llama")
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(tmp_path))
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    from safetensors.torch import load_file

    missing, unexpected = empty.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert not missing
    assert not unexpected
    assert same_state(empty, model)


class FourBit(nn.Linear):
    """Stands for a quantised layer: of the same weight, and not a plain Linear."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_quantiser_leaves_the_gates_alone(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Config(QuantizationConfigMixin):
        def __init__(self) -> None:
            self.quant_method = "four"  # type: ignore[assignment]

    class Quantizer(HfQuantizer):
        requires_calibration = False
        is_trainable = False

        def is_serializable(self) -> bool:
            return False

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            skipped = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
            for name, module in model.named_modules():
                if type(module) is nn.Linear and should_convert_module(name, skipped):
                    module.__class__ = FourBit
            return model

    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "four", Quantizer)
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "four", Config)
    model = gated("llama").to(dtype)
    model.save_pretrained(tmp_path)
    low = hf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=Config())
    assert {type(layer) for layer in low.model.layers[1].mlp.children() if isinstance(layer, nn.Linear)} == {FourBit}
    assert [type(gate.proj) for gate in gates(low).values()] == [nn.Linear]
    assert same_state(low, model)
    assert {value.dtype for value in low.state_dict().values()} == {dtype}


def test_other_heads_and_parts_load_with_the_gates_of_what_they_have(tmp_path: Path) -> None:
    model = gated("llama")
    model.save_pretrained(tmp_path / "lm")
    inner = hf.AutoModel.from_pretrained(tmp_path / "lm")
    assert type(inner) is type(model.model)
    assert same_state(inner, model.model)
    classifier = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=5)
    assert classifier.score.out_features == 5
    assert same_state(classifier.model, model.model)
    model.model.save_pretrained(tmp_path / "inner")
    assert same_state(hf.AutoModel.from_pretrained(tmp_path / "inner"), model.model)
    assert same_state(hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "inner").model, model.model)
    with pytest.raises(UnsupportedError, match=r"AutoModelForImageClassification has no model for .*LlamaConfig"):
        hf.AutoModelForImageClassification.from_pretrained(tmp_path / "lm")

    both = gated("t5")
    both.save_pretrained(tmp_path / "t5")
    encoder = hf.AutoModelForTextEncoding.from_pretrained(tmp_path / "t5")
    assert len(gates(encoder)) == 2
    assert same_state(encoder.encoder, both.encoder)


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = gated("llama")
    model.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, told = load_file(weights), config.read_text()
    key = f"model.layers.1.self_attn.{GATE}.proj.weight"
    save_file({name: value for name, value in tensors.items() if name != key}, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"1 missing gate tensors \({key}\)"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file(tensors | {key: tensors[key][:4]}, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"1 mismatched gate tensors \({key}\)"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    save_file(tensors, weights, metadata={"format": "pt"})
    changed = json.loads(told)
    changed["gated_attn"]["gates"] = {"model.layers.0.self_attn": "output:headwise"}
    config.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"missing gate tensors .*model.layers.0"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    changed["gated_attn"]["gates"] = {"model.blocks.0.self_attn": "output:headwise"}
    config.write_text(json.dumps(changed))
    with pytest.raises(
        SpecError, match=r"none of the modules with gates is in LlamaForCausalLM: model.blocks.0.self_attn"
    ):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    changed["gated_attn"]["gates"] = {"model.layers.0.self_attn": "output:headwide"}
    config.write_text(json.dumps(changed))
    with pytest.raises(RecordError, match=r"config.json: unknown width 'headwide'"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    changed["gated_attn"]["version"] = 2
    config.write_text(json.dumps(changed))
    with pytest.raises(RecordError, match=r"version 2, and this gated-attn reads version 1"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    base("llama").save_pretrained(tmp_path / "stock")
    with pytest.raises(CheckpointError, match=r"of type 'llama' without gates"):
        load_pretrained(tmp_path / "stock")


def test_a_save_that_is_killed_leaves_no_stock_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gated("llama")
    before = dict(model.config.__dict__)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == MODEL_TYPE
    assert set(model.config.__dict__) == set(before)


def test_the_state_dict_has_the_gates_and_no_other_new_key() -> None:
    stock, model = base("llama"), attach(base("llama"), "output:headwise")
    assert set(model.state_dict()) - set(stock.state_dict()) == gate_keys(model)
    missing, unexpected = model.load_state_dict(base("llama", seed=2).state_dict(), strict=False)
    assert set(missing) == gate_keys(model)
    assert not unexpected


def test_copies_and_pickles_of_the_model_save_their_gates(tmp_path: Path) -> None:
    model = gated("llama")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for number, other in enumerate(
        [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    ):
        assert type(other) is type(model)
        assert same_state(other, model)
        other.save_pretrained(tmp_path / str(number))
        assert same_state(hf.AutoModelForCausalLM.from_pretrained(tmp_path / str(number)), model)


def test_generate_and_pipeline_take_the_model(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = hf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")
    model = gated("llama")
    expected = model.generate(IDS, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    prompt = " ".join(f"w{i}" for i in IDS[0].tolist())
    for source in ({"model": model, "tokenizer": tokens}, {"model": str(tmp_path)}):
        pipe = hf.pipeline("text-generation", **source)
        settings = hf.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert (
            pipe(prompt, generation_config=settings, return_tensors=True)[0]["generated_token_ids"]
            == expected[0].tolist()
        )


@peft_warns
def test_native_adapters_are_saved_with_the_gates_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    # transformers 5.24 asks for a release of PEFT that is newer than what is out; what it needs here, 0.21 has.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model = gated("llama")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert {"adapter_config.json", "gates.json", "gates.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert "config.json" not in {path.name for path in tmp_path.iterdir()}
    assert set(gates(load_gates(base("llama"), tmp_path))) == set(gates(model))


@peft_warns
def test_merged_lora_models_save_whole(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    merged = peft.get_peft_model(gated("llama"), lora).merge_and_unload()
    merged.save_pretrained(tmp_path)
    assert same_state(hf.AutoModelForCausalLM.from_pretrained(tmp_path), merged)


def _trainer(model: Any, folder: Path, steps: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(97, (12, 9), generator=generator)]
    options = hf.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="constant", use_cpu=True,
        save_steps=2, eval_steps=2, eval_strategy="steps", logging_steps=1, load_best_model_at_end=True, report_to=[], seed=7,
        disable_tqdm=True,
    )  # fmt: skip
    return hf.Trainer(model, options, train_dataset=rows, eval_dataset=rows[:4])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trainer_resumes_and_takes_back_its_best_model(tmp_path: Path) -> None:
    whole = gated("llama")
    whole_trainer = _trainer(whole, tmp_path / "whole", 6)
    whole_trainer.train()
    first = _trainer(gated("llama"), tmp_path / "cut", 4)
    first.train()
    resumed = attach(base("llama", seed=9), FAMILIES["llama"][3])
    second = _trainer(resumed, tmp_path / "cut", 6)
    second.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    losses = [[row["loss"] for row in one.state.log_history if "loss" in row] for one in (whole_trainer, second)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert same_state(whole, resumed)
    best = hf.AutoModelForCausalLM.from_pretrained(second.state.best_model_checkpoint)
    assert same_state(best, resumed)
    assert not torch.equal(
        best.state_dict()[sorted(gate_keys(best))[0]], gated("llama").state_dict()[sorted(gate_keys(best))[0]]
    )


# Fresh interpreters.

WITHOUT = """
import sys, transformers as hf
for folder, auto, cls in zip(*[iter(sys.argv[1:])] * 3):
    for ask in (hf.AutoConfig, getattr(hf, auto), hf.AutoModel, getattr(hf, cls)):
        try:
            ask.from_pretrained(folder)
        except ValueError as error:
            print(ask.__name__, "pip install 'gated-attn[hf]', import gated_attn.hf" in str(error))
        else:
            print(ask.__name__, "loaded")
assert "gated_attn" not in sys.modules
"""

WITH = """
import sys, torch
import gated_attn.hf
import transformers as hf
for folder, auto in zip(*[iter(sys.argv[1:])] * 2):
    model = getattr(hf, auto).from_pretrained(folder)
    print(auto, type(model).__name__, sum(".attn_gate." in name for name in model.state_dict()))
    torch.save(model.state_dict(), folder + "/state.pt")
"""


def run(code: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_fresh_interpreters_refuse_without_us_and_load_with_us(tmp_path: Path) -> None:
    for name in FAMILIES:
        gated(name).save_pretrained(tmp_path / name)
    names = {
        name: (str(tmp_path / name), auto.__name__, cls.__name__) for name, (cls, _, auto, _, _) in FAMILIES.items()
    }
    lines = run(WITHOUT, *(word for row in names.values() for word in row))
    assert lines == [f"{ask} True" for _, auto, cls in names.values() for ask in ("AutoConfig", auto, "AutoModel", cls)]
    lines = run(WITH, *(word for row in names.values() for word in row[:2]))
    assert lines == [f"{auto} {cls} {len(gate_keys(gated(name)))}" for name, (_, auto, cls) in names.items()]
    for name in FAMILIES:
        state, expected = torch.load(tmp_path / name / "state.pt"), gated(name).state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[key], expected[key]) for key in state)


def test_one_fresh_interpreter_refuses(tmp_path: Path) -> None:
    gated("llama").save_pretrained(tmp_path)
    lines = run(WITHOUT, str(tmp_path), "AutoModelForCausalLM", "LlamaForCausalLM")
    assert lines == ["AutoConfig True", "AutoModelForCausalLM True", "AutoModel True", "LlamaForCausalLM True"]


@pytest.mark.network
@pytest.mark.slow
def test_a_real_albert(tmp_path: Path) -> None:
    from gated_attn import samples
    from gated_attn.hf.pretrained import load_sample, tokenizer

    if not any(samples.cache_folder().glob("rxnmapper*")):
        pytest.skip("the sample rxnmapper is not in the cache")
    model = load_sample("rxnmapper")
    batch = tokenizer("rxnmapper")("CC(=O)O.OCC>>CC(=O)OCC", return_tensors="pt")
    before = model(**batch).logits
    attach(model, "output:headwise:2sigmoid,init=identity")
    assert torch.equal(model(**batch).logits, before)
    wake(model)
    awake = model(**batch).logits
    save_gates(model, tmp_path / "gates")
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(load_gates(load_sample("rxnmapper"), tmp_path / "gates")(**batch).logits, awake)
    assert torch.equal(load_pretrained(tmp_path / "whole", hf.AutoModelForMaskedLM)(**batch).logits, awake)
    assert torch.equal(detach(model)(**batch).logits, before)
