"""`sharding_plan`: what each tensor-parallel rank holds of every parameter of a gated model.

The plan starts from the heads: rank r has query heads [r H/tp, (r+1) H/tp) and the key/value heads that those attend to. What
multiplies heads lies where they lie. Everything outside attention is replicated here; it may be sharded by the model's own plan.

Shapes: H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gated_attn.errors import ShapeError, UnsupportedError
from gated_attn.gate import Gate
from gated_attn.hf.groups import Attention, Rows, attentions, owner
from gated_attn.hf.layouts import fewest

PER_HEAD = {"relative_attention_bias.weight": 1, "relative_position_bias_table": 1, "sinks": 0}
"""Other parameters of attention modules with an axis of H entries: the end of the name, and which axis."""

OUTSIDE = ("LayerNorm.weight", "LayerNorm.bias", "q_down.weight", "q_down.bias", "q_latent_norm.weight")
"""Parameters of attention modules that see the whole width, before or after the heads."""


@dataclass(frozen=True)
class Shard:
    """What each rank holds of one parameter.

    Fields:
        kind: `colwise` (an output axis is cut), `rowwise` (an input axis is cut: the ranks' outputs are to be added, and then
            a replicated bias, once) or `replicated`.
        axis: which axis is cut; None where none is.
        ranks: per rank, the slices of that axis it holds, in ascending order; a fused projection keeps its layout.
        heads: per rank, role -> the heads it holds of that role.
        partial: each rank's gradient is a part, and the full one is their sum: KV heads that several ranks hold, and whatever
            all heads share.
    """

    kind: str
    axis: int | None = None
    ranks: tuple[tuple[slice, ...], ...] = ()
    heads: tuple[dict[str, range], ...] = ()
    partial: bool = False

    def take(self, tensor: Tensor, rank: int) -> Tensor:
        """The rank's piece of the full parameter, differentiably."""
        if self.axis is None:
            return tensor
        pieces = [tensor.narrow(self.axis, one.start, one.stop - one.start) for one in self.ranks[rank]]
        return torch.cat(pieces, self.axis)

    def join(self, pieces: Sequence[Tensor], *, gradients: bool = False) -> Tensor:
        """The full parameter from the ranks' pieces, or the full gradient from theirs."""
        if self.axis is None:
            return torch.stack(list(pieces)).sum(0) if gradients and self.partial else pieces[0].clone()
        size = max(one.stop for slices in self.ranks for one in slices)
        shape = list(pieces[0].shape)
        shape[self.axis] = size
        full = pieces[0].new_zeros(shape)
        for slices, piece in zip(self.ranks, pieces, strict=True):
            rows = torch.cat([torch.arange(one.start, one.stop) for one in slices]).to(piece.device)
            if gradients:
                full.index_add_(self.axis, rows, piece)
            else:
                full.index_copy_(self.axis, rows, piece)
        return full


def sharding_plan(model: nn.Module, tp: int) -> dict[str, Shard]:
    """Every parameter of the model -> its `Shard` over `tp` ranks, exactly once, in the model's order.

    A gate lies with the heads that it multiplies: output, query and weights gates with the query heads, value and key gates
    with the KV heads, replicated with them where K < tp. A dense gate is replicated and comes after the sum over ranks. A gate
    that all heads share, and the inner factor of a low-rank one, are replicated with partial gradients.

    Raises:
        ShapeError: heads that tp does not divide (KV heads: neither divides the other), or a gate of other heads than its
            attention, naming both numbers.
        UnsupportedError: a parameter in attention, such as an unknown gate, that the plan has no entry for; or one that needs
            all heads at once (top_k over heads, a norm over all of them).
    """
    if type(tp) is not int or tp < 1:
        raise ShapeError(f"tp={tp!r}: pass the number of tensor-parallel ranks, at least 1")
    owners = {attention.name: attention for attention in attentions(model)}
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    plan: dict[str, Shard] = {}
    for attention in owners.values():
        plan |= _attention(attention, parameters, tp)
        _lora(model, attention, names, plan, tp)
    for name, module in model.named_modules():
        if isinstance(module, Gate):
            plan |= {names[id(p)]: shard for p, shard in _gate(name, module, owner(owners, name), tp)}
    replicated = Shard("replicated")
    for name in parameters:
        if name in plan:
            continue
        holder = owner(owners, name)
        if holder is None or name.endswith(OUTSIDE):
            plan[name] = replicated
            continue
        axis = next((axis for end, axis in PER_HEAD.items() if name.endswith(f".{end}")), None)
        if axis is None or parameters[name].shape[axis] != holder.sizes.heads:
            raise UnsupportedError(
                f"{name} of shape {tuple(parameters[name].shape)} is a parameter of attention that the plan does not know: cut as "
                "its heads or replicated? Attach gates with gated_attn.attach, or plan this model by hand"
            )
        plan[name] = _cut("colwise", Rows(axis, {"q": (slice(0, holder.sizes.heads),)}), holder, tp)
    return {name: plan[name] for name in parameters}


def head_range(heads: int, tp: int, rank: int) -> range:
    """The heads of a rank; where there are fewer heads than ranks, the one that it shares with its neighbours."""
    if heads >= tp:
        return range(rank * heads // tp, (rank + 1) * heads // tp)
    return range(rank * heads // tp, rank * heads // tp + 1)


def _attention(attention: Attention, parameters: dict[str, nn.Parameter], tp: int) -> dict[str, Shard]:
    H, K, E = attention.sizes.heads, attention.sizes.kv_heads, attention.sizes.head_dim
    where = attention.name or "attention"
    if H % tp:
        raise ShapeError(f"{where} has {H} heads, which tp={tp} does not divide; use a divisor of {H}")
    if K % tp and tp % K:
        raise ShapeError(
            f"{where} has {K} KV heads, and neither do they divide into tp={tp} ranks nor the ranks into them; use a divisor or "
            f"a multiple of {K}"
        )
    plan = {name: _cut("colwise", rows, attention, tp) for name, rows in attention.outputs.items()}
    for name, axis in attention.out.items():
        whole = Rows(axis or 0, {"q": (slice(0, H * E),)})
        plan[name] = Shard("replicated") if axis is None else _cut("rowwise", whole, attention, tp)
    for name in attention.norms:
        shape = tuple(parameters[name].shape)
        heads = {H: "q", K: "k"}.get(shape[0])
        if shape == (E,):
            plan[name] = Shard("replicated", partial=True)
        elif len(shape) == 2 and shape[1] == E and heads is not None:
            role = "k" if heads == "k" or ".k_" in f".{name}" else "q"
            plan[name] = _cut("colwise", Rows(0, {role: (slice(0, shape[0]),)}), attention, tp)
        else:
            raise UnsupportedError(
                f"{name} of shape {shape} norms all {H} heads of width {E} together, which no rank has; replicate this attention"
            )
    return plan


def _cut(kind: str, rows: Rows, attention: Attention, tp: int) -> Shard:
    """Rows cut along the heads of each role; the remaining rows keep their order."""
    ranks, held = [], []
    for rank in range(tp):
        chosen: list[int] = []
        heads: dict[str, range] = {}
        for role, slices in rows.slices.items():
            own = [row for one in slices for row in range(one.start, one.stop)]
            count = attention.per_head(role)
            heads[role] = head_range(count, tp, rank)
            each = len(own) // count
            chosen += own[heads[role].start * each : heads[role].stop * each]
        ranks.append(tuple(fewest(sorted(chosen))))
        held.append(heads)
    shared = any(attention.per_head(role) < tp for role in rows.slices)
    return Shard(kind, rows.axis, tuple(ranks), tuple(held), partial=shared)


def _gate(name: str, gate: Gate, attention: Attention | None, tp: int) -> Iterator[tuple[nn.Parameter, Shard]]:
    """Every parameter of a gate with its shard."""
    spec = gate.spec
    if spec.position == "dense":
        yield from ((parameter, Shard("replicated")) for parameter in gate.parameters())
        return
    if attention is None:
        raise UnsupportedError(
            f"gate {name} ({spec}) stands in no attention that the plan knows, so nothing says which heads it multiplies"
        )
    role = "k" if spec.position in ("value", "key") else "q"
    count, heads = attention.per_head(role), gate.shape_HG[0]
    if spec.width != "shared" and heads != count:
        raise ShapeError(
            f"gate {name} has {heads} heads, and {attention.name} has {count} {'KV ' if role == 'k' else ''}heads there; "
            "a gate is cut as the heads that it multiplies, so they must be equal"
        )
    if spec.top_k is not None and spec.width == "headwise" and tp > 1:
        raise UnsupportedError(
            f"gate {name} ({spec}) keeps the {spec.top_k} largest of {heads} heads, which no rank of {tp} sees together"
        )
    common = Shard("replicated", partial=True)
    each_head = spec.width != "shared" and spec.source != "query" and spec.width != "pairwise"
    for part, parameter in gate.named_parameters():
        if part in ("fill.fill_HE", "sink_key"):
            cut = True
        elif part.startswith("proj."):
            cut = each_head and ".lora_A." not in part
        else:  # the bias of a gate without weights; the inner factor of a low-rank one sees the whole width
            cut = each_head and part == "bias"
        rows = Rows(0, {role: (slice(0, parameter.shape[0]),)})
        yield parameter, _cut("colwise", rows, attention, tp) if cut else common


def _lora(model: nn.Module, attention: Attention, names: dict[int, str], plan: dict[str, Shard], tp: int) -> None:
    """The A factors of adapted projections are replicated; of an adapted out projection A is cut as its weight, and B is not."""
    prefix = f"{attention.name}." if attention.name else ""
    outs = {name.rpartition(".")[0].removesuffix(".base_layer") for name in attention.out}
    for name, module in model.named_modules():
        is_out = name in outs
        if not is_out and not name.startswith(prefix):
            continue
        if not hasattr(module, "lora_A") or ".attn_gate" in name:
            continue
        for factor in module.lora_A.values():
            whole = Rows(1, {"q": (slice(0, factor.weight.shape[1]),)})
            plan[names[id(factor.weight)]] = (
                _cut("rowwise", whole, attention, tp) if is_out else Shard("replicated", partial=True)
            )
        for factor in module.lora_B.values():
            plan.setdefault(names[id(factor.weight)], Shard("replicated", partial=True))
