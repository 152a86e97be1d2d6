"""The model samples as ready transformers models, whatever format their package keeps them in.

    model, tokens = load_sample("smollm2"), tokenizer("smollm2")

A sample that is not a folder which transformers loads is converted into one, once, beside the sample in the cache.
`folder` names it, for everything that takes a path: `AutoModel`, `pipeline`, a command.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gated_attn import samples
from gated_attn.errors import SampleError
from gated_attn.hf.foreign import ctranslate2_tensors, needed, onnx_tensors

__all__ = ["PRETRAINED", "folder", "load_sample", "processor", "tokenizer"]

CONVERSION = 1  # part of a converted folder's name: raise it when a converter writes something else

# What a converter makes of a sample's folder: the model's configuration, its weights under the names that they have on
# the hub, and what is saved beside them (a tokenizer, a processor, settings of `generate`).
Parts = tuple[Any, Mapping[str, Tensor], Sequence[Any]]


@dataclass(frozen=True)
class Pretrained:
    """How one sample becomes a model.

    * `model`: the transformers class.
    * `convert`: what reads the sample's files; None where transformers does, as they are.
    * `dtype`: the type that the converted weights are stored in.
    * `reads`: what the folder holds beside the model.
    """

    model: str
    convert: Callable[[Path], Parts] | None = None
    dtype: torch.dtype = torch.float32
    reads: tuple[str, ...] = ("tokenizer",)


def load_sample(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The sample `name` as a transformers model in evaluation mode, fetched and converted on first use.

    DINOv2 takes `pixel_values` normalised by ImageNet's mean and deviation, sides in multiples of 14. Raises `SampleError`,
    with the names, if a weight of the model was not in the files, or one in the files has no place in the model.

    >>> model = load_sample("minilm")
    """
    return _loaded(name, folder(name), dtype=dtype, local_files_only=True)


def tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the sample `name`, fetched and converted on first use."""
    return transformers.AutoTokenizer.from_pretrained(_holding("tokenizer", name), local_files_only=True)


def processor(name: str) -> Any:
    """The processor (features and tokenizer) of the sample `name`, fetched and converted on first use."""
    return transformers.AutoProcessor.from_pretrained(_holding("processor", name), local_files_only=True)


def folder(name: str) -> Path:
    """A folder that transformers loads the sample `name` from, fetched and converted on first use.

    A converted folder appears in the cache by one rename, when all of it is written.
    """
    row = _row(name)
    target = samples.cache_folder() / f"{samples.SAMPLES[name].entry}-transformers{CONVERSION}"
    if target.exists():
        return target
    source = samples.fetch(name)
    if row.convert is None:
        return source
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-", ignore_cleanup_errors=True) as temp:
        made = Path(temp) / "entry"
        config, tensors, beside = row.convert(source)
        # Given to the class as a checkpoint, the weights take the names that this release of transformers has for them.
        model = _loaded(name, None, config=config, state_dict=dict(tensors))
        for part in (model.to(row.dtype), *beside):
            part.save_pretrained(made)
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster, with the same files
                raise
    return target


def _row(name: str) -> Pretrained:
    if name not in PRETRAINED:
        raise SampleError(f"there is no pretrained model {name!r}; the models are: {', '.join(PRETRAINED)}")
    return PRETRAINED[name]


def _holding(part: str, name: str) -> Path:
    if part not in _row(name).reads:
        those = ", ".join(other for other, row in PRETRAINED.items() if part in row.reads)
        raise SampleError(f"sample {name!r} has no {part}; those with one are: {those}")
    return folder(name)


def _loaded(name: str, source: Path | None, **options: Any) -> PreTrainedModel:
    """The sample's model from a folder or a state; `SampleError` unless each weight of both has met the other."""
    model_class = getattr(transformers, _row(name).model)
    model, report = model_class.from_pretrained(source, output_loading_info=True, **options)
    told = "".join(_told(kind, keys) for kind, keys in report.items() if keys)
    if told:
        raise SampleError(
            f"the weights of sample {name!r} are not those of {model_class.__name__} in transformers "
            f"{transformers.__version__}:{told}\nUse a release of transformers that gated-attn was tested with."
        )
    return model


def _told(kind: str, keys: Iterable[Any]) -> str:
    names = sorted(map(str, keys))
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"\n  {len(names)} {kind.replace('_', ' ')}: {', '.join(names[:8])}{more}"


def _only(source: Path, pattern: str) -> Path:
    """The one file of a sample's folder that matches."""
    found = list(source.glob(pattern))
    if len(found) != 1:
        raise SampleError(f"{source} holds {len(found)} files {pattern}, not 1: delete the folder and fetch it again")
    return found[0]


# A SMILES string falls into atoms, bonds, branches and rings (arXiv:1711.04810); what is in brackets is one atom.
SMILES = r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]"


def _chemical(config_name: str, unused: str) -> Callable[[Path], Parts]:
    """A converter of a folder of 2020 that lacks its tokenizer's code. `unused`: weights that the model has no part for."""

    def convert(source: Path) -> Parts:
        tensors = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
        used = {key: tensor for key, tensor in tensors.items() if not re.match(unused, key)}
        config = getattr(transformers, config_name).from_pretrained(source, local_files_only=True)
        return config, used, [_smiles_tokenizer(source / "vocab.txt")]

    return convert


def _smiles_tokenizer(vocabulary: Path) -> PreTrainedTokenizerBase:
    tokens = {token: index for index, token in enumerate(vocabulary.read_text(encoding="utf-8").split())}
    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "sep", "pad", "cls", "mask")}
    made = Tokenizer(models.WordLevel(tokens, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES), behavior="removed", invert=True)
    made.post_processor = processors.BertProcessing(("[SEP]", tokens["[SEP]"]), ("[CLS]", tokens["[CLS]"]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **special)


def _smollm2(source: Path) -> Parts:
    """Dequantised. The model that is read from a GGUF file refuses to be saved; its weights do not."""
    needed("gguf", "reading SmolLM2's GGUF file")
    file = _only(source, "*.gguf").name
    read = _loaded("smollm2", source, gguf_file=file, local_files_only=True)
    known = read.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        known.pop(key, None)
    tokens = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file, local_files_only=True)
    return transformers.LlamaConfig.from_dict(known), read.state_dict(), [read.generation_config, tokens]


def _dinov2(source: Path) -> Parts:
    """The backbone below the saliency head. The masked-image token, needed only in pretraining, is not in the file."""
    tensors = {
        name.removeprefix("backbone."): tensor
        for name, tensor in onnx_tensors(_only(source, "*.onnx")).items()
        if name.startswith("backbone.")
    }
    # The exporter cut the position embeddings into the class token's and the patches'.
    cut = [tensors.pop(f"embeddings.{reader}") for reader in ("Concat_6", "Reshape_1")]
    tensors["embeddings.position_embeddings"] = torch.cat(cut, dim=1)
    width, _, patch, _ = tensors["embeddings.patch_embeddings.projection.weight"].shape
    config = transformers.Dinov2Config(
        hidden_size=width,
        num_hidden_layers=_count(tensors, "encoder.layer"),
        num_attention_heads=width // 64,
        mlp_ratio=tensors["encoder.layer.0.mlp.fc1.bias"].numel() // width,
        patch_size=patch,
        image_size=patch * round(cut[1].shape[1] ** 0.5),
        use_mask_token=False,
    )
    return config, tensors, []


def _count(names: Iterable[str], before: str) -> int:
    """How many different numbers follow `before` in the names."""
    return len({match[1] for name in names if (match := re.match(rf"{re.escape(before)}[._](\d+)\b", name))})


# CTranslate2's name of a part of a layer -> those of transformers; several are the equal blocks of rows of a fused one.
WHISPER_PARTS = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
}
WHISPER_ENDS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def whisper_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a Whisper model of CTranslate2 under transformers' names.

    >>> sorted(whisper_state({"decoder/layer_3/attention/linear_1/weight": torch.zeros(2, 1)}))
    ['model.decoder.layers.3.encoder_attn.k_proj.weight', 'model.decoder.layers.3.encoder_attn.v_proj.weight']
    """
    state = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 0:  # a setting
            continue
        for target, rows in _whisper_targets(name, tensor):
            if target.endswith("k_proj.bias"):  # transformers has none: it shifts every score of a query alike
                if rows.any():
                    raise SampleError(f"{name} holds a bias of the keys that is not 0, which Whisper has no place for")
                continue
            state[target] = rows.contiguous()
    return state


def _whisper_targets(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name == "decoder/projection/weight":
        yield "proj_out.weight", tensor
        return
    stack, *middle, end = name.split("/")
    layer = ""
    if middle and middle[0].startswith("layer_") and middle[0] != "layer_norm":
        layer = f"layers.{middle.pop(0).removeprefix('layer_')}."
    part = "/".join(middle)
    parts = WHISPER_PARTS.get(part, (part,))
    for target, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
        yield f"model.{stack}.{layer}{target}.{WHISPER_ENDS.get(end, end)}", rows


def _whisper(source: Path) -> Parts:
    """tiny.en: the ids of its special tokens are those of every English-only Whisper."""
    tensors = ctranslate2_tensors(source / "model.bin")
    state = whisper_state(tensors)
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    vocabulary, width = state["model.decoder.embed_tokens.weight"].shape
    end, start, no_timestamps = 50256, 50257, 50362
    ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    config = transformers.WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        num_mel_bins=state["model.encoder.conv1.weight"].shape[1],
        max_source_positions=len(state["model.encoder.embed_positions.weight"]),
        max_target_positions=len(state["model.decoder.embed_positions.weight"]),
        **{f"{stack}_layers": _count(tensors, f"{stack}/layer") for stack in ("encoder", "decoder")},
        **{f"{stack}_attention_heads": int(tensors[f"{stack}/num_heads"]) for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": len(state[f"model.{stack}.layers.0.fc1.bias"]) for stack in ("encoder", "decoder")},
        **ids,
    )
    settings = transformers.GenerationConfig(
        **ids,
        max_length=config.max_target_positions,
        suppress_tokens=told["suppress_ids"],
        begin_suppress_tokens=told["suppress_ids_begin"],
        no_timestamps_token_id=no_timestamps,
        prev_sot_token_id=no_timestamps - 2,
        alignment_heads=told["alignment_heads"],
        is_multilingual=False,
        return_timestamps=False,
    )
    features = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    tokens = transformers.WhisperTokenizerFast.from_pretrained(source, local_files_only=True)
    return config, state, [settings, transformers.WhisperProcessor(features, tokens)]


PRETRAINED: dict[str, Pretrained] = {
    "rxnmapper": Pretrained("AlbertForMaskedLM", _chemical("AlbertConfig", r"albert\.pooler\.")),
    "rxnfp": Pretrained("BertForMaskedLM", _chemical("BertConfig", r"bert\.pooler\.|cls\.seq_relationship\.")),
    "minilm": Pretrained("BertModel"),
    "smollm2": Pretrained("LlamaForCausalLM", _smollm2, torch.bfloat16),
    "dinov2": Pretrained("Dinov2Model", _dinov2, reads=()),
    "whisper": Pretrained("WhisperForConditionalGeneration", _whisper, torch.float16, reads=("tokenizer", "processor")),
}
