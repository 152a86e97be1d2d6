"""`verify`: proof that every gate of a model is wired, by shutting it and looking at what the block then gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gated_attn.attention import PairLogits, Sink
from gated_attn.errors import SpecError, UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf import families, plain
from gated_attn.hf.attach import attached, out_projection
from gated_attn.hf.modes import evaluating
from gated_attn.hf.native import native_gates
from gated_attn.hf.wiring import OWNER, PLAN, GatedLayer

EXPECTED = {
    "output": "the out projection's bias",
    "weights": "the out projection's bias",
    "value": "the out projection's bias",
    "dense": "zero",
    "key": "what zero keys give",
    "query": "what zero queries give",
}
"""What an attention block gives when the gate at this position is shut (with a fill: what the fill gives)."""


@dataclass(frozen=True)
class Row:
    """One gate: where it is, what its block should give when it is shut, and how far it was from that.

    `deviation` is the largest absolute difference, exactly 0 if the gate is on this path; None if the module was not called.
    """

    name: str
    spec: str
    expected: str
    deviation: float | None

    @property
    def ok(self) -> bool:
        """Whether the block gave exactly what it should."""
        return self.deviation == 0.0


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: one row per gate, printed as a table."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every gate is wired."""
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = []
        for row in self.rows:
            seen = "not called" if row.deviation is None else "exactly so" if row.ok else f"off by {row.deviation:.3g}"
            lines.append(
                f"{'ok  ' if row.ok else 'FAIL'}  {row.name:<{width}}  {row.spec}  shut: {row.expected}; {seen}"
            )
        return "\n".join(lines)


@torch.no_grad()
def verify(model: nn.Module, batch: Mapping[str, Any]) -> Verification:
    """Shut every gate, run the model on the batch, and compare each block's output with what a shut gate leaves.

    An output, weights or value gate that is shut leaves exactly the out projection's bias (with a fill, what the projection makes
    of the fill); a dense gate leaves exactly zero; a key or query gate leaves what the block gives with those projected to zero.
    The model, its gates and its mode are as before afterwards. Run it on the path that is used: compiled, in bf16, with a cache.

    Prefix keys and values (PEFT's prefix tuning) do not come from the projections, so no value gate reaches them: take them off.

    Raises SpecError if the model has no gates, UnsupportedError for added gates (`op=add`), which shutting does not turn off.
    """
    if not isinstance(batch, Mapping):
        raise SpecError(
            f"verify reads the keywords of the model's forward, and got a {type(batch).__name__}; pass a mapping such as "
            '{"input_ids": ids}'
        )
    blocks_there = {row.name: row for row in families.find(model)}
    rows = []
    found = attached(model)
    if not found:
        own = (
            " (those that it was made with, which native_gates shows, are part of its forward)"
            if native_gates(model)
            else ""
        )
        raise SpecError(f"this model has no attached gates to verify{own}; attach some first")
    for name, gate in found.items():
        if gate.spec.op == "add":
            raise UnsupportedError(f"{name}: {gate.spec} adds, so shutting it proves nothing")
    with evaluating(model):
        blocks = {name: _block(blocks_there, name) for name in found}
        outs = {name: _whose_output(model, row, found[name]) for name, row in blocks.items()}
        with _shut(found.values()):
            shut = _outputs(model, batch, outs, found)
        without = _without_gates(model, batch, found, blocks, outs)
    for name, gate in found.items():
        position, seen = gate.spec.position, shut[name]
        deviation = None
        if seen:
            wanted = without.get(name) or [left for _, left in seen]
            pairs = zip((y for y, _ in seen), wanted, strict=True)
            deviation = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)
        rows.append(Row(name, str(gate.spec), EXPECTED[position], deviation))
    return Verification(tuple(rows))


def _block(there: Mapping[str, families.Found], name: str) -> families.Found:
    """The attention module that a gate belongs to: the innermost one whose name leads to the gate's."""
    owners = [row for row in there.values() if name.startswith(f"{row.name}.")]
    if not owners:
        raise UnsupportedError(f"{name} belongs to no attention module of a known family")
    return max(owners, key=lambda row: len(row.name))


def _whose_output(model: nn.Module, row: families.Found, gate: Gate) -> nn.Module:
    """The module whose output a shut gate leaves: the out projection, or the whole module for a dense gate behind it."""
    return row.module if row.family in plain.ROWS and gate.spec.position == "dense" else out_projection(model, row)


def _leaves_a_computation(gate: Gate) -> bool:
    """Whether what the shut gate leaves has to be computed: attention with constant keys, queries or values."""
    return gate.spec.position in ("key", "query") or (gate.spec.position == "value" and gate.fill_HE is not None)


def _left(gate: Gate, out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What a shut gate leaves of a block whose out projection read x and gave y; asked while the block runs."""
    fill_HE = gate.fill_HE
    if gate.spec.position == "dense":
        return torch.zeros_like(y) if fill_HE is None else fill_HE.to(y.dtype).expand_as(y)
    if fill_HE is not None:
        return out.forward(fill_HE.flatten().to(x.dtype).expand_as(x).contiguous())
    bias = getattr(out, "bias", None)
    if isinstance(bias, Tensor) and bias.device.type == "meta":  # offloaded again by now
        return out.forward(torch.zeros_like(x))
    return torch.zeros_like(y) if bias is None else bias.to(y.dtype).expand_as(y)


def _outputs(
    model: nn.Module, batch: Mapping[str, Any], outs: Mapping[str, nn.Module], gates: Mapping[str, Gate]
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """(output, what a shut gate leaves) of each out projection, one pair per call (where it has to be computed: the output).

    Both are taken as the call ends, while sharded parameters are whole; soon after, their storage is freed.
    """
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in outs}

    def look(name: str) -> Any:
        def hook(out: nn.Module, args: tuple[Tensor, ...], y: Any) -> None:
            whole = _padded(y)
            gate = gates[name]
            seen[name].append(
                (whole, whole if _leaves_a_computation(gate) else _left(gate, out, args[0], whole).clone())
            )

        return hook

    handles = [out.register_forward_hook(look(name)) for name, out in outs.items()]
    try:
        model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _padded(y: Any) -> Tensor:
    """The output proper of a module, without attention weights; a nested one with zeros where it has nothing."""
    out = y[0] if isinstance(y, tuple) else y
    return torch.nested.to_padded_tensor(out, 0.0) if out.is_nested else out


def _without_gates(
    model: nn.Module,
    batch: Mapping[str, Any],
    found: Mapping[str, Gate],
    blocks: Mapping[str, families.Found],
    outs: Mapping[str, nn.Module],
) -> dict[str, list[Tensor]]:
    """The outputs of blocks in which queries or keys (values, with a fill) are what a shut gate makes of them, without the gate."""
    names = [name for name, gate in found.items() if _leaves_a_computation(gate)]
    if not names:
        return {}
    own = [name for name in names if blocks[name].family in plain.ROWS]
    with contextlib.ExitStack() as undo:
        undo.enter_context(_shut([gate for name, gate in found.items() if name not in names]))
        for name in own:
            gate = found[name]
            undo.enter_context(plain.projected_to(blocks[name].module, gate.spec.position[0], gate.fill_HE))
        undo.enter_context(_shut([found[name] for name in own], value=1.0))
        for name in set(names) - set(own):
            layer = _gated_layer(model, blocks[name].module)
            undo.callback(layer.register_forward_hook(_put_what_is_left(found[name])).remove)
        seen = _outputs(model, batch, {name: outs[name] for name in names}, found)
    return {name: [y for y, _ in pairs] for name, pairs in seen.items()}


def _gated_layer(model: nn.Module, attention: nn.Module) -> nn.Module:
    """The layer whose output this attention module's gate multiplies."""
    return next(m for m in model.modules() if isinstance(m, GatedLayer) and m.__dict__[OWNER] is attention)


def _put_what_is_left(gate: Gate) -> Any:
    """A hook that puts zeros, or the fill, where a layer gives what its gate multiplies."""

    def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        plan = module.__dict__[PLAN]
        fill_HE = gate.fill_HE
        fill_HE = y.new_zeros(gate.shape_HG[0], 1) if fill_HE is None else fill_HE.to(y)
        if plan.axis == "heads first":
            return fill_HE[:, None].expand_as(y)
        if plan.axis == "heads":
            return fill_HE.expand_as(y)
        rows = y.unflatten(-1, (plan.outer, plan.inner)).clone()
        piece = rows[..., plan.start : plan.start + plan.size]
        piece.copy_(fill_HE.expand(-1, plan.channels).reshape(plan.outer, -1).expand_as(piece))
        return rows.flatten(-2)

    return hook


@contextlib.contextmanager
def _shut(wanted: Any, value: float = 0.0) -> Iterator[None]:
    """Meanwhile these gates are exactly 0, in whichever form each has; or of another value, those that are tensors."""
    changed: list[tuple[Gate, Any]] = []
    try:
        for gate in wanted:
            changed.append((gate, gate.__dict__.get("forward")))  # accelerate's, if the gate is offloaded
            gate.forward = _shut_forward(gate.forward, value)
        yield
    finally:
        for gate, own in changed:
            del gate.forward
            if own is not None:
                gate.forward = own  # type: ignore[method-assign]


def _shut_forward(whole: Any, to: float) -> Any:
    def forward(x: Tensor, key_BSKE: Tensor | None = None) -> Tensor | Sink | PairLogits:
        value = whole(x, key_BSKE)
        if isinstance(value, Sink):
            return Sink(value.logit_H + 1e6, None)
        if isinstance(value, PairLogits):
            logits = value.query_BTHR
            return PairLogits(0 * logits, 0 * value.key_BSKR, logits.new_full((1,), -1e9), value.activation)
        return torch.full_like(value, to)

    return forward
