"""Parameters of a rank in shared memory, which who attaches maps as those of a real engine."""

from __future__ import annotations

import os
import weakref
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from weightsync.shm.live_views import DOCUMENT, GATE, MEMORY, LiveBox, LiveViews
from weightsync.shm.live_writers import LiveWriters
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["SharedTensors"]

#: Where each tensor begins, bytes.
_ALIGNMENT = 64


class SharedTensors(MutableMapping[str, bytes]):
    """Name to bytes, which lie one behind the other in a segment; their sizes stay.

    Args:
        tensors: What they are.

    Attributes:
        writers: Who else has them.
    """

    def __init__(self, tensors: Mapping[str, bytes]) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, data in tensors.items():
            self._places[name] = end, len(data)
            end += -(-len(data) // _ALIGNMENT) * _ALIGNMENT
        self._segment = Segment.create(end)
        segment = self._segment
        self.writers = LiveWriters(lambda: (segment,))
        weakref.finalize(self, self._segment.close)
        for name, data in tensors.items():
            self[name] = data

    def __getitem__(self, name: str) -> bytes:
        """Return a copy of what lies there now."""
        begin, size = self._places[name]
        return bytes(self._segment.view[begin : begin + size])

    def __setitem__(self, name: str, data: bytes) -> None:
        """Put bytes there."""
        begin, size = self._places[name]
        self._segment.view[begin : begin + size] = data

    def __delitem__(self, name: str) -> None:
        """No parameter can go."""
        msg = f"{name} is a parameter of the model, which stays"
        raise TypeError(msg)

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._places)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._places)

    def hand_out(
        self,
        socket: str,
        offer: str,
        rank: str,
        checkpoint: str,
        kinds: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        writable: bool,
    ) -> None:
        """Send what opens the memory over the segment socket, as a rank of vLLM does.

        Args:
            socket: The segment socket.
            offer: What the server expects.
            rank: `dp/pp/tp`.
            checkpoint: What the engine has loaded.
            kinds: Name to dtype and shape.
            writable: Whether it can be written at any time, as older releases want it.
        """
        boxes = tuple(self._box(name, *kind) for name, kind in kinds.items())
        document = LiveViews(rank, b"", checkpoint, {}, boxes).to_json()
        memory = self._segment.lend() if writable else self._segment.read_only_fd()
        fds = [os.memfd_create("weightsync", os.MFD_CLOEXEC), memory]
        try:
            os.pwrite(fds[0], document, 0)
            files = [(DOCUMENT, len(document)), (MEMORY, self._segment.capacity)]
            with SegmentClient(socket) as client:
                parts = ((*file, fd) for file, fd in zip(files, fds, strict=True))
                client.offer(f"{offer}/{rank}", list(parts))
        finally:
            for fd in fds:
                os.close(fd)

    def open_block(self, socket: str, offer: str, rank: str) -> None:
        """Send what the memory is written with in one block; see `hand_out`."""
        fds = [self.writers.gate(), self._segment.lend()]
        try:
            with SegmentClient(socket) as client:
                files = [(GATE, 0, fds[0]), (MEMORY, self._segment.capacity, fds[1])]
                client.offer(f"{offer}/{rank}", files)
        finally:
            for fd in fds:
                os.close(fd)

    def _box(self, name: str, dtype: str, shape: tuple[int, ...]) -> LiveBox:
        nowhere, begin = (0,) * len(shape), self._places[name][0]
        return LiveBox(name, dtype, dtype, shape, nowhere, shape, _dense(shape), 0, begin)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, size = [], 1
    for length in reversed(shape):
        stride.append(size)
        size *= length
    return tuple(reversed(stride))
