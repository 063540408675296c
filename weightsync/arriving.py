"""A version that still comes in, as other processes read it: its layout, its segments, and marks.

The document lies in a segment of its own. Its owner marks shards in it as they come; whoever maps
it looks at the marks, so that nobody has to be called for each.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.manifest import Manifest
from weightsync.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weightsync.manifest import Layout

__all__ = ["ArrivalReader", "ArrivalWriter"]

_HEAD = struct.Struct("<8sIII")
_MAGIC = b"WSCOMES1"
#: From one look at the marks to the next, seconds.
_LOOK_S = 0.005


class ArrivalWriter:
    """Owns the document and marks what has come.

    Args:
        layout: Of the version.
        segments: Segment id of each shard, in the order of the layout's shards.

    Attributes:
        segment: The shared memory; its owner closes it.

    Raises:
        WeightSyncError: MEMORY_EXHAUSTED.
    """

    def __init__(self, layout: Layout, segments: Sequence[str]) -> None:
        ids = ",".join(segments).encode()
        # What the bytes will be is not known yet.
        body = Manifest(layout, (b"",) * len(layout.tensors)).to_json()
        count = len(segments)
        head = _HEAD.pack(_MAGIC, count, len(ids), len(body))
        text = head + bytes(count + 1) + ids + body
        self.segment = Segment.create(len(text))
        self.segment.view[: len(text)] = text

    def mark(self, shard: int) -> None:
        """Tell that all bytes of a shard lie in its segment, and stay as they are."""
        self.segment.view[_HEAD.size + 1 + shard] = 1

    def end(self) -> None:
        """Tell that nothing more will be marked."""
        self.segment.view[_HEAD.size] = 1


class ArrivalReader:
    """Reads the document where another process writes its marks.

    Args:
        view: All of it; used as long as this is.

    Attributes:
        layout: Of the version.
        segments: Segment id of each shard, in the order of the layout's shards.

    Raises:
        ValueError: The memory holds no such document.
    """

    def __init__(self, view: memoryview) -> None:
        magic, count, ids_size, body_size = _HEAD.unpack_from(view)
        marks = _HEAD.size + 1 + count
        end = marks + ids_size
        if magic != _MAGIC or end + body_size > len(view):
            msg = "not a version that comes in"
            raise ValueError(msg)
        self.layout = Manifest.from_json(bytes(view[end : end + body_size])).layout
        self.segments = tuple(bytes(view[marks:end]).decode().split(","))
        if not len(self.segments) == len(self.layout.shards) == count:
            msg = f"{len(self.segments)} segments for {len(self.layout.shards)} shards"
            raise ValueError(msg)
        self._view = view
        self._marks = slice(_HEAD.size + 1, marks)

    def arrivals(self, wait: Callable[[float], bool], patience_s: float) -> Iterator[int]:
        """Yield each shard once, when all its bytes are there; ends when no more will come.

        Args:
            wait: Called with seconds between two looks; returns after them, or True at once: then
                it ends too.
            patience_s: It ends when nothing came for so many seconds.
        """
        seen = bytes(len(self.segments))
        until = clock.monotonic() + patience_s
        while True:
            # Before the marks: what is marked before the end shall be seen.
            over = self._view[_HEAD.size]
            now = bytes(self._view[self._marks])
            yield from (shard for shard, there in enumerate(now) if there and not seen[shard])
            if now != seen:
                seen, until = now, clock.monotonic() + patience_s
            elif over or clock.monotonic() > until or wait(_LOOK_S):
                return
