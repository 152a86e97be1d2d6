"""Where the attention of a model family is: one row per layout of an attention module of transformers.

A row names attributes and children; nothing is guessed from the shape of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from torch import nn

from gated_attn.hf.layouts import Sizes


@dataclass(frozen=True)
class Part:
    """Where one of queries, keys or values is projected: a child, or some of the rows of a fused one.

    `order` lists what the child's output holds, such as `qkv`; it lies one whole after the other (`flat`), or head by
    head (`per_head`: [q k v] of head 0, [q k v] of head 1, ...).
    """

    child: str
    order: str = ""
    layout: str = "flat"


@dataclass(frozen=True)
class Family:
    """One row: attention classes of the same layout. Sizes are paths of attributes from the module.

    Fields:
        classes: class names, as in transformers' modeling files; subclasses of theirs match too.
        q, k, v: where each is projected.
        out: the out projection; `../` leads to the module's parent.
        norm: what a key or query norm sees: `heads` (B, T, heads, width), `heads first` (B, heads, T, width) or `all`
            (B, T, heads * width); `norms` are their names. None: this family has none.
        cross: names of children under which such a module attends to a memory; `when` is an attribute that says so itself.
    """

    name: str
    classes: tuple[str, ...]
    heads: str = "config.num_attention_heads"
    kv_heads: str = "config.num_key_value_heads"
    head_dim: str = "head_dim"
    q: Part = Part("q_proj")
    k: Part = Part("k_proj")
    v: Part = Part("v_proj")
    out: str = "o_proj"
    norm: str | None = None
    norms: tuple[str, str] = ("q_norm", "k_norm")
    cross: tuple[str, ...] = ()
    when: str = ""


def _names(text: str) -> tuple[str, ...]:
    return tuple(f"{word}Attention" for word in text.split())


def _apart(q: str, k: str, v: str) -> dict[str, Any]:
    return {"q": Part(q), "k": Part(k), "v": Part(v)}


def _fused(child: str, layout: str = "flat") -> dict[str, Any]:
    return dict.fromkeys("qkv", Part(child, "qkv", layout))


def _own(prefix: str, head_dim: str = "head_dim") -> dict[str, Any]:
    """Sizes that the module itself knows, without key/value heads of their own."""
    return {"heads": prefix, "kv_heads": prefix, "head_dim": head_dim}


_MHA: dict[str, Any] = {"kv_heads": "config.num_attention_heads"}
_LLAMA = "Llama Mistral Mixtral Qwen2 Qwen2Moe Gemma Gemma2 SmolLM3 Granite GraniteMoe Olmo Starcoder2 GptOss Helium Ministral"
_BERT = tuple(
    f"{word}{kind}Attention" for word in ("Bert", "Roberta", "XLMRoberta", "Electra") for kind in ("Self", "Cross")
)
_BART = "Bart MBart Marian Pegasus M2M100 Whisper Wav2Vec2 Hubert OPT CLIP"

FAMILIES = (
    Family("llama", _names(_LLAMA)),
    Family("qwen3", _names("Qwen3 Qwen3Moe"), norm="heads"),
    Family("gemma3", _names("Gemma3"), norm="heads first"),
    Family("olmo2", _names("Olmo2 Olmo3"), norm="all"),
    Family("cohere", _names("Cohere"), norm="heads"),
    Family("phi", _names("Phi"), out="dense", norm="heads first", norms=("q_layernorm", "k_layernorm")),
    Family("phi3", _names("Phi3"), kv_heads="num_key_value_heads", **_fused("qkv_proj")),
    Family("gptj", _names("GPTJ"), **_own("num_attention_heads"), out="out_proj"),
    Family("gpt2", _names("GPT2"), **_own("num_heads"), **_fused("c_attn"), out="c_proj"),
    Family("gpt2 cross", _names("GPT2"), **_own("num_heads"), q=Part("q_attn"), k=Part("c_attn", "kv"), v=Part("c_attn", "kv"),
           out="c_proj", when="is_cross_attention"),
    Family("gpt_neox", _names("GPTNeoX"), **_MHA, head_dim="head_size", **_fused("query_key_value", "per_head"), out="dense"),
    Family("bert", _BERT, **_own("num_attention_heads", "attention_head_size"), **_apart("query", "key", "value"),
           out="../output.dense", cross=("crossattention",)),
    Family("albert", _names("Albert"), **_own("num_attention_heads", "attention_head_size"), **_apart("query", "key", "value"),
           out="dense"),
    Family("distilbert", ("DistilBertSelfAttention",), **_own("n_heads", "attention_head_size"),
           **_apart("q_lin", "k_lin", "v_lin"), out="out_lin"),
    Family("modernbert", _names("ModernBert"), **_MHA, **_fused("Wqkv"), out="Wo"),
    Family("vit", _names("ViT Dinov2 Swin"), **_own("num_attention_heads")),
    Family("t5", _names("T5 MT5"), **_own("n_heads", "key_value_proj_dim"), **_apart("q", "k", "v"), out="o",
           cross=("EncDecAttention",)),
    Family("bart", _names(_BART), **_own("num_heads"), out="out_proj", cross=("encoder_attn",)),
)  # fmt: skip
"""The rows, in the order in which they are tried; one with `when` goes before one without."""


class Found(NamedTuple):
    """An attention module in a model: its name, its row, `self` or `cross`, and which layer it is, counted from 0."""

    name: str
    module: nn.Module
    family: Family
    kind: str
    layer: int


def find(model: nn.Module) -> Iterator[Found]:
    """Every attention module of a known family, each once, in the model's order: of transformers, else of torch.nn and timm."""
    found = list(numbered(model, family_of, lambda module, family: family.when != ""))
    if not found:
        from gated_attn.hf import plain  # which needs attach, which needs this

        found = list(numbered(model, plain.family_of, plain.reads_a_memory))
    yield from found


def numbered(
    model: nn.Module,
    row_of: Callable[[nn.Module], Family | None],
    crosses: Callable[[nn.Module, Family], bool],
) -> Iterator[Found]:
    """The modules that have a row, with their kind and layer.

    The layer is the number in the module's name if there is one, and otherwise its place among those of the same pattern. The
    kind is cross where `crosses` says so, or a name of the row's.
    """
    seen: dict[str, int] = {}
    for name, module in model.named_modules():
        family = row_of(module)
        if family is None:
            continue
        words = name.split(".")
        pattern = ".".join("*" if word.isdigit() else word for word in words)
        place = seen[pattern] = seen.get(pattern, -1) + 1
        numbers = [int(word) for word in words if word.isdigit()]
        cross = crosses(module, family) or not set(words).isdisjoint(family.cross)
        yield Found(name, module, family, "cross" if cross else "self", numbers[0] if len(numbers) == 1 else place)


def family_of(module: nn.Module) -> Family | None:
    """The row of an attention module, or None."""
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("transformers.")}
    rows = [row for row in FAMILIES if not names.isdisjoint(row.classes)]
    said = [row for row in rows if row.when and getattr(module, row.when)]
    return next(iter(said or [row for row in rows if not row.when]), None)


def read(module: nn.Module, path: str) -> Any:
    """The attribute or child at a dotted path."""
    return reduce(getattr, path.split("."), module)


def sizes(module: nn.Module, family: Family) -> Sizes:
    """What the row's paths say about this module: its heads H, key/value heads K and head width E."""
    return Sizes(*(int(read(module, path)) for path in (family.heads, family.kv_heads, family.head_dim)))


def in_features(layer: nn.Module) -> int:
    """Width of what a linear layer reads; transformers' Conv1D calls it nx."""
    width: Any = layer.nx if hasattr(layer, "nx") else layer.in_features
    return int(width)
