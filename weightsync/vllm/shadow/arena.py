"""The arena: memory of a loader that holds a loaded version, and that a rank exchanges with.

On a host it is a memfd, handed over as a descriptor; on a GPU an allocation that the rank opens by
its CUDA IPC handle. Small copies wait for their turns on a device that generates, so pieces of a
shard are sent, and what belongs to each place is taken from there by one launch for all.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightsync.gpu.ipc import device_with, place_of
from weightsync.model.dtypes import torch_dtype
from weightsync.shm.segments import Segment
from weightsync.vllm.cuda.scatter import row_at
from weightsync.vllm.plan.live_params import view_of

if TYPE_CHECKING:
    from weightsync.model.manifest import TensorEntry
    from weightsync.vllm.plan.load_plan import Slice
    from weightsync.vllm.plan.staged_tensors import StagedTensors


#: Bytes at a multiple of which every piece begins, on both sides of an exchange.
_ALIGNED = 512


def _places(spans: Sequence[int]) -> tuple[list[int], int]:
    ends = list(itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in spans))
    return [0, *ends[:-1]], ends[-1] if ends else 0


def _cut(memory: torch.Tensor, spans: Sequence[int]) -> list[torch.Tensor]:
    begins, _ = _places(spans)
    return [memory[at : at + size] for at, size in zip(begins, spans, strict=True)]


class LoaderArena:
    """The arena in the process that loads.

    `spans` has the bytes of each piece of `memory`. Raises MEMORY_EXHAUSTED if the host lacks the
    memory, torch.OutOfMemoryError if the device does.
    """

    def __init__(self, spans: Sequence[int], device: torch.device) -> None:
        _, self.nbytes = _places(spans)
        self._segment: Segment | None = None
        if device.type == "cuda":
            # Of its own allocation: nothing else of this process is seen by who opens it.
            whole = torch.empty(max(self.nbytes, 32 << 20), dtype=torch.uint8, device=device)
        else:
            self._segment = Segment.create(self.nbytes)
            whole = torch.from_numpy(np.frombuffer(self._segment.view, dtype=np.uint8))
        self._whole = whole
        self.memory = _cut(whole, spans)

    def share(self) -> tuple[dict[str, Any], list[int]]:
        """Return what `RankArena` opens: a document, and descriptors, which stay this one's."""
        if self._segment is not None:
            return {"bytes": self._segment.capacity}, [self._segment.fd]
        place = place_of(self._whole.data_ptr())
        return {"handle": place.handle.hex(), "offset": place.offset}, []


class RankArena:
    """The arena in the rank, opened by what `LoaderArena.share` returned.

    `fds` are closed in any case. Raises DeviceError or OSError if the memory cannot be had here.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        fds: Sequence[int],
        spans: Sequence[int],
        device: torch.device,
    ) -> None:
        self._opened = contextlib.ExitStack()
        _, self.nbytes = _places(spans)
        try:
            if device.type == "cuda":
                whole = self._open(document, self.nbytes, device)
            else:
                mapping = mmap.mmap(fds[0], int(document["bytes"]))
                whole = torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))
        finally:
            for fd in fds:
                os.close(fd)
        self.memory = _cut(whole, spans)

    def _open(self, document: Mapping[str, Any], size: int, device: torch.device) -> torch.Tensor:
        here = torch.empty(1, dtype=torch.uint8, device=device)
        handle = bytes.fromhex(document["handle"])
        base, _ = self._opened.enter_context(device_with(here.data_ptr()).opened(handle))
        return row_at(device, base + int(document["offset"]), size, 1)

    def close(self) -> None:
        """Let go of it; nothing may be under way there."""
        self.memory = []
        self._opened.close()


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
    """Fill places on `device` from a version; copies may still be under way on return.

    `copies` has each place, and what of the version comes there. Up to `piece_bytes` of memory are
    taken on the device meanwhile.
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
