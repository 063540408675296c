"""Writes into live memory: whole slices, single elements, and tables of many copies.

A copy costs some microseconds beside its bytes, and models have tens of thousands: in the pause
they are rows of a table, which is made before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from weightsync import failpoints
from weightsync.delta.kernels import chosen
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.plan.load_plan import LoadPlan, rows_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class ParamWriter(Protocol):
    """What writes a version into the live parameters, and proves that it is there."""

    @property
    def nbytes(self) -> int:
        """Bytes that a commit writes."""

    @property
    def patched(self) -> bool:
        """Whether only what changes is written."""

    @property
    def compared_all(self) -> bool:
        """Whether the proof compares every live byte with what the server received."""

    def write(self, threads: SliceThreads) -> None:
        """Write; on a device it may still be under way when this returns."""

    def verify(self, threads: SliceThreads) -> list[str]:
        """Look at what was written; return the parameters that do not hold it."""


def begin_patch() -> None:
    failpoints.hit("worker.patch")


def write_each(threads: SliceThreads, write: Callable[[int], None], sizes: Sequence[int]) -> None:
    turns, half = itertools.count(), len(sizes) // 2

    def one(index: int) -> None:
        if next(turns) == half:
            failpoints.hit("worker.half")
        write(index)

    threads.each(one, sizes)


def put(memory: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write elements into the host's memory, one row of integers, each position once."""
    chosen().put(memory.numpy(), positions.numpy(), values.numpy())


def differ(memory: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> bool:
    return not chosen().holds(memory.numpy(), positions.numpy(), values.numpy())


#: Columns of a table: addresses of target and source, rows, bytes of one, steps on both sides.
_TARGET, _SOURCE, _COUNT, _BYTES, _TO, _OF = range(6)
#: Bytes that a thread copies at a time; less where there is less, so that several share it.
_SHARE, _SHARES = 4 << 20, 16
#: A share is a multiple of a cache's line.
_LINE = 64


class CopyGeometry:
    """How the slices of a plan lie on both sides, in any version; it depends on no address."""

    def __init__(
        self, plan: LoadPlan, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        self.plan = plan
        regular, rows = [], []
        #: Slices that are no rows, or are converted.
        self.odd: list[int] = []
        for index, (place, source) in enumerate(zip(places, sources, strict=True)):
            found = rows_of(place, source) if place.dtype == source.dtype else None
            if not source.numel():
                continue
            if found is None:
                self.odd.append(index)
                continue
            regular.append(index)
            rows.append((found.count, found.width, found.target_pitch, found.source_pitch))
        self.regular = regular
        self.rows = np.array(rows, np.int64).reshape(-1, 4)


class CopyTable:
    """Copies of all slices of one version to one place; `sizes` are bytes of each `copy`."""

    def __init__(
        self,
        geometry: CopyGeometry,
        places: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        self.places = places
        self._sources = sources
        self._odd = geometry.odd
        table = np.empty((len(geometry.regular), 6), np.int64)
        table[:, _TARGET] = [places[index].data_ptr() for index in geometry.regular]
        table[:, _SOURCE] = [sources[index].data_ptr() for index in geometry.regular]
        table[:, _COUNT:] = geometry.rows
        share = _share(table)
        self._table = _cut(table, share)
        self._ends = _ends(self._table, share)
        self._begins = [0, *self._ends[:-1]]
        sizes = self._table[:, _COUNT] * self._table[:, _BYTES]
        self.sizes: list[int] = [
            *(np.add.reduceat(sizes, self._begins).tolist() if len(sizes) else ()),
            *(sources[index].nbytes for index in geometry.odd),
        ]

    def copy(self, index: int) -> None:
        """Make the copies of one share; releases the GIL."""
        if index < len(self._ends):
            chosen().copy_rows(self._table[self._begins[index] : self._ends[index]])
        else:
            odd = self._odd[index - len(self._ends)]
            self.places[odd].copy_(self._sources[odd])


def _share(table: NDArray[np.int64]) -> int:
    whole = int((table[:, _COUNT] * table[:, _BYTES]).sum())
    return max(_LINE, min(_SHARE, whole // _SHARES // _LINE * _LINE))


def _cut(table: NDArray[np.int64], share: int) -> NDArray[np.int64]:
    """Return the same copies, the long ones in pieces of at most a share, but for one row."""
    sizes = table[:, _COUNT] * table[:, _BYTES]
    long = np.flatnonzero(sizes > share)
    if not len(long):
        return table
    parts, last = [], 0
    for index in long.tolist():
        parts += [table[last:index], _pieces(table[index], share)]
        last = index + 1
    return np.concatenate([*parts, table[last:]])


def _pieces(row: NDArray[np.int64], share: int) -> NDArray[np.int64]:
    count, size = int(row[_COUNT]), int(row[_BYTES])
    if count == 1:
        begins = np.arange(0, size, share, dtype=np.int64)
        made = np.repeat(row[None], len(begins), axis=0)
        made[:, _TARGET] += begins
        made[:, _SOURCE] += begins
        made[:, _BYTES] = np.minimum(share, size - begins)
        return made
    begins = np.arange(0, count, max(1, share // size), dtype=np.int64)
    made = np.repeat(row[None], len(begins), axis=0)
    made[:, _TARGET] += begins * row[_TO]
    made[:, _SOURCE] += begins * row[_OF]
    made[:, _COUNT] = np.minimum(max(1, share // size), count - begins)
    return made


def _ends(table: NDArray[np.int64], share: int) -> list[int]:
    if not len(table):
        return []
    before = np.cumsum(table[:, _COUNT] * table[:, _BYTES])
    number = (before - 1) // share
    ends = np.flatnonzero(np.diff(number)) + 1
    return [*ends.tolist(), len(table)]
