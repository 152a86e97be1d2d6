"""Where the rows of a gate lie in other projects' projections: named layouts, as index tables, bitwise both ways.

The canonical form has one tensor per role: `q` (H*E rows), `gate` (H, H*E or no rows), `k` and `v` (K*E rows each), head by
head. A layout says which tensors hold those roles and in what order of rows. Layouts with the same numbers of rows differ only
in their meaning, so a layout is always named and never guessed from a shape.

Shapes: H query heads, K key/value heads, E head width, D model width, N rows of a fused tensor. Rows are the first axis, of a
weight (N, D) and of a bias (N,) alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gated_attn.errors import ShapeError, SpecError, UnsupportedError, suggestion

ROLES = ("q", "gate", "k", "v")
WIDTHS = ("headwise", "elementwise", "none")
"""Gate rows per head: 1, E, or 0 for a layer without a gate in a model that has them."""

Tensors = Mapping[str, Tensor]
Blocks = tuple[tuple[str, tuple[str, ...]], ...]
"""What a tensor holds, in order of rows. A block (unit, roles) is repeated once per query head (`head`), once per KV group
(`group`) or once (`all`), and holds that unit's rows of each of its roles in turn."""


@dataclass(frozen=True)
class Sizes:
    """Heads, key/value heads and head width of one attention module; ShapeError where they cannot be."""

    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim) < 1 or self.heads % self.kv_heads:
            raise ShapeError(
                f"{self.heads} heads, {self.kv_heads} KV heads, head_dim {self.head_dim}: all must be at least 1, and the "
                f"heads a multiple of the KV heads"
            )

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    def rows(self, role: str, width: str) -> int:
        """Rows of a role in the canonical form."""
        heads = self.kv_heads if role in ("k", "v") else self.heads
        return heads * (_gate_rows(width, self.head_dim) if role == "gate" else self.head_dim)


@dataclass(frozen=True)
class Layout:
    """One way to store the four roles.

    Fields:
        tensors: key -> the tensor's blocks.
        names: key -> the name of the submodule that holds the tensor, in the projects that use the layout; also of `out`.
        widths: the gates that it can hold.
        by: which other project stores its gates so; for families of transformers `native.ROWS` says it.
    """

    name: str
    tensors: Mapping[str, Blocks]
    names: Mapping[str, str]
    widths: tuple[str, ...] = WIDTHS
    by: str = ""

    @property
    def fused(self) -> str | None:
        """Key of the tensor that holds more than one role; None where every role has its own."""
        return next((key for key, roles in self.roles.items() if len(roles) > 1), None)

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Key -> the roles in that tensor."""
        return {key: tuple(role for _, block in blocks for role in block) for key, blocks in self.tensors.items()}

    def __str__(self) -> str:
        """Its tensors by name and the order of their rows, such as `q_proj = [q gate] per head; k_proj; v_proj`."""
        units = {"head": "[{}] per head", "group": "[{}] per KV group", "all": "all {}"}
        parts = []
        for key, blocks in self.tensors.items():
            rows = ", then ".join(
                units["all"].format(", then all ".join(roles)) if unit == "all" else units[unit].format(" ".join(roles))
                for unit, roles in blocks
            )
            parts.append(self.names[key] + (f" = {rows}" if rows != f"all {key}" else ""))
        only = "" if self.widths == WIDTHS else f" ({', '.join(self.widths[:-1])} only)"
        return "; ".join(parts) + only

    def rows(self, key: str, sizes: Sizes, width: str) -> int:
        """Rows of one tensor."""
        return sum(sizes.rows(role, width) for role in self.roles[key])


_HF = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
_OLMO = {"q": "w_q", "k": "w_k", "v": "w_v", "out": "w_out"}
_MEGATRON = {"qkv": "linear_qkv", "out": "linear_proj"}
_KV = {"k": (("all", ("k",)),), "v": (("all", ("v",)),)}
_APART = {"q": (("all", ("q",)),), "gate": (("all", ("gate",)),), **_KV}

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("separate", _APART, {**_HF, "gate": "attn_gate.proj"}, by="gated_attn.attach"),
        Layout("g_proj", _APART, {**_HF, "gate": "g_proj"}, by="flash-linear-attention"),
        Layout("gate_proj", _APART, {**_HF, "gate": "gate_proj"}),
        Layout("w_g", _APART, {**_OLMO, "gate": "w_g"}, by="OLMo-core"),
        Layout("per_head", {"q": (("head", ("q", "gate")),), **_KV}, _HF),
        Layout(
            "per_kv_group", {"q": (("group", ("q", "gate")),), **_KV}, _HF, by="the paper's code, github.com/qiuzh20"
        ),
        Layout("flat", {"q": (("all", ("q", "gate")),), **_KV}, _HF, by="one widened q_proj, cut in two"),
        Layout("group_qgkv", {"qkv": (("group", ("q", "gate", "k", "v")),)}, _MEGATRON, by="Megatron-LM"),
        Layout(
            "tail_rows",
            {"qkv": (("group", ("q", "k", "v")), ("all", ("gate",)))},
            _MEGATRON,
            ("headwise", "none"),
            by="Megatron-LM's head_wise_attn_gate",
        ),
    )
}


def named(name: str) -> Layout:
    """The layout of that name, or SpecError with the names there are."""
    if name not in LAYOUTS:
        raise SpecError(f"there is no layout {name!r}{suggestion(name, LAYOUTS)}; the layouts are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


@dataclass(frozen=True)
class Span:
    """Rows of one role in a tensor: `rows` of them from `start + unit * stride + offset`, for each of `units` units."""

    start: int
    units: int
    stride: int
    offset: int
    rows: int

    def index(self) -> Tensor:
        """Row numbers (units * rows,), in canonical order."""
        first = self.start + self.offset + self.stride * torch.arange(self.units)
        return (first[:, None] + torch.arange(self.rows)).flatten()

    def view(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """The rows, on an axis of the tensor, as two axes (units, rows), without a copy."""
        axis %= tensor.dim()
        units = tensor.narrow(axis, self.start, self.units * self.stride).unflatten(axis, (self.units, self.stride))
        return units.narrow(axis + 1, self.offset, self.rows)


def spans(blocks: Blocks, sizes: Sizes, width: str) -> dict[str, Span]:
    """Role -> where its rows lie in a tensor of these blocks."""
    found: dict[str, Span] = {}
    start = 0
    for unit, roles in blocks:
        units = {"head": sizes.heads, "group": sizes.kv_heads, "all": 1}[unit]
        each = {role: sizes.rows(role, width) // units for role in roles}
        stride, offset = sum(each.values()), 0
        for role, rows in each.items():
            found[role] = Span(start, units, stride, offset, rows)
            offset += rows
        start += units * stride
    return found


def role_rows(layout: str, sizes: Sizes, width: str) -> dict[str, Tensor]:
    """Role -> its rows within the tensor that holds it, in canonical order: `fused[role_rows(...)["gate"]]` is the gate.

    `named(layout).roles` says which tensor that is. UnsupportedError for a width that the layout cannot hold.
    """
    table = named(layout)
    if width not in WIDTHS:
        raise SpecError(
            f"gate width {width!r} has no layout{suggestion(width, WIDTHS)}; the widths are {', '.join(WIDTHS)}"
        )
    if width not in table.widths:
        raise UnsupportedError(
            f"layout {layout} holds {' and '.join(w for w in table.widths if w != 'none')} gates, not {width} ones",
            {name: f"holds {width} gates" for name, other in LAYOUTS.items() if width in other.widths},
        )
    found = {
        role: one.index() for blocks in table.tensors.values() for role, one in spans(blocks, sizes, width).items()
    }
    return {role: found[role] for role in ROLES}


def role_slices(layout: str, sizes: Sizes, width: str) -> dict[str, list[slice]]:
    """`role_rows` as the fewest contiguous slices, in canonical order; a role without rows has none."""
    return {role: fewest(rows.tolist()) for role, rows in role_rows(layout, sizes, width).items()}


def view(tensor: Tensor, role: str, sizes: Sizes, layout: str, *, width: str, axis: int = 0) -> Tensor:
    """A role's rows, on the axis (N) of a tensor of the layout, as two axes (units, rows of a unit), without a copy.

    Units are heads, groups or 1, as the layout has them. Raises ShapeError naming both numbers where N is not the layout's.
    """
    table = named(layout)
    key = next(key for key, roles in table.roles.items() if role in roles)
    _check_rows(key, tensor, axis, table, sizes, width)
    return spans(table.tensors[key], sizes, width)[role].view(tensor, axis)


def fewest(rows: Iterable[int]) -> list[slice]:
    """Row numbers as the fewest slices of consecutive ones, in their order."""
    found: list[slice] = []
    for row in rows:
        if found and found[-1].stop == row:
            found[-1] = slice(found[-1].start, row + 1)
        else:
            found.append(slice(row, row + 1))
    return found


def split(tensors: Tensor | Tensors, sizes: Sizes, layout: str, *, width: str) -> dict[str, Tensor]:
    """Tensors of a layout -> role -> canonical tensor, for weights (N, D) or biases (N,); every result is a copy.

    Args:
        tensors: the layout's tensors by key (`named(layout).tensors`), or some of them; or just the fused tensor. An `out`
            passes through.

    Raises ShapeError naming both numbers where a tensor has other rows than the layout, SpecError for an unknown key.
    """
    table = named(layout)
    index = role_rows(layout, sizes, width)
    given = _by_key(tensors, table)
    result = {"out": given.pop("out")} if "out" in given else {}
    for key, tensor in given.items():
        if key not in table.tensors:
            raise SpecError(f"layout {layout} has no tensor {key!r}; it has {', '.join(table.tensors)}")
        _check_rows(key, tensor, 0, table, sizes, width)
        for role in (role for role in table.roles[key] if sizes.rows(role, width)):
            result[role] = tensor.index_select(0, index[role].to(tensor.device))
    return result


def join(roles: Tensors, sizes: Sizes, layout: str, *, width: str) -> dict[str, Tensor]:
    """Inverse of `split`: role -> canonical tensor becomes key -> tensor of the layout; every result is a copy.

    Raises UnsupportedError where only some roles of a fused tensor are given (a gate with a bias beside queries without
    one), ShapeError where their rows, columns or dtypes do not fit each other.
    """
    table = named(layout)
    index = role_rows(layout, sizes, width)
    absent = sorted(set(roles) - {*ROLES, "out"})
    if absent:
        raise SpecError(f"there is no role {absent[0]!r}; the roles are {', '.join(ROLES)} and out")
    result = {"out": roles["out"]} if "out" in roles else {}
    for key, members in table.roles.items():
        needed = [role for role in members if sizes.rows(role, width)]
        present = [role for role in members if role in roles]
        missing = [role for role in needed if role not in roles]
        if not present:
            continue
        if missing:
            raise UnsupportedError(
                f"layout {layout} keeps {', '.join(members)} in one tensor, and {', '.join(missing)} is missing beside "
                f"{', '.join(present)}: give all of them, or use a layout of separate tensors"
            )
        first = roles[present[0]]
        for role in present:
            expected = (sizes.rows(role, width), *first.shape[1:])
            if tuple(roles[role].shape) != expected or roles[role].dtype != first.dtype:
                raise ShapeError(
                    f"{role} is {tuple(roles[role].shape)} of {roles[role].dtype}; beside {present[0]} {tuple(first.shape)} of "
                    f"{first.dtype}, layout {layout} has {expected} for {sizes} and a {width} gate"
                )
        order = torch.cat([index[role] for role in present]).argsort().to(first.device)
        result[key] = torch.cat([roles[role] for role in present]).index_select(0, order)
    return result


def convert(tensors: Tensor | Tensors, sizes: Sizes, source: str, target: str, *, width: str) -> dict[str, Tensor]:
    """Tensors of one layout -> tensors of another, bit for bit: `join(split(tensors))`.

    Errors are those of `split` and `join`. With biases pass all of them in a call of their own.

    Example:
        >>> sizes = Sizes(heads=8, kv_heads=2, head_dim=4)
        >>> convert(torch.randn(64, 24), sizes, "per_head", "separate", width="elementwise")["gate"].shape
        torch.Size([32, 24])
    """
    return join(split(tensors, sizes, source, width=width), sizes, target, width=width)


def to_zero_centred(scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """w = scale - 1, for a norm that multiplies by 1 + w; never rounded. Inverse: `from_zero_centred(w, scale.dtype)`.

    bfloat16 holds scale - 1 for every scale between 0.5 and 2 and for few others, so the result has the narrowest of scale's own
    dtype, float32 and float64 that holds all its values exactly; or `dtype`, where given.

    Raises UnsupportedError naming the value where no such dtype, or not that one, holds it. Only the sign of a zero is lost.
    """
    return _shifted(scale, -1.0, dtype)


def from_zero_centred(w: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """scale = 1 + w, never rounded. Inverse: `to_zero_centred(scale, w.dtype)`; dtypes and errors as there.

    In bfloat16 most 1 + w are not representable (1 + 0.01 would become 1.0078125), so a (1+w) checkpoint becomes float32 here,
    and gives its bfloat16 bits again on the way back.
    """
    return _shifted(w, 1.0, dtype)


def fold_2sigmoid(out_weight: Tensor) -> Tensor:
    """2*W_o: with it a `sigmoid` gate does what `2sigmoid` did with W_o, exactly (a power of two). The out bias stays.

    Raises UnsupportedError where a value would overflow.
    """
    return _scaled(out_weight, 2.0)


def unfold_2sigmoid(out_weight: Tensor) -> Tensor:
    """W_o/2, the inverse of `fold_2sigmoid`; UnsupportedError where a subnormal would lose its last bit."""
    return _scaled(out_weight, 0.5)


def expand_headwise(gate: Tensor, head_dim: int) -> Tensor:
    """Headwise gate (H, D) or bias (H,) -> elementwise (H*E, D) or (H*E,): each row E times, so each channel its head's."""
    return gate.repeat_interleave(head_dim, dim=0)


def collapse_elementwise(gate: Tensor, head_dim: int) -> Tensor:
    """Inverse of `expand_headwise`; ShapeError where the rows of a head differ, since one number cannot stand for them."""
    if not gate.dim() or gate.shape[0] % head_dim:
        raise ShapeError(f"a gate of shape {tuple(gate.shape)} has no heads of {head_dim} rows: check head_dim")
    rows_HE = gate.unflatten(0, (-1, head_dim))
    differ = (rows_HE != rows_HE[:, :1]).flatten(1).any(1)
    if bool(differ.any()):
        raise ShapeError(
            f"{int(differ.sum())} of {len(differ)} heads (the first is head {int(differ.nonzero()[0])}) have gate rows that "
            f"differ between channels: this gate is elementwise and stays so"
        )
    return rows_HE[:, 0].clone()


def _gate_rows(width: str, head_dim: int) -> int:
    return {"headwise": 1, "elementwise": head_dim, "none": 0}[width]


def _check_rows(key: str, tensor: Tensor, axis: int, table: Layout, sizes: Sizes, width: str) -> None:
    rows, expected = tensor.shape[axis] if tensor.dim() else 0, table.rows(key, sizes, width)
    if rows != expected:
        raise ShapeError(
            f"{key} of shape {tuple(tensor.shape)} has {rows} rows; layout {table.name} has {expected} for {sizes} and a "
            f"{width} gate: check the layout, the width and the sizes"
        )


def _by_key(tensors: Tensor | Tensors, table: Layout) -> dict[str, Tensor]:
    if not isinstance(tensors, Tensor):
        return dict(tensors)
    if table.fused is None:
        raise SpecError(
            f"layout {table.name} has no fused tensor: pass a mapping with the keys {', '.join(table.tensors)}"
        )
    return {table.fused: tensors}


def _shifted(w: Tensor, offset: float, dtype: torch.dtype | None) -> Tensor:
    wide = w.double()
    exact = wide + offset
    part = exact - wide
    # Knuth's two-sum: what the float64 sum was rounded by. NaN and inf differ from 0 too.
    lost = (wide - (exact - part)) + (offset - part) != 0
    candidates = [dtype] if dtype is not None else list(dict.fromkeys([w.dtype, torch.float32, torch.float64]))
    for kind in candidates:
        result = exact.to(kind)
        bad = lost | (result.double() != exact)
        if not bool(bad.any()):
            return result
    raise UnsupportedError(
        f"{int(bad.sum())} of {w.numel()} norm weights, such as {w[bad][0].item():.9g} of {w.dtype}, cannot be shifted by "
        f"{offset:+g} exactly in {candidates[-1]}" + (": leave dtype out" if dtype is not None else "")
    )


def _scaled(weight: Tensor, factor: float) -> Tensor:
    result = weight * factor
    bad = (result / factor) != weight
    if bool(bad.any()):
        raise UnsupportedError(
            f"{int(bad.sum())} of {weight.numel()} out weights, such as {weight[bad][0].item():g} of {weight.dtype}, cannot be "
            f"multiplied by {factor:g} exactly: store the weight in float32 first"
        )
    return result
