"""A version that still comes in, as other processes read it: its layout, its segments, and marks.

The document lies in a segment of its own. Its owner marks shards in it as they come, so that nobody
has to be called for each. A shard that a trainer on this host has on a GPU gets a mark for that
too, with where each of its tensors lies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from weightsync import clock
from weightsync.model.manifest import Layout, Manifest
from weightsync.shm.segments import Segment

#: Bytes of a handle by which another process opens memory of a GPU: CU_IPC_HANDLE_SIZE.
HANDLE_BYTES = 64

#: Magic, shards, tensors, bytes of the segments' ids and of the layout. After it come a byte that
#: tells the end, the marks, a place for each tensor, the ids, the layout.
_HEAD = struct.Struct("<8sIIII")
_MAGIC = b"WSCOMES2"
#: Handle of an allocation, and an offset within it, bytes.
_PLACE = struct.Struct(f"<{HANDLE_BYTES}sQ")
_CAME, _ON_GPU = 1, 2
#: From one look at the marks to the next, seconds.
_LOOK_S = 0.005


#: Where a shard lies on a GPU for as long as its push lasts: of each tensor that is not empty, in
#: the order of their bytes, the handle that opens its allocation, and its offset in that, in bytes.
IpcAddresses = Sequence[tuple[bytes, int]]


class Arrival(NamedTuple):
    """A mark: that a shard lies on a GPU, where the trainer has it, or that all of it came."""

    shard: int
    on_gpu: bool


class _Table(NamedTuple):
    """Where the parts of a document begin, in bytes."""

    over: int
    marks: int
    places: int
    ids: int


def _table(shards: int, tensors: int) -> _Table:
    marks = _HEAD.size + 1
    places = marks + shards
    return _Table(_HEAD.size, marks, places, places + _PLACE.size * tensors)


def _rows(layout: Layout) -> list[list[int]]:
    """Return, for each shard, the numbers of its tensors that are not empty."""
    rows: list[list[int]] = [[] for _ in layout.shards]
    for number, tensor in enumerate(layout.tensors):
        if tensor.end > tensor.begin:
            rows[tensor.shard].append(number)
    return rows


class ArrivalWriter:
    """Owns the document and marks what has come; whoever owns `segment` closes it."""

    def __init__(self, layout: Layout, segments: Sequence[str]) -> None:
        ids = ",".join(segments).encode()
        # What the bytes will be is not known yet.
        body = Manifest(layout, (b"",) * len(layout.tensors)).to_json()
        count, tensors = len(segments), len(layout.tensors)
        self._table = _table(count, tensors)
        self._rows = _rows(layout)
        self.segment = Segment.create(self._table.ids + len(ids) + len(body))
        view = self.segment.view
        view[: self._table.ids] = bytes(self._table.ids)
        _HEAD.pack_into(view, 0, _MAGIC, count, tensors, len(ids), len(body))
        self.segment.fill(self._table.ids, ids + body)

    def mark_ipc(self, shard: int, where: IpcAddresses) -> None:
        """Tell where a shard lies on a GPU, unless that was told or it has come."""
        view, table = self.segment.view, self._table
        if view[table.marks + shard]:
            return
        for row, place in zip(self._rows[shard], where, strict=True):
            _PLACE.pack_into(view, table.places + _PLACE.size * row, *place)
        view[table.marks + shard] = _ON_GPU

    def mark(self, shard: int) -> None:
        """Tell that all bytes of a shard lie in its segment, and stay as they are."""
        self.segment.view[self._table.marks + shard] |= _CAME

    def end(self) -> None:
        self.segment.view[self._table.over] = 1


class ArrivalReader:
    """Reads a document in which another process writes marks, by a view that must stay valid."""

    def __init__(self, view: memoryview) -> None:
        magic, count, tensors, ids_size, body_size = _HEAD.unpack_from(view)
        table = _table(count, tensors)
        end = table.ids + ids_size
        if magic != _MAGIC or end + body_size > len(view):
            raise ValueError("not an arriving version")
        self.layout = Manifest.from_json(bytes(view[end : end + body_size])).layout
        self.segments = tuple(bytes(view[table.ids : end]).decode().split(","))
        if not len(self.segments) == len(self.layout.shards) == count:
            raise ValueError(f"{len(self.segments)} segments for {len(self.layout.shards)} shards")
        self._view = view
        self._table = table
        self._rows = _rows(self.layout)

    def ipc_addresses(self, shard: int) -> IpcAddresses:
        return [
            _PLACE.unpack_from(self._view, self._table.places + _PLACE.size * row)
            for row in self._rows[shard]
        ]

    def _more(self, marks: slice) -> bool:
        return not self._view[self._table.over] and not all(
            mark & _CAME for mark in self._view[marks]
        )

    def arrivals(self, wait: Callable[[float], bool], patience_s: float) -> Iterator[Arrival]:
        """Yield each mark once: that a shard lies on a GPU, and that it came.

        It ends when no more will come, or nothing came for `patience_s`. A trainer keeps what it
        has on a GPU until all has come. `wait` returns after the seconds that it is given, or
        returns True at once, which ends this too.
        """
        seen = bytes(len(self.segments))
        until = clock.monotonic() + patience_s
        marks = slice(self._table.marks, self._table.places)
        while True:
            # Before the marks: what is marked before the end shall be seen.
            over = self._view[self._table.over]
            now = bytes(self._view[marks])
            for kind in (_ON_GPU, _CAME):
                for shard in _new(now, seen, kind):
                    # Whoever takes what is told takes his time: all may have come since.
                    if kind == _CAME or self._more(marks):
                        yield Arrival(shard, kind == _ON_GPU)
            if now != seen:
                seen, until = now, clock.monotonic() + patience_s
            elif over or clock.monotonic() > until or wait(_LOOK_S):
                return


def _new(now: bytes, seen: bytes, kind: int) -> list[int]:
    return [shard for shard, mark in enumerate(now) if mark & ~seen[shard] & kind]
