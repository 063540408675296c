"""Thousands of small copies to a device as few large ones.

Each small copy of a model with many experts waits for its turn on a device that generates. So
pieces of a shard are sent, in which many tensors lie side by side, and what belongs to each place
is taken from there by one launch for all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weightsync.model.dtypes import torch_dtype
from weightsync.vllm.plan.live_params import view_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weightsync.model.manifest import TensorEntry
    from weightsync.vllm.plan.load_plan import Slice
    from weightsync.vllm.plan.staged_tensors import StagedTensors

__all__ = ["PIECE_BYTES", "copy_in_pieces"]

#: Bytes that are sent at once.
PIECE_BYTES = 256 << 20


@dataclass
class _Piece:
    """Tensors that lie side by side in a shard."""

    entries: list[TensorEntry] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, Slice]] = field(default_factory=list)

    @property
    def begin(self) -> int:
        return self.entries[0].begin

    @property
    def nbytes(self) -> int:
        return max(entry.end for entry in self.entries) - self.begin

    def takes(self, entry: TensorEntry, most: int) -> bool:
        """Whether a tensor that lies behind those here may come to them."""
        return entry.shard == self.entries[0].shard and entry.end - self.begin <= most

    @property
    def worth_it(self) -> bool:
        """Whether most of it is wanted; a rank of many takes a small part of each tensor."""
        wanted = sum(
            item.source.numel * _dtype(entry).itemsize
            for entry, (_, item) in zip(self.entries, self.copies, strict=True)
        )
        return 2 * wanted >= self.nbytes


def copy_in_pieces(
    copies: Iterable[tuple[torch.Tensor, Slice]],
    staged: StagedTensors,
    device: torch.device,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Fill places on a device from a version; on a device it may still be under way on return.

    Args:
        copies: Each place, and what of the version comes there.
        staged: The version.
        device: Where all places are.
        piece_bytes: Of one piece, which takes as much memory there meanwhile.
    """
    buffer: torch.Tensor | None = None
    for piece in _pieces(copies, staged, piece_bytes):
        if len(piece.copies) == 1 or not piece.worth_it or piece.nbytes > piece_bytes:
            for place, item in piece.copies:
                place.copy_(staged.slice(item), non_blocking=True)
            continue
        if buffer is None:
            buffer = torch.empty(piece_bytes, dtype=torch.uint8, device=device)
        shard = piece.entries[0].shard
        raw = staged.raw(shard, piece.begin, piece.begin + piece.nbytes)
        sent = buffer[: piece.nbytes]
        sent.copy_(raw, non_blocking=True)
        _spread(piece, sent, staged)


def _pieces(
    copies: Iterable[tuple[torch.Tensor, Slice]], staged: StagedTensors, most: int
) -> Iterator[_Piece]:
    placed = [(staged.entry(item.tensor), place, item) for place, item in copies]
    placed.sort(key=lambda one: (one[0].shard, one[0].begin))
    piece = _Piece()
    for entry, place, item in placed:
        if piece.entries and not piece.takes(entry, most):
            yield piece
            piece = _Piece()
        piece.entries.append(entry)
        piece.copies.append((place, item))
    if piece.entries:
        yield piece


def _spread(piece: _Piece, sent: torch.Tensor, staged: StagedTensors) -> None:
    alike: defaultdict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for entry, (place, item) in zip(piece.entries, piece.copies, strict=True):
        source = _within(entry, item, piece.begin, sent)
        if source is None:
            source = staged.slice(item)
        elif place.dtype == source.dtype and place.is_contiguous() and source.is_contiguous():
            alike[place.dtype].append((place, source))
            continue
        place.copy_(source, non_blocking=True)
    for pairs in alike.values():
        # As in https://docs.pytorch.org/docs/stable/optim.html: one launch for all of a list.
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])


def _within(entry: TensorEntry, item: Slice, begin: int, sent: torch.Tensor) -> torch.Tensor | None:
    """Return a slice as it lies in what was sent; None: at an odd address."""
    dtype = _dtype(entry)
    raw = sent[entry.begin - begin : entry.end - begin]
    if not raw.numel() or raw.storage_offset() % dtype.itemsize:
        return None
    return view_of(raw.view(dtype).view(entry.shape), item.source)


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = torch_dtype(entry.dtype)
    assert dtype is not None  # noqa: S101 - the plan was captured with it
    return dtype
