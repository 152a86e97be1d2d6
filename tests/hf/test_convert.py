"""`gated-attn convert`: every pair bitwise over shards, one shard in memory, and a folder that is whole or not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from gated_attn.cli.app import app
from gated_attn.errors import CheckpointError, GatedAttnError, RecordError, ShapeError, SpecError, UnsupportedError
from gated_attn.hf import checkpoint
from gated_attn.hf.checkpoint import CONFIG, INDEX
from gated_attn.hf.convert import convert_checkpoint
from gated_attn.hf.layouts import LAYOUTS
from gated_attn.hf.names import KEY, MODEL_TYPE
from gated_attn.hf.native import READ_AS

H, KV, E, D, LAYERS = 8, 2, 4, 23, 3
SIZES = {"num_attention_heads": H, "num_key_value_heads": KV, "head_dim": E, "hidden_size": D, "model_type": "ours"}
OURS = ("q_proj", "attn_gate.proj", "k_proj", "v_proj")


def weights(width: str = "elementwise", *, bias: bool = False) -> dict[str, Tensor]:
    """A model in layout `separate` whose feed-forward has a gate_proj too."""
    generator = torch.manual_seed(3)
    normal = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    rows = dict(zip(OURS, (H * E, H * (E if width == "elementwise" else 1), KV * E, KV * E), strict=True))
    state = {"model.embed_tokens.weight": normal(31, D), "model.norm.weight": normal(D), "step": torch.tensor(7)}
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        for name, n in rows.items():
            state[f"{path}.self_attn.{name}.weight"] = normal(n, D)
            if bias:
                state[f"{path}.self_attn.{name}.bias"] = normal(n)
        state[f"{path}.self_attn.o_proj.weight"] = normal(D, H * E)
        state[f"{path}.self_attn.q_norm.weight"] = normal(E)
        state |= {f"{path}.mlp.{name}.weight": normal(29, D) for name in ("gate_proj", "up_proj")}
    return state


def store(folder: Path, state: dict[str, Tensor], shards: int = 4, **config: Any) -> Path:
    """Tensors dealt to the shards in turn, so that queries and their gate never lie together; or one file."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({**SIZES, **config}))
    (folder / "tokenizer.json").write_text("{}")
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {name: files[i % shards] for i, name in enumerate(state)}
    for file in files:
        save_file(
            {name: state[name] for name in state if where[name] == file}, folder / file, metadata={"format": "pt"}
        )
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_parameters": 5}, "weight_map": where}))
    return folder


def load(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        state |= load_file(file)
    return state


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("width", ["headwise", "elementwise"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("middle", LAYOUTS)
def test_every_pair_of_layouts_gives_the_same_bits_again(tmp_path: Path, middle: str, bias: bool, width: str) -> None:
    state = weights(width, bias=bias)
    source = store(tmp_path / "src", state)
    if width not in LAYOUTS[middle].widths:
        with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn\.\*\.weight: layout tail_rows holds"):
            convert_checkpoint(source, tmp_path / "no", "separate", middle, width=width)
        return
    convert_checkpoint(source, tmp_path / "middle", "separate", middle, width=width)
    for target in LAYOUTS:
        if width in LAYOUTS[target].widths:
            done = convert_checkpoint(tmp_path / "middle", tmp_path / target, None, target)
            assert (done.source, done.target, done.modules) == (middle, target, LAYERS)
            convert_checkpoint(tmp_path / target, tmp_path / f"{target}-back", None, "separate")
            assert_same(load(tmp_path / f"{target}-back"), state)


def test_the_written_rows_and_names_by_hand(tmp_path: Path) -> None:
    state = weights(bias=True)
    source = store(tmp_path / "src", state)
    convert_checkpoint(source, tmp_path / "head", "separate", "per_head", width="elementwise")
    convert_checkpoint(source, tmp_path / "megatron", "separate", "group_qgkv", width="elementwise")
    head, megatron = load(tmp_path / "head"), load(tmp_path / "megatron")
    for path in (f"model.layers.{i}.self_attn" for i in range(LAYERS)):
        for end in ("weight", "bias"):
            q, gate, k, v = (state[f"{path}.{name}.{end}"] for name in OURS)
            theirs_q, theirs_gate = head[f"{path}.q_proj.{end}"].unflatten(0, (H, 2 * E)).chunk(2, dim=1)
            assert torch.equal(theirs_q.flatten(0, 1), q)
            assert torch.equal(theirs_gate.flatten(0, 1), gate)
            fused = megatron[f"{path}.linear_qkv.{end}"].unflatten(0, (KV, -1))
            parts = fused.split([H // KV * E, H // KV * E, E, E], dim=1)
            assert all(torch.equal(a.flatten(0, 1), b) for a, b in zip(parts, (q, gate, k, v), strict=True))
        assert torch.equal(megatron[f"{path}.linear_proj.weight"], state[f"{path}.o_proj.weight"])
        assert f"{path}.q_norm.weight" in megatron
        assert not any(name.startswith((f"{path}.q_proj", f"{path}.o_proj", f"{path}.attn_gate")) for name in megatron)
    assert "model.layers.0.mlp.gate_proj.weight" in megatron


def test_the_folder_around_the_tensors(tmp_path: Path) -> None:
    source = store(tmp_path / "src", weights(), gated_attn={"spec": "output:elementwise", "layout": "separate"})
    (source / "original").mkdir()
    (source / "original" / "params.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"old")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("")
    done = convert_checkpoint(source, tmp_path / "new" / "dst", None, "flat")
    target = tmp_path / "new" / "dst"
    assert [path.name for path in target.parent.iterdir()] == ["dst"]
    config = json.loads((target / CONFIG).read_text())
    assert config == {
        **SIZES, "gated_attn": {"spec": "output:elementwise", "layout": "flat", "width": "elementwise"}
    }  # fmt: skip
    assert (target / "tokenizer.json").exists()
    assert (target / "original" / "params.json").exists()
    assert not (target / "pytorch_model.bin").exists()
    assert not (target / ".git").exists()
    assert "pytorch_model.bin" in done.notes[0]
    index = json.loads((target / INDEX).read_text())
    state = load(target)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert index["metadata"] == {"total_parameters": 5, "total_size": size}
    for name, file in index["weight_map"].items():
        with safe_open(target / file, "pt") as handle:
            assert name in handle.keys()  # noqa: SIM118 - not a mapping
            assert handle.metadata() == {"format": "pt"}
    assert set(index["weight_map"]) == set(state)
    assert done.tensors == len(state)


def test_a_single_file_needs_no_index_and_gets_none(tmp_path: Path) -> None:
    state = weights("headwise")
    store(tmp_path / "src", state, shards=1)
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", "separate", "tail_rows", width="headwise")
    assert sorted(path.name for path in (tmp_path / "dst").iterdir()) == [CONFIG, "model.safetensors", "tokenizer.json"]
    convert_checkpoint(tmp_path / "dst", tmp_path / "back", None, "separate")
    assert_same(load(tmp_path / "back"), state)


def test_a_shard_that_has_given_everything_away_is_not_written(tmp_path: Path) -> None:
    state = weights()
    source = store(tmp_path / "src", state)
    index = json.loads((source / INDEX).read_text())
    gates = {name: tensor for name, tensor in state.items() if "attn_gate" in name}
    for file in source.glob("*.safetensors"):
        save_file({k: v for k, v in load_file(file).items() if k not in gates}, file)
    save_file(gates, source / "gates.safetensors")
    index["weight_map"] |= dict.fromkeys(gates, "gates.safetensors")
    (source / INDEX).write_text(json.dumps(index))
    done = convert_checkpoint(source, tmp_path / "dst", "separate", "per_head", width="elementwise")
    assert done.shards == 4
    assert not (tmp_path / "dst" / "gates.safetensors").exists()
    convert_checkpoint(tmp_path / "dst", tmp_path / "back", None, "separate")
    assert_same(load(tmp_path / "back"), state)


def test_it_holds_one_shard_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live: dict[int, int] = {}
    peak = 0

    class Counted:
        """`safe_open`, with the bytes of the tensors that are still alive."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.handle = safe_open(*arguments, **options)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None:
            self.handle.__exit__(None, None, None)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def get_tensor(self, name: str) -> Tensor:
            nonlocal peak
            tensor = self.handle.get_tensor(name)
            live[id(tensor)] = tensor.nbytes
            weakref.finalize(tensor, live.pop, id(tensor))
            peak = max(peak, sum(live.values()))
            return tensor

    state = weights()
    source = store(tmp_path / "src", state, shards=7)
    monkeypatch.setattr(checkpoint, "safe_open", Counted)
    convert_checkpoint(source, tmp_path / "dst", "separate", "group_qgkv", width="elementwise")
    module = sum(t.nbytes for name, t in state.items() if name.startswith("model.layers.0.self_attn"))
    largest = max(sum(t.nbytes for t in load_file(file).values()) for file in source.glob("*.safetensors"))
    assert 0 < peak <= largest + module
    assert peak < sum(tensor.nbytes for tensor in state.values()) / 2


def test_layers_without_a_gate_are_named_by_the_recorded_spec(tmp_path: Path) -> None:
    state = {name: t for name, t in weights().items() if "layers.1.self_attn.attn_gate" not in name}
    note = {"spec": "output:elementwise,layers=0,2", "layout": "separate"}
    source = store(tmp_path / "src", state, gated_attn=note)
    for layout in ("group_qgkv", "per_head", "g_proj"):
        convert_checkpoint(source, tmp_path / layout, None, layout)
        convert_checkpoint(tmp_path / layout, tmp_path / f"{layout}-back", None, "separate")
        assert_same(load(tmp_path / f"{layout}-back"), state)
    assert load(tmp_path / "per_head")["model.layers.1.self_attn.q_proj.weight"].shape == (H * E, D)
    extra = store(tmp_path / "extra", weights(), gated_attn=note)
    with pytest.raises(CheckpointError, match=r"1 unexpected tensors.*\n.*attn_gate\.proj.*without a gate"):
        convert_checkpoint(extra, tmp_path / "no", None, "flat")


def test_modules_chooses_by_path_and_copies_the_rest(tmp_path: Path) -> None:
    state = weights()
    vision = {f"vision.layers.0.attn.{name}.weight": torch.randn(9, 5) for name in ("q_proj", "k_proj", "v_proj")}
    source = store(tmp_path / "src", state | vision)
    with pytest.raises(
        CheckpointError, match=r"1 missing tensors(.|\n)*vision\.layers\.0\.attn\.attn_gate\.proj\.weight"
    ):
        convert_checkpoint(source, tmp_path / "no", "separate", "flat", width="elementwise")
    convert_checkpoint(source, tmp_path / "dst", "separate", "flat", width="elementwise", modules=r"^model\.")
    found = load(tmp_path / "dst")
    assert all(torch.equal(found[name], tensor) for name, tensor in vision.items())
    with pytest.raises(
        CheckpointError, match=r"no attention module of layout separate among \d+ tensors: no path that"
    ):
        convert_checkpoint(source, tmp_path / "no", "separate", "flat", width="elementwise", modules="audio")
    with pytest.raises(SpecError, match="not a regular expression"):
        convert_checkpoint(source, tmp_path / "no", "separate", "flat", width="elementwise", modules="(")


def without(name: str) -> Callable[[Path], None]:
    """Take a tensor out of its file and out of the index."""

    def change(folder: Path) -> None:
        edit_index(folder, lambda where: where.pop(name))
        for file in folder.glob("*.safetensors"):
            save_file({k: v for k, v in load_file(file).items() if k != name}, file)

    return change


def plus(name: str, tensor: Tensor, *, indexed: bool = True) -> Callable[[Path], None]:
    """Put a tensor into the last file."""

    def change(folder: Path) -> None:
        file = sorted(folder.glob("*.safetensors"))[-1]
        save_file({**load_file(file), name: tensor}, file)
        if indexed:
            edit_index(folder, lambda where: where.update({name: file.name}))

    return change


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


ATTENTION = "model.layers.1.self_attn"
BROKEN = {
    "a key projection is missing": (
        without(f"{ATTENTION}.k_proj.weight"), CheckpointError, r"1 missing tensors(.|\n)*layers\.1\.self_attn\.k_proj\.weight"),
    "a gate is missing": (
        without(f"{ATTENTION}.attn_gate.proj.weight"), CheckpointError, r"1 missing tensors(.|\n)*attn_gate\.proj\.weight"),
    "the index names a tensor that is not there": (
        lambda folder: edit_index(folder, lambda where: where.update({"ghost": sorted(where.values())[0]})),
        CheckpointError, r"1 missing tensors(.|\n)*ghost, in model-00001"),
    "a tensor is not in the index": (
        plus("stray", torch.ones(2), indexed=False), CheckpointError, "1 unexpected tensors(.|\n)*stray, not in model"),
    "a tensor is in two files": (
        plus("model.embed_tokens.weight", torch.ones(2), indexed=False), CheckpointError,
        "1 duplicate tensors(.|\n)*embed_tokens.* in model-00001.* and model-00004"),
    "a second gate of another layout": (
        plus(f"{ATTENTION}.g_proj.weight", torch.ones(H, D)), CheckpointError,
        r"1 unexpected tensors(.|\n)*g_proj\.weight: not a weight or bias of layout separate"),
    "a part of a gate that no layout has": (
        plus(f"{ATTENTION}.attn_gate.fill_HE", torch.ones(H, E)), CheckpointError, "1 unexpected(.|\n)*attn_gate.fill_HE"),
    "a quantised projection": (
        plus(f"{ATTENTION}.q_proj.weight_scale_inv", torch.ones(1)), CheckpointError, "1 unexpected(.|\n)*weight_scale_inv"),
    "a gate without queries": (
        plus("model.layers.9.other.attn_gate.proj.weight", torch.ones(H, D)), CheckpointError, "1 unexpected(.|\n)*layers.9"),
    "a gate with a bias beside queries without one": (
        plus(f"{ATTENTION}.attn_gate.proj.bias", torch.ones(H * E)), UnsupportedError,
        r"layers\.1\.self_attn\.\*\.bias: layout per_head keeps q, gate in one tensor, and q is missing beside gate"),
    "a gate of another dtype": (
        plus(f"{ATTENTION}.attn_gate.proj.weight", torch.ones(H * E, D)), GatedAttnError, r"duplicate|float32; beside q"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    change, error, message = BROKEN[case]
    source = store(tmp_path / "src", weights())
    change(source)
    with pytest.raises(error, match=message):
        convert_checkpoint(source, tmp_path / "dst", "separate", "per_head", width="elementwise")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_rows_that_do_not_fit_are_refused_with_both_numbers(tmp_path: Path) -> None:
    source = store(tmp_path / "src", weights("headwise"))
    with pytest.raises(
        ShapeError, match=r"layers\.0\.self_attn\.\*\.weight: gate .* has 8 rows; layout separate has 32"
    ):
        convert_checkpoint(source, tmp_path / "dst", "separate", "flat", width="elementwise")
    store(tmp_path / "other", weights("headwise"), num_key_value_heads=4)
    with pytest.raises(ShapeError, match=r"k of shape .* has 8 rows; layout separate has 16"):
        convert_checkpoint(tmp_path / "other", tmp_path / "dst", "separate", "flat", width="headwise")


def test_what_config_json_says_is_never_contradicted_or_guessed(tmp_path: Path) -> None:
    source = store(tmp_path / "src", weights(), gated_attn={"layout": "separate", "width": "elementwise"})
    refused: dict[str, tuple[Any, ...]] = {
        "--from g_proj contradicts config.json, which records layout 'separate'": ("g_proj", "flat", None),
        "--width headwise contradicts": (None, "flat", "headwise"),
    }
    for message, (before, after, width) in refused.items():
        with pytest.raises(SpecError, match=message):
            convert_checkpoint(source, tmp_path / "no", before, after, width=width)
    bare = store(tmp_path / "bare", weights())
    with pytest.raises(SpecError, match=r"records no layout.*never guessed.*pass --from"):
        convert_checkpoint(bare, tmp_path / "no", None, "flat", width="elementwise")
    with pytest.raises(SpecError, match=r"records no width.*pass --width"):
        convert_checkpoint(bare, tmp_path / "no", "separate", "flat")
    native = store(tmp_path / "native", weights(), model_type="qwen3_next")
    with pytest.raises(SpecError, match="reads model_type 'qwen3_next' as per_head, which contradicts layout separate"):
        convert_checkpoint(native, tmp_path / "no", "separate", "flat", width="elementwise")
    for spec in ("value:headwise", "output:headwise,rank=2", "output:shared"):
        odd = store(tmp_path / "odd", weights(), gated_attn={"layout": "separate", "spec": spec})
        with pytest.raises(UnsupportedError, match="has no layout"):
            convert_checkpoint(odd, tmp_path / "no", None, "flat")
        shutil.rmtree(odd)
    assert not (tmp_path / "no").exists()


def test_an_existing_target_is_left_alone_and_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = store(tmp_path / "src", weights())
    (tmp_path / "dst").mkdir()
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        convert_checkpoint(source, tmp_path / "dst", "separate", "flat", width="elementwise")
    with pytest.raises(CheckpointError, match="lies inside"):
        convert_checkpoint(source, source / "dst", "separate", "flat", width="elementwise")
    calls = []

    def full_disk(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save_file(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        convert_checkpoint(source, tmp_path / "new", "separate", "flat", width="elementwise")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


@pytest.mark.parametrize("fault", ["lost", "renamed", "cut"])
def test_the_check_after_writing_finds_what_the_plan_did_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def faulty(tensors: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
        if "model.norm.weight" in tensors:
            norm = tensors.pop("model.norm.weight")
            tensors |= {"renamed": {"norm": norm}, "cut": {"model.norm.weight": norm[:5].clone()}}.get(fault, {})
        save_file(tensors, *arguments, **options)

    store(tmp_path / "src", weights(), shards=1)
    monkeypatch.setattr(checkpoint, "save_file", faulty)
    message = {"lost": "1 missing", "renamed": "1 missing, 1 unexpected", "cut": "1 wrong"}[fault]
    with pytest.raises(CheckpointError, match=f"what was written has {message} tensors"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", "separate", "flat", width="elementwise")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none is not there, or no folder"):
        convert_checkpoint(tmp_path / "none", tmp_path / "dst", "separate", "flat", width="headwise")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        convert_checkpoint(tmp_path / "empty", tmp_path / "dst", "separate", "flat", width="headwise")
    source = store(tmp_path / "src", weights())
    (source / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"4 safetensors files and no model\.safetensors\.index\.json"):
        convert_checkpoint(source, tmp_path / "dst", "separate", "flat", width="elementwise")
    single = store(tmp_path / "single", weights(), shards=1)
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors"):
        convert_checkpoint(single, tmp_path / "dst", "separate", "flat", width="elementwise")
    (single / CONFIG).write_text('{"model_type": "ours"}')
    save_file(weights(), file)
    with pytest.raises(CheckpointError, match="needs num_attention_heads"):
        convert_checkpoint(single, tmp_path / "dst", "separate", "flat", width="elementwise")


def test_a_transformers_model_comes_back_with_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    torch.manual_seed(13)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=31, hidden_size=40, intermediate_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, layer_types=["full_attention", "linear_attention", "full_attention"], rope_parameters=rope,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=4,
    )  # fmt: skip
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "qwen", max_shard_size="20KB")
    assert (tmp_path / "qwen" / INDEX).exists()
    done = convert_checkpoint(tmp_path / "qwen", tmp_path / "g", "per_head", "g_proj", width="elementwise")
    assert done.modules == 2
    assert "transformers reads model_type 'qwen3_5_text' as per_head, so it refuses" in done.notes[0]
    gates = [name for name in load(tmp_path / "g") if name.endswith("g_proj.weight")]
    assert (
        gates == ["model.layers.0.self_attn.g_proj.weight", "model.layers.2.self_attn.g_proj.weight"] or len(gates) == 2
    )
    convert_checkpoint(tmp_path / "g", tmp_path / "back", None, "per_head")
    tokens = torch.randint(0, 31, (2, 11))
    again = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def saved(model_type: str, folder: Path, **config: Any) -> Any:
    """A tiny model of a type that has gates of its own, in two shards or more."""
    from tests.hf.test_native import build

    model = build(model_type, **config)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


@pytest.mark.parametrize(
    ("model_type", "config", "layout"),
    [
        ("qwen3_next", {}, "per_head"), ("afmoe", {}, "gate_proj"), ("lfm3", {}, "gate_proj"),
        ("laguna", {"gating": True}, "g_proj"), ("laguna", {"gating": "per-element"}, "g_proj"),
    ],
)  # fmt: skip
def test_what_the_table_of_native_gates_knows_need_not_be_said(
    tmp_path: Path, model_type: str, config: dict[str, Any], layout: str
) -> None:
    from gated_attn.hf.native import native_gates

    model = saved(model_type, tmp_path / "model", **config)
    width = next(iter(native_gates(model).values())).spec.width
    other = "headwise" if width == "elementwise" else "elementwise"
    done = invoke("convert", tmp_path / "model", tmp_path / "grouped", "--to", "per_kv_group", "--json")
    assert done.exit_code == 0, done.exception
    told = json.loads(done.stdout)
    assert (told["source"], told["target"], told["width"]) == (layout, "per_kv_group", width)
    with pytest.raises(SpecError, match=f"are {width}, which contradicts --width {other}"):
        convert_checkpoint(tmp_path / "model", tmp_path / "no", None, "flat", width=other)
    with pytest.raises(SpecError, match=f"as {layout}, which contradicts layout flat"):
        convert_checkpoint(tmp_path / "model", tmp_path / "no", "flat", "per_kv_group")


def test_the_readme_converts_the_models_that_it_names() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    line = next(line for line in readme.splitlines() if "`gated-attn convert" in line)
    assert "`gated-attn convert FOLDER OUT --to per_kv_group`" in line  # which the test above runs


@pytest.mark.parametrize("model_type", ["qwen3_next", "laguna", "afmoe", "lfm3"])
def test_a_model_whose_gates_lie_elsewhere_is_refused_until_they_are_back(tmp_path: Path, model_type: str) -> None:
    """Queries and gates that were read in the wrong rows would give wrong logits, and no error."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = saved(model_type, tmp_path / "model")
    own = convert_checkpoint(tmp_path / "model", tmp_path / "same", None, READ_AS[model_type][0])
    assert not own.notes
    before = json.loads((tmp_path / "model" / CONFIG).read_text())
    assert json.loads((tmp_path / "same" / CONFIG).read_text()) == before
    assert_same(load(tmp_path / "same"), load(tmp_path / "model"))
    done = convert_checkpoint(tmp_path / "model", tmp_path / "grouped", None, "per_kv_group")
    assert f"as {READ_AS[model_type][0]}, so it refuses {tmp_path / 'grouped'}" in done.notes[0]
    written = json.loads((tmp_path / "grouped" / CONFIG).read_text())
    assert written["model_type"] == MODEL_TYPE
    assert written["architectures"] == before["architectures"]
    assert written[KEY] == {"version": 1, "layout": "per_kv_group", "width": own.width, "base_config": before}
    for auto in (AutoConfig, AutoModelForCausalLM):  # gated_attn.hf is imported
        with pytest.raises(RecordError, match=f"in gate layout 'per_kv_group'.*--to {READ_AS[model_type][0]}"):
            auto.from_pretrained(tmp_path / "grouped")
    with pytest.raises((ValueError, OSError), match=r"pip install 'gated-attn\[hf\]'"):
        type(model).from_pretrained(tmp_path / "grouped")
    convert_checkpoint(tmp_path / "grouped", tmp_path / "flat", None, "flat")
    with pytest.raises(RecordError, match="in gate layout 'flat'"):
        AutoConfig.from_pretrained(tmp_path / "flat")
    back = convert_checkpoint(tmp_path / "flat", tmp_path / "back", None, READ_AS[model_type][0])
    assert not back.notes
    after = json.loads((tmp_path / "back" / CONFIG).read_text())
    assert (after, list(after)) == (before, list(before))
    assert_same(load(tmp_path / "back"), load(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokens = torch.randint(0, 31, (2, 11))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_lfm3_is_read_by_either_name_of_its_gate(tmp_path: Path) -> None:
    """Transformers renames it on the way to disk; what `export` writes has the module's own name."""
    from transformers import AutoModelForCausalLM

    model = saved("lfm3", tmp_path / "model")
    convert_checkpoint(tmp_path / "model", tmp_path / "g", None, "g_proj")
    assert (tmp_path / "g" / CONFIG).read_text() == (tmp_path / "model" / CONFIG).read_text()
    tokens = torch.randint(0, 31, (2, 11))
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "g")(tokens).logits, model(tokens).logits)
    assert convert_checkpoint(tmp_path / "g", tmp_path / "back", None, "gate_proj").source == "g_proj"
    assert_same(load(tmp_path / "back"), load(tmp_path / "model"))


def test_a_layout_recorded_by_hand_is_kept_true(tmp_path: Path) -> None:
    there = {"layout": "separate", "width": "elementwise"}
    source = store(tmp_path / "src", weights(), model_type="qwen3_next", gated_attn=there)
    convert_checkpoint(source, tmp_path / "flat", None, "flat")
    convert_checkpoint(tmp_path / "flat", tmp_path / "own", None, "per_head")
    assert json.loads((tmp_path / "own" / CONFIG).read_text()) == {
        **SIZES, "model_type": "qwen3_next", KEY: {**there, "layout": "per_head"}
    }  # fmt: skip


def test_a_fresh_interpreter_refuses_and_convert_needs_no_transformers(tmp_path: Path) -> None:
    saved("qwen3_5", tmp_path / "model")
    convert = (
        "import sys; sys.modules['transformers'] = None\n"
        "from gated_attn.hf.convert import convert_checkpoint\n"
        "convert_checkpoint(sys.argv[1], sys.argv[2], None, 'flat')"
    )
    subprocess.run([sys.executable, "-c", convert, tmp_path / "model", tmp_path / "flat"], check=True)
    load_it = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1])"
    stock = subprocess.run([sys.executable, "-c", load_it, tmp_path / "flat"], capture_output=True, text=True)
    assert stock.returncode == 1
    assert "pip install 'gated-attn[hf]', import gated_attn.hf" in stock.stderr


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


def test_the_command(tmp_path: Path) -> None:
    source = store(tmp_path / "src", weights("headwise"))
    there = ("--from", "separate", "--to", "per_kv_group", "--width", "headwise")
    text = invoke("convert", source, tmp_path / "dst", *there)
    assert text.exit_code == 0
    assert "separate -> per_kv_group, headwise: 3 attention modules" in text.stdout
    assert "0 missing, 0 unexpected, 0 duplicate" in text.stdout
    back = invoke("convert", tmp_path / "dst", tmp_path / "back", "--to", "separate", "--json")
    assert json.loads(back.stdout)["tensors"] == len(weights("headwise"))
    assert_same(load(tmp_path / "back"), weights("headwise"))
    again = invoke("convert", source, tmp_path / "dst", *there)
    assert again.exit_code != 0
    assert isinstance(again.exception, CheckpointError)
    assert all(layout in invoke("convert", "--help").stdout for layout in LAYOUTS)
    told = invoke("convert", "--layouts")
    assert told.exit_code == 0
    assert [line.split()[0] for line in told.stdout.splitlines()] == list(LAYOUTS)
    assert "per_head     q_proj = [q gate] per head; k_proj; v_proj   qwen3_next" in told.stdout


def test_a_model_with_attached_gates_goes_there_and_back(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from gated_attn.hf.attach import attach
    from gated_attn.hf.whole import load_pretrained

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=29,
    )
    model = attach(LlamaForCausalLM(config), "output:elementwise:sigmoid,layers=1")
    model.save_pretrained(tmp_path / "gated")
    there = convert_checkpoint(tmp_path / "gated", tmp_path / "fused", None, "per_head")
    assert (there.source, there.width, there.modules) == ("separate", "elementwise", 2)
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    assert fused["model.layers.1.self_attn.q_proj.weight"].shape == (48, 24)
    assert fused["model.layers.0.self_attn.q_proj.weight"].shape == (24, 24)
    with pytest.raises(GatedAttnError, match=r"in gate layout 'per_head'.*--to separate"):
        load_pretrained(tmp_path / "fused")
    convert_checkpoint(tmp_path / "fused", tmp_path / "back", None, "separate")
    ids = torch.arange(7)[None]
    assert torch.equal(load_pretrained(tmp_path / "back")(ids).logits, model(ids).logits)
    mixed = attach(LlamaForCausalLM(config), "output:elementwise:sigmoid")
    from gated_attn.hf.attach import attach_each, detach

    names = [f"model.layers.{i}.self_attn" for i in (0, 1)]
    attach_each(detach(mixed), dict(zip(names, ["paper", "paper-headwise"], strict=True))).save_pretrained(
        tmp_path / "mixed"
    )
    with pytest.raises(GatedAttnError, match="2 kinds of gates"):
        convert_checkpoint(tmp_path / "mixed", tmp_path / "no", None, "per_head")
