"""Every mask becomes one type and one polarity here: a bool tensor, True where a query attends to a key, plus a float bias.

Shapes: B batch, T queries, S keys, H heads. Queries are aligned to the end of the keys: query i stands at key position
i + S - T, as it does with a KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gated_attn.errors import ShapeError


@dataclass(frozen=True)
class Masking:
    """What each query may see. `keep` and `bias` broadcast to (B, H, T, S); `doc_ids_BS` numbers the keys' documents."""

    queries: int
    keys: int
    causal: bool = False
    window: int | None = None
    doc_ids_BS: Tensor | None = None
    keep: Tensor | None = None
    bias: Tensor | None = None

    @property
    def structural(self) -> bool:
        """Whether anything but plain (or no) causality hides keys, so that a dense mask is needed."""
        return self.window is not None or self.doc_ids_BS is not None or self.keep is not None

    def visible(self, device: torch.device) -> Tensor | None:
        """Bool, broadcastable to (B, H, T, S), True where the query attends to the key; None if all of it is True."""
        keep = self.keep
        if self.causal or self.window is not None:
            near = self._near(device)
            keep = near if keep is None else keep & near
        if self.doc_ids_BS is not None:
            same = self.query_docs_BT[:, None, :, None] == self.doc_ids_BS[:, None, None, :]
            keep = same if keep is None else keep & same
        return keep

    def _near(self, device: torch.device) -> Tensor:
        """Bool (T, S), True where causality and window let the query see the key."""
        position_T1 = torch.arange(self.queries, device=device)[:, None] + (self.keys - self.queries)
        distance_TS = position_T1 - torch.arange(self.keys, device=device)[None, :]
        if self.window is None:
            return distance_TS >= 0
        inside = distance_TS.abs() < self.window
        return inside & (distance_TS >= 0) if self.causal else inside

    @property
    def query_docs_BT(self) -> Tensor:
        """The queries' document numbers: the last T of the keys' (more queries than keys: the first belong to none)."""
        assert self.doc_ids_BS is not None
        extra = self.queries - self.keys
        if isinstance(extra, int) and extra > 0:
            none = self.doc_ids_BS.new_full((self.doc_ids_BS.shape[0], extra), torch.iinfo(self.doc_ids_BS.dtype).min)
            return torch.cat([none, self.doc_ids_BS], dim=1)
        return self.doc_ids_BS[:, self.keys - self.queries :]


def normalise(
    mask: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    doc_ids: Tensor | None,
    shape_BHTS: tuple[int, int, int, int],
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> Masking:
    """Check mask, window and doc_ids against (B, H, T, S) and turn them into a `Masking`.

    A bool mask is True where a query attends (SDPA's polarity). A float mask is added to the scores, in their dtype; entries
    that `hides` hide the key altogether.
    """
    B, H, T, S = shape_BHTS
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ShapeError(f"window={window!r}: pass the number of keys a query may see, itself included, as an int >= 1")
    if doc_ids is not None:
        if (
            doc_ids.dtype not in (torch.int32, torch.int64)
            or doc_ids.dim() != 2
            or doc_ids.shape[1] != S
            or doc_ids.shape[0] not in (1, B)
        ):
            raise ShapeError(
                f"doc_ids is {doc_ids.dtype} of shape {tuple(doc_ids.shape)}; pass one int document number per key, shape {(B, S)} "
                "(all keys, cached ones included; the queries are the last T of them)"
            )  # fmt: skip
        _same_device("doc_ids", doc_ids, device)
    keep = bias = None
    if mask is not None:
        _check_mask(mask, (B, H, T, S), device)
        if mask.dtype == torch.bool:
            keep = mask
        else:
            keep = ~hides(mask, dtype)
            bias = mask.masked_fill(~keep, 0.0)
    return Masking(T, S, causal, window, doc_ids, keep, bias)


def hides(mask: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Bool, True where a float mask means that a key is hidden, for scores of this dtype.

    That is at -inf, at -1e9 or below (no score survives next to it in float32), and within a factor 2 of the most negative
    number of the mask's dtype (the `finfo.min` idiom) or of the scores' dtype (where it would become -inf).
    """
    lowest = max(-1e9, torch.finfo(mask.dtype).min / 2, torch.finfo(dtype).min / 2)
    return mask <= lowest


def _check_mask(mask: Tensor, shape_BHTS: tuple[int, int, int, int], device: torch.device) -> None:
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ShapeError(
            f"mask is {mask.dtype}: its polarity would be a guess; pass bool (True = attend, so a 0/1 mask of real tokens is "
            "mask.bool()) or a float mask that is added to the scores"
        )
    _same_device("mask", mask, device)
    B, _, T, S = shape_BHTS
    shape = tuple(mask.shape)
    sizes = shape if len(shape) == 4 else (1, 1, *shape)
    if len(shape) not in (2, 4) or any(got != 1 and got != want for got, want in zip(sizes, shape_BHTS, strict=True)):
        hint = ""
        if shape == (B, S):
            hint = "; a padding mask of shape (B, S) is passed as mask[:, None, None, :]"
        elif shape == (B, T, S):
            hint = "; a mask of shape (B, T, S) is passed as mask[:, None]"
        raise ShapeError(
            f"mask of shape {shape} does not broadcast to (B, H, T, S) = {shape_BHTS}; pass (T, S) or 4 dimensions{hint}"
        )


def _same_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ShapeError(f"{name} is on {tensor.device} and the queries on {device}; move it with .to({str(device)!r})")
