"""The model samples load whole, from whatever format they come in; what does not fit is named."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.functional import normalize

from gated_attn import samples
from gated_attn.errors import MissingExtraError, SampleError
from gated_attn.hf import pretrained
from gated_attn.hf.foreign import ctranslate2_tensors, onnx_tensors
from gated_attn.hf.pretrained import PRETRAINED, folder, load_sample, processor, tokenizer, whisper_state

# The fraction of a bf16 number that one rounding may move it by.
BF16 = 2.0**-8

DTYPES = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.float16: 4, torch.bfloat16: 5}


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def ctranslate2_bytes(tensors: dict[str, torch.Tensor], aliases: dict[str, str] | None = None, version: int = 6):
    raw = struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, len(tensors))
    for name, tensor in tensors.items():
        data = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        shape = struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)
        raw += text(name) + shape + struct.pack("<BI", DTYPES[tensor.dtype], len(data)) + data
    raw += struct.pack("<I", len(aliases or {}))
    return raw + b"".join(text(alias) + text(target) for alias, target in (aliases or {}).items())


TENSORS = {f"t/{i}": torch.arange(6).reshape(3, 2).to(dtype) for i, dtype in enumerate(DTYPES)} | {
    "decoder/num_heads": torch.tensor(6, dtype=torch.int16)
}


def test_ctranslate2_reads_every_type_and_every_alias(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(ctranslate2_bytes(TENSORS, {"again": "t/4"}))

    found = ctranslate2_tensors(file)

    assert list(found) == [*TENSORS, "again"]
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert found["again"] is found["t/4"]


def test_a_ctranslate2_file_cut_anywhere_is_refused(tmp_path):
    file = tmp_path / "model.bin"
    whole = ctranslate2_bytes(TENSORS, {"again": "t/4"})
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(SampleError, match="is not a whole CTranslate2 model of version 6"):
            ctranslate2_tensors(file)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (ctranslate2_bytes(TENSORS, version=5), "its version is 5"),
        (ctranslate2_bytes(TENSORS) + b"x", "1 bytes follow its end"),
        (ctranslate2_bytes(TENSORS, {"again": "nothing"}), "again stands for nothing, which it does not hold"),
        (
            ctranslate2_bytes({"a": torch.zeros(2)}).replace(b"\x01\x02\0\0\0\0", b"\x01\x03\0\0\0\0"),
            r"a of shape \[3\]",
        ),
        (ctranslate2_bytes({"a": torch.zeros(2)}).replace(b"\0\x08\0\0\0", b"\x09\x08\0\0\0"), "unknown dtype 9"),
    ],
)
def test_a_ctranslate2_file_that_is_not_understood_is_refused(tmp_path, raw, reason):
    (tmp_path / "model.bin").write_bytes(raw)

    with pytest.raises(SampleError, match=reason):
        ctranslate2_tensors(tmp_path / "model.bin")


def tiny_whisper() -> transformers.WhisperForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "d_model": 6, "num_mel_bins": 5, "max_source_positions": 7, "max_target_positions": 11}
    stacks = {"layers": 2, "attention_heads": 2, "ffn_dim": 13}
    both = {f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in stacks.items()}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 1)
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **both, **ids)).eval()


SELF_AND_FFN = {
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
CROSS = {
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
}


def as_ctranslate2(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What CTranslate2's converter writes of a Whisper model, written down apart from what reads it."""
    norm = {"gamma": "weight", "beta": "bias"}
    out = {f"{stack}/num_heads": torch.tensor(2, dtype=torch.int16) for stack in ("encoder", "decoder")}
    out |= {f"encoder/{c}/{e}": state[f"model.encoder.{c}.{e}"] for c in ("conv1", "conv2") for e in ("weight", "bias")}
    out["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    for stack in ("encoder", "decoder"):
        out[f"{stack}/position_encodings/encodings"] = state[f"model.{stack}.embed_positions.weight"]
        out |= {
            f"{stack}/layer_norm/{ours}": state[f"model.{stack}.layer_norm.{theirs}"] for ours, theirs in norm.items()
        }
        for layer in range(2):
            ours, theirs = f"{stack}/layer_{layer}", f"model.{stack}.layers.{layer}"
            parts = SELF_AND_FFN | (CROSS if stack == "decoder" else {})
            for name, fused in parts.items():
                for end in ("weight", "bias"):
                    rows = [state.get(f"{theirs}.{part}.{end}", torch.zeros(6)) for part in fused]  # keys have no bias
                    out[f"{ours}/{name}/{end}"] = torch.cat(rows)
            norms = {"self_attention": "self_attn_layer_norm", "ffn": "final_layer_norm"}
            if stack == "decoder":
                norms["attention"] = "encoder_attn_layer_norm"
            for part, name in norms.items():
                out |= {f"{ours}/{part}/layer_norm/{end}": state[f"{theirs}.{name}.{norm[end]}"] for end in norm}
    return out


def test_whisper_keeps_every_weight_bit_for_bit(tmp_path):
    state = {name: torch.randn_like(tensor) for name, tensor in tiny_whisper().state_dict().items()}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    file = tmp_path / "model.bin"
    file.write_bytes(
        ctranslate2_bytes(as_ctranslate2(state), {"decoder/projection/weight": "decoder/embeddings/weight"})
    )

    found = whisper_state(ctranslate2_tensors(file))

    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


def test_a_bias_of_the_keys_is_refused():
    tensors = as_ctranslate2(tiny_whisper().state_dict())
    tensors["encoder/layer_1/self_attention/linear_0/bias"][7] = 0.5

    with pytest.raises(SampleError, match="layer_1/self_attention/linear_0/bias holds a bias of the keys"):
        whisper_state(tensors)


def test_onnx_weights_take_their_names_from_the_nodes_that_read_them(tmp_path):
    onnx = pytest.importorskip("onnx", reason="reads an ONNX file")
    stored = {
        "enc.key.bias": torch.arange(3.0),
        "onnx::MatMul_7": torch.arange(6.0).reshape(2, 3),
        "onnx::Concat_9": torch.ones(1, 3),
        "onnx::MatMul_8": torch.arange(4.0).reshape(2, 2),
    }
    nodes = [
        ("MatMul", "/enc/key/MatMul", ["x", "onnx::MatMul_7"], "a"),
        ("Add", "/enc/key/Add", ["enc.key.bias", "a"], "b"),
        ("Concat", "/enc/Concat_1", ["onnx::Concat_9", "b"], "y"),
        ("MatMul", "/left/MatMul", ["onnx::MatMul_8", "x"], "z"),
    ]
    helper = onnx.helper
    graph = helper.make_graph(
        [helper.make_node(kind, given, [out], name=name) for kind, name, given, out in nodes],
        "tiny",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 3])],
        [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in stored.items()],
    )
    onnx.save(helper.make_model(graph), tmp_path / "tiny.onnx")

    found = onnx_tensors(tmp_path / "tiny.onnx")

    assert sorted(found) == ["enc.Concat_1", "enc.key.bias", "enc.key.weight", "left.MatMul"]
    assert torch.equal(found["enc.key.weight"], stored["onnx::MatMul_7"].T)
    assert torch.equal(found["enc.Concat_1"], stored["onnx::Concat_9"])
    assert torch.equal(found["left.MatMul"], stored["onnx::MatMul_8"])  # not a weight: it is the left factor


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)

    with pytest.raises(MissingExtraError, match=r"reading a\.onnx needs onnx, .* pip install 'gated-attn\[samples\]'"):
        onnx_tensors(tmp_path / "a.onnx")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match="reading SmolLM2's GGUF file needs gguf"):
        PRETRAINED["smollm2"].convert(tmp_path)


def test_wrong_names_list_the_right_ones():
    with pytest.raises(SampleError, match="no pretrained model 'gpt2'; the models are: rxnmapper, rxnfp, minilm"):
        load_sample("gpt2")
    with pytest.raises(SampleError, match=r"'minilm' has no processor; those with one are: whisper$"):
        processor("minilm")
    with pytest.raises(SampleError, match="'dinov2' has no tokenizer; those with one are: rxnmapper"):
        tokenizer("dinov2")


def test_every_model_sample_is_here():
    assert set(PRETRAINED) == {sample.name for sample in samples.SAMPLES.values() if sample.kind == "model"}


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Cl", "(", ")", "=", "O", ">>", "[Na+]"]


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """A cache that holds one sample, `rxnmapper`: an ALBERT of 13 words as its package keeps it, pooler and all."""
    monkeypatch.setenv("GATED_ATTN_CACHE", str(tmp_path))
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "embedding_size": 5, "hidden_size": 6, "intermediate_size": 7}
    config = transformers.AlbertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    source = tmp_path / samples.SAMPLES["rxnmapper"].entry
    config.save_pretrained(source)
    state = transformers.AlbertForMaskedLM(config).state_dict() | {"albert.pooler.weight": torch.ones(6, 6)}
    torch.save(state, source / "pytorch_model.bin")
    (source / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return source


def test_a_sample_is_converted_once_and_loads_without_its_source(tiny):
    state = torch.load(tiny / "pytorch_model.bin")
    first = load_sample("rxnmapper")
    for file in tiny.iterdir():
        file.unlink()
    tiny.rmdir()
    again = load_sample("rxnmapper", torch.bfloat16)

    assert not first.training
    assert first.state_dict().keys() == state.keys() - {"albert.pooler.weight"}
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, state[name]), name
        assert torch.equal(again.state_dict()[name], tensor.bfloat16()), name
    assert [file.name for file in tiny.parent.iterdir()] == [folder("rxnmapper").name]


def test_a_reaction_becomes_its_atoms_and_bonds(tiny):
    tokens = tokenizer("rxnmapper")
    encoded = tokens(["CC(=O)Cl>>[Na+]N", "C"], padding=True)

    assert tokens.convert_ids_to_tokens(encoded["input_ids"][0]) == (
        ["[CLS]", "C", "C", "(", "=", "O", ")", "Cl", ">>", "[Na+]", "[UNK]", "[SEP]"]
    )
    assert tokens.convert_ids_to_tokens(encoded["input_ids"][1])[:4] == ["[CLS]", "C", "[SEP]", "[PAD]"]
    assert encoded["attention_mask"][1] == [1] * 3 + [0] * 9


def test_weights_that_do_not_fit_are_named_and_nothing_is_kept(tiny):
    state = torch.load(tiny / "pytorch_model.bin")
    lost = "albert.encoder.embedding_hidden_mapping_in.bias"
    torch.save({**{key: value for key, value in state.items() if key != lost}, "extra.weight": torch.ones(1)},
               tiny / "pytorch_model.bin")  # fmt: skip

    with pytest.raises(SampleError, match=f"(?s)1 missing keys: {lost}.*1 unexpected keys: extra.weight\n"):
        load_sample("rxnmapper")

    assert [file.name for file in tiny.parent.iterdir()] == [tiny.name]


def test_two_processes_may_convert_at_once(tiny, monkeypatch):
    def the_other_is_faster(source):
        monkeypatch.setitem(PRETRAINED, "rxnmapper", row)
        folder("rxnmapper")
        return row.convert(source)

    row = PRETRAINED["rxnmapper"]
    slower = pretrained.Pretrained(row.model, the_other_is_faster)
    monkeypatch.setitem(PRETRAINED, "rxnmapper", slower)

    assert {file.name for file in folder("rxnmapper").iterdir()} >= {"config.json", "model.safetensors"}
    assert len(list(tiny.parent.iterdir())) == 2


# Below: the real models, where they are cached.

CONVERTERS_NEED = {"smollm2": "gguf", "dinov2": "onnx"}
SIZES = {
    "rxnmapper": 735_567,
    "rxnfp": 6_675_535,
    "minilm": 22_713_216,
    "smollm2": 134_515_008,
    "dinov2": 22_056_192,
    "whisper": 37_760_256,
}
slow_smollm2 = pytest.param("smollm2", marks=pytest.mark.slow)
REAL = [slow_smollm2 if name == "smollm2" else name for name in PRETRAINED]


def cached(name: str) -> Path:
    """The cached sample's folder, or a skip; its converter's package too, if it has yet to be converted."""
    found = samples.cached()[name]
    if found is None:
        pytest.skip(f"sample {name} is not cached: python -m gated_attn.samples fetch {name}")
    if name in CONVERTERS_NEED and not found.with_name(f"{found.name}-transformers{pretrained.CONVERSION}").exists():
        pytest.importorskip(CONVERTERS_NEED[name], reason=f"converting sample {name} needs it")
    return found


@pytest.mark.parametrize("name", REAL)
def test_real_model_loads_whole(name):
    cached(name)
    model = load_sample(name)

    assert type(model).__name__ == PRETRAINED[name].model
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name]
    assert not model.training
    assert model.dtype == torch.float32
    for key, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), key


@pytest.mark.parametrize("name", [name for name in REAL if name != "minilm"])
def test_real_model_converts_without_the_network(name, tmp_path, monkeypatch):
    source = cached(name)
    if name in CONVERTERS_NEED:
        pytest.importorskip(CONVERTERS_NEED[name], reason=f"converting sample {name} needs it")
    expected = load_sample(name).state_dict()
    (tmp_path / source.name).symlink_to(source, target_is_directory=True)
    monkeypatch.setenv("GATED_ATTN_CACHE", str(tmp_path))

    for key, tensor in load_sample(name).state_dict().items():
        assert torch.equal(tensor, expected[key]), key


@torch.no_grad()
def test_minilm_knows_what_is_alike():
    cached("minilm")
    sentences = ["A man plays the guitar.", "Someone makes music on a guitar.", "Shares fell sharply today."]
    batch = tokenizer("minilm")(sentences, padding=True, return_tensors="pt")
    shown_BT1 = batch["attention_mask"][..., None]
    mean_BD = (load_sample("minilm")(**batch).last_hidden_state * shown_BT1).sum(1) / shown_BT1.sum(1)
    alike_BB = normalize(mean_BD) @ normalize(mean_BD).T

    assert alike_BB[0, 1] > 0.7
    assert alike_BB[0, 2] < 0.2
    assert alike_BB[1, 2] < 0.2


@pytest.mark.parametrize(("name", "least"), [("rxnmapper", 0.9), ("rxnfp", 0.75)])
@torch.no_grad()
def test_reaction_models_restore_a_hidden_atom(name, least):
    cached(name)
    model, tokens = load_sample(name), tokenizer(name)
    reaction = "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F"
    ids = tokens(reaction, return_tensors="pt")["input_ids"][0]
    assert tokens.unk_token_id not in ids
    inner = torch.arange(1, len(ids) - 1)
    hidden = ids.repeat(len(inner), 1)
    hidden[inner - 1, inner] = tokens.mask_token_id
    best = model(hidden).logits[inner - 1, inner].argmax(-1)

    assert (best == ids[inner]).float().mean() >= least


@pytest.mark.slow
def test_smollm2_speaks_english():
    cached("smollm2")
    model, tokens = load_sample("smollm2"), tokenizer("smollm2")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    batch = tokens.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**batch, max_new_tokens=12, do_sample=False)[0, batch["input_ids"].shape[1] :]

    assert "The capital of France is Paris" in tokens.decode(answer)
    assert tokens.tokenize("12") == ["1", "2"]


@pytest.mark.slow
def test_smollm2_is_its_gguf_file_rounded_to_bf16():
    source = cached("smollm2")
    gguf = pytest.importorskip("gguf", reason="reads the original file")
    state = load_sample("smollm2").state_dict()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(next(source.glob("*.gguf"))).tensors}
    for name, key in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        exact = torch.tensor(gguf.quants.dequantize(stored[name].data, stored[name].tensor_type))
        assert ((state[key] - exact).abs() <= BF16 * exact.abs()).all(), name


@torch.no_grad()
def test_dinov2_equals_its_onnx_file():
    source = cached("dinov2")
    onnx = pytest.importorskip("onnx", reason="reads the original file")
    runtime = pytest.importorskip("onnxruntime", reason="runs the original file")
    whole = onnx.load(next(source.glob("*.onnx")))
    last = [node.output[0] for node in whole.graph.node if node.name.startswith("/backbone/layernorm/")][-1]
    whole.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    session = runtime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    torch.manual_seed(0)
    pixels = torch.randn(2, 3, 224, 224)
    (theirs,) = session.run([last], {"input_image": pixels.numpy()})
    model = load_sample("dinov2")
    ours = model(pixel_values=pixels).last_hidden_state
    exact = model.double()(pixel_values=pixels.double()).last_hidden_state

    error = (torch.from_numpy(theirs) - exact).abs().max()
    assert (ours - exact).abs().max() <= 2 * error + torch.finfo(torch.float32).eps * exact.abs().max()


@torch.no_grad()
def test_whisper_hears_nothing_in_silence():
    cached("whisper")
    model, parts = load_sample("whisper"), processor("whisper")
    heard = parts(torch.zeros(16_000).numpy(), sampling_rate=16_000, return_tensors="pt")
    said = model.generate(**heard, max_new_tokens=20)

    assert len(parts.batch_decode(said, skip_special_tokens=True)[0].split()) <= 3
    assert said[0, -1] == model.generation_config.eos_token_id or said.shape[1] < 10
    # Positions of the encoder are sines, then cosines, of falling frequency: a check that the rows are in order.
    angle = torch.arange(1500)[:, None] * 10_000 ** (-torch.arange(192) / 191)
    expected = torch.cat([angle.sin(), angle.cos()], dim=1)
    torch.testing.assert_close(model.model.encoder.embed_positions.weight, expected, atol=1e-3, rtol=0)
