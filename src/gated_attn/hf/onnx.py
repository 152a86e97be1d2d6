"""`to_onnx`: a gated model as an ONNX file for any batch and length, run once in onnxruntime and compared.

Shapes: B batch, T tokens, S keys, D model width.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gated_attn.codec import drafted
from gated_attn.errors import MissingExtraError, UnsupportedError, VerificationError
from gated_attn.gate import Gate
from gated_attn.models.decoder import Decoder
from gated_attn.nn.attention import GatedAttention
from gated_attn.nn.block import GatedTransformerBlock
from gated_attn.nn.multihead import GatedMultiheadAttention

TOLERANCE = 1e-4
"""Largest difference to PyTorch that is allowed, as a share of the largest output (or of 1, if that is smaller)."""

OPSET = 18
LARGEST = 1.8e9
"""Bytes of weights that fit into one file, below protobuf's limit of 2 GB."""


class Door(NamedTuple):
    """How a kind of module is called from a graph: tensor inputs, each with a name for every axis that may vary.

    call(module, *tensors) -> output; example(module, B, T, generator) -> tensors, of which rows are masked.
    """

    inputs: dict[str, tuple[str | None, ...]]
    output: str
    call: Callable[..., Tensor]
    example: Callable[[Any, int, int, torch.Generator], tuple[Tensor, ...]]


def _tokens(model: Decoder, batch: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    mask_BT = torch.ones(batch, tokens, dtype=torch.int64)
    mask_BT[0, : tokens // 2] = 0
    mask_BT[-1, tokens - tokens // 3 :] = 0
    return torch.randint(model.decoder_config.vocab_size, (batch, tokens), generator=generator), mask_BT


def _vectors(module: Any, batch: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    dim = module.dim if isinstance(module, GatedAttention) else module.attn.dim
    mask_B1TT = torch.rand(batch, 1, tokens, tokens, generator=generator) < 0.6
    mask_B1TT[0, :, tokens // 2 :] = False
    return torch.randn(batch, tokens, dim, generator=generator), mask_B1TT


def _memory(module: GatedMultiheadAttention, batch: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    keys = tokens + 3
    hidden_BS = torch.rand(batch, keys, generator=generator) < 0.4
    hidden_BS[0] = True
    sizes = ((tokens, module.embed_dim), (keys, module.kdim), (keys, module.vdim))
    q, k, v = (torch.randn(batch, *size, generator=generator) for size in sizes)
    return (q, k, v, hidden_BS) if module.batch_first else (*(t.transpose(0, 1) for t in (q, k, v)), hidden_BS)


_HIDDEN = {"x": ("batch", "tokens", None), "mask": ("batch", None, "tokens", "tokens")}
_FIRST, _KEYS = ("batch", "tokens", None), ("batch", "keys", None)

DOORS: dict[type[nn.Module], Door] = {
    Decoder: Door(
        {"input_ids": ("batch", "tokens"), "attention_mask": ("batch", "tokens")}, "logits",
        lambda m, input_ids, attention_mask: m(input_ids, attention_mask=attention_mask).logits, _tokens,
    ),
    GatedTransformerBlock: Door(_HIDDEN, "out", lambda m, x, mask: m(x, mask=mask), _vectors),
    GatedAttention: Door(_HIDDEN, "out", lambda m, x, mask: m(x, mask=mask), _vectors),
    GatedMultiheadAttention: Door(
        {"query": _FIRST, "key": _KEYS, "value": _KEYS, "key_padding_mask": ("batch", "keys")}, "out",
        lambda m, q, k, v, hidden: m(q, k, v, key_padding_mask=hidden, need_weights=False)[0], _memory,
    ),
}  # fmt: skip
"""Kind of module -> its inputs. Masks: attention_mask 1 at real tokens, mask True where a query attends, key_padding_mask True at
keys to hide (torch's polarity)."""


@dataclass(frozen=True)
class OnnxReport:
    """Where the file is, the names of its inputs and outputs, its opset, and the largest difference to PyTorch."""

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    error: float


class _Called(nn.Module):
    """A module behind its door, so that the graph has tensors only."""

    def __init__(self, module: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.call(self.module, *tensors)


def to_onnx(model: nn.Module, path: str | os.PathLike[str], *, opset: int = OPSET) -> OnnxReport:
    """Write `model`, in float32, to an ONNX file with dynamic batch and length, and run it in onnxruntime.

    The graph computes attention as the reference implementation does, whose fully masked rows are 0; how a runtime's own
    attention operator treats them is left to the runtime. Caches are not part of it.

    Args:
        model: a Decoder (input_ids, attention_mask -> logits), GatedAttention or GatedTransformerBlock (x, mask -> out), or
            GatedMultiheadAttention (query, key, value, key_padding_mask -> out). See `DOORS` for what masks mean.
        path: the file; it appears, or is replaced, when the result has been verified.
        opset: of ONNX; onnxruntime reads 18 since version 1.14.

    Raises:
        UnsupportedError: another kind of module, or more weights than one file holds.
        VerificationError: outputs at two other sizes, rows masked, differ from PyTorch's by more than `TOLERANCE`.
        MissingExtraError: onnx, onnxscript or onnxruntime is not installed.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        _package(package)
    door = next((door for kind, door in DOORS.items() if isinstance(model, kind)), None)
    if door is None:
        attached = any(isinstance(module, Gate) for module in model.modules())
        raise UnsupportedError(
            f"cannot write a {type(model).__name__} as ONNX; pass one of: {', '.join(kind.__name__ for kind in DOORS)}"
            + (
                "; torch.onnx.export and torch.export work on a model with attached gates as on the model itself"
                * attached
            )
        )
    if (size := 4 * sum(parameter.numel() for parameter in model.parameters())) > LARGEST:
        raise UnsupportedError(
            f"{size / 1e9:.1f} GB of float32 weights; one ONNX file holds {LARGEST / 1e9:.1f} GB at most"
        )
    source, plain = _with_impl(model, "auto"), _with_impl(model, "reference")
    called, generator = _Called(plain, door.call).eval(), torch.Generator().manual_seed(0)
    with _quiet():
        program = torch.onnx.export(
            called, door.example(plain, 2, 5, generator), dynamo=True, opset_version=opset, verbose=False,
            input_names=list(door.inputs), output_names=[door.output], dynamic_shapes=(_dynamic(plain, door),),
        )  # fmt: skip
    assert program is not None
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    with drafted(final, replace=True) as draft:
        program.save(draft)
        error = _compare(source, door, draft, generator)
    return OnnxReport(final, tuple(door.inputs), (door.output,), opset, error)


def _with_impl(model: nn.Module, impl: str) -> nn.Module:
    """A float32 copy on the CPU, in evaluation, whose attention this impl computes."""
    copied = copy.deepcopy(model).cpu().float().eval()
    module: Any
    for module in copied.modules():
        if hasattr(module, "impl"):
            module.impl = impl
    return copied


def _dynamic(module: Any, door: Door) -> tuple[dict[int, Any], ...]:
    """Each input's varying axes; for torch's length-first order the first two change places."""
    dims = {name: torch.export.Dim(name) for axes in door.inputs.values() for name in axes if name}
    swapped = getattr(module, "batch_first", True) is False
    order = [(axes[1], axes[0], *axes[2:]) if swapped and len(axes) == 3 else axes for axes in door.inputs.values()]
    return tuple({i: dims[name] for i, name in enumerate(axes) if name} for axes in order)


@torch.no_grad()
def _compare(source: nn.Module, door: Door, path: Path, generator: torch.Generator) -> float:
    session = _package("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = 0.0
    for batch, tokens in ((1, 1), (3, 11)):
        inputs = door.example(source, batch, tokens, generator)
        want = door.call(source, *inputs)
        fed = {name: tensor.numpy() for name, tensor in zip(door.inputs, inputs, strict=True)}
        got = torch.from_numpy(session.run(None, fed)[0])
        error = float((got - want).abs().max())
        if not error <= TOLERANCE * max(1.0, float(want.abs().max())):
            raise VerificationError(
                f"onnxruntime differs from PyTorch by up to {error:.3g} at batch {batch}, {tokens} tokens, where the largest "
                f"output is {float(want.abs().max()):.3g} and {TOLERANCE:g} of it is allowed; nothing was written"
            )
        worst = max(worst, error)
    return worst


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about itself: progress, packages it does without, its own deprecations."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingExtraError(name, "onnx", "writing ONNX") from None
