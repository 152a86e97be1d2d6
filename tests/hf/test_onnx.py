"""ONNX files answer as PyTorch does, at other sizes than they were written at, and fully masked rows are 0 in them too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gated_attn.errors import MissingExtraError, UnsupportedError, VerificationError
from gated_attn.models.decoder import Decoder, DecoderConfig
from gated_attn.nn import GatedAttention, GatedMultiheadAttention, GatedTransformerBlock, Rope

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from gated_attn.hf import onnx as writing  # noqa: E402
from gated_attn.hf.onnx import to_onnx  # noqa: E402
from tests.hf.tiny import spread, wake  # noqa: E402


def awake(model: nn.Module) -> Any:
    return wake(spread(model, seed=5)).eval()


def attention(gate: str, **options: Any) -> GatedAttention:
    sizes = {"kv_heads": 2, "head_dim": 8, "rope": Rope(8), "causal": True, "qk_norm": True}
    return awake(GatedAttention(40, 6, gate=gate, **(sizes | options)))


def ran(path: Path, **inputs: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])


def small_decoder(gate: str) -> Decoder:
    sizes = {"vocab_size": 31, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 8, "dim": 40, "ffn_dim": 24}
    return awake(Decoder(DecoderConfig(gate=gate, qk_norm=True, **sizes)))


@pytest.mark.parametrize(
    "gate", ["output:headwise:2sigmoid", pytest.param("output:elementwise:softplus,layers=1", marks=pytest.mark.slow)]
)
def test_the_decoder_at_other_sizes_and_padded(gate: str, tmp_path: Path) -> None:
    model = small_decoder(gate)
    report = to_onnx(model, tmp_path / "model.onnx")
    assert (report.inputs, report.outputs, report.opset) == (("input_ids", "attention_mask"), ("logits",), 18)
    assert report.error <= 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert [o.version for o in onnx.load(report.path).opset_import if o.domain in ("", "ai.onnx")] == [18]
    assert model.layers[0].attn.impl == "auto"
    for batch, length in ((1, 1), (5, 2), (2, 37)):
        ids, mask = torch.randint(31, (batch, length)), torch.ones(batch, length, dtype=torch.int64)
        mask[0, : length // 3] = 0
        mask[-1, length - length // 3 :] = 0
        with torch.no_grad():
            want = model(ids, attention_mask=mask).logits
        got = ran(report.path, input_ids=ids, attention_mask=mask)
        assert (got - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize(
    "gate",
    [
        "output:headwise:sigmoid",
        pytest.param("output:elementwise:sigmoid,fill", marks=pytest.mark.slow),
        pytest.param("output:headwise:sigmoid,source=lse", marks=pytest.mark.slow),
        pytest.param("weights:pairwise:sigmoid,bias=1", marks=pytest.mark.slow),
        pytest.param("output:headwise:sigmoid,top_k=2", marks=pytest.mark.slow),
        pytest.param("value:elementwise:sigmoid", marks=pytest.mark.slow),
    ],
)
def test_attention_with_masked_rows(gate: str, tmp_path: Path) -> None:
    model = attention(gate, window=None if "pairwise" in gate else 4)
    report = to_onnx(model, tmp_path / "attention.onnx")
    x, mask = torch.randn(3, 7, 40), torch.rand(3, 1, 7, 7) < 0.5
    mask[0], mask[1, :, 3] = False, False
    with torch.no_grad():
        want = model(x, mask=mask)
    got = ran(report.path, x=x, mask=mask)
    assert (got - want).abs().max() <= 1e-4
    if "fill" not in gate:
        assert not got[0].any()
        assert not got[1, 3].any()
        assert got[2].any()


@pytest.mark.slow
def test_other_modules(tmp_path: Path) -> None:
    block = awake(GatedTransformerBlock(40, 5, gate="paper", rope=Rope(8)))
    assert to_onnx(block, tmp_path / "block.onnx").inputs == ("x", "mask")
    for batch_first in (True, False):
        model = awake(GatedMultiheadAttention(40, 5, batch_first=batch_first, kdim=7, vdim=9, bias=False))
        report = to_onnx(model, tmp_path / f"{batch_first}.onnx")
        q, k, v = torch.randn(2, 3, 40), torch.randn(2, 11, 7), torch.randn(2, 11, 9)
        hidden = torch.rand(2, 11) < 0.4
        hidden[1] = True
        q, k, v = (t if batch_first else t.transpose(0, 1) for t in (q, k, v))
        got = ran(report.path, query=q.contiguous(), key=k.contiguous(), value=v.contiguous(), key_padding_mask=hidden)
        with torch.no_grad():
            want = model(q, k, v, key_padding_mask=hidden, need_weights=False)[0]
        assert (got - want).abs().max() <= 1e-4
        assert not (got if batch_first else got.transpose(0, 1))[1].any()


class Logits(nn.Module):
    """The decoder as tensors in, tensor out: torch.export knows no DecoderOutput."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids, attention_mask=attention_mask).logits


def test_torch_export_of_the_decoder_serves_other_sizes() -> None:
    model = Logits(small_decoder("output:elementwise:sigmoid"))
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    inputs = (torch.randint(31, (2, 5)), torch.ones(2, 5, dtype=torch.int64))
    program = torch.export.export(model, inputs, dynamic_shapes=(axes, axes)).module()
    ids, mask = torch.randint(31, (3, 11)), torch.ones(3, 11, dtype=torch.int64)
    mask[0, :4], mask[2, 7:] = 0, 0
    torch.testing.assert_close(program(ids, mask), model(ids, mask))


def test_a_file_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attention("output:headwise")
    right = writing._with_impl

    def damaged(module: nn.Module, impl: str) -> nn.Module:
        copied: Any = right(module, impl)
        if impl == "reference":
            with torch.no_grad():
                copied.attn_gate.proj.weight.neg_()
        return copied

    monkeypatch.setattr(writing, "_with_impl", damaged)
    with pytest.raises(VerificationError, match="onnxruntime differs from PyTorch"):
        to_onnx(model, tmp_path / "attention.onnx")
    assert not list(tmp_path.iterdir())


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="cannot write a Linear as ONNX; pass one of: Decoder, "):
        to_onnx(nn.Linear(2, 2), tmp_path / "x.onnx")
    monkeypatch.setattr(writing, "LARGEST", 1000)
    with pytest.raises(UnsupportedError, match="one ONNX file holds"):
        to_onnx(attention("output:headwise"), tmp_path / "x.onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"needs onnxscript.*gated-attn\[onnx\]"):
        to_onnx(attention("output:headwise"), tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_attached_model_is_what_torch_itself_exports(tmp_path: Path) -> None:
    """The refusal says so: the graph gives the model's logits, gates and all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from gated_attn.hf.attach import attach

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=40, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=5,
        intermediate_size=29, use_cache=False,
    )  # fmt: skip
    model = attach(LlamaForCausalLM(config), "output:headwise").eval()
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM.*torch\.onnx\.export and torch\.export work"):
        to_onnx(model, tmp_path / "no.onnx")
    inputs = torch.randint(31, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    inputs[1][0, :3] = 0
    plain = torch.export.export(Logits(model), inputs).module()(*inputs)
    with writing._quiet():
        program = torch.onnx.export(Logits(model).eval(), inputs, dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    program.save(tmp_path / "llama.onnx")
    with torch.no_grad():
        want, mask = Logits(model)(*inputs), inputs[1].bool()
    assert torch.equal(plain[mask], want[mask])
    session = onnxruntime.InferenceSession(tmp_path / "llama.onnx", providers=["CPUExecutionProvider"])
    got = torch.from_numpy(
        session.run(
            None, dict(zip((one.name for one in session.get_inputs()), (t.numpy() for t in inputs), strict=True))
        )[0]
    )
    assert (got - want)[mask].abs().max() <= 1e-4
