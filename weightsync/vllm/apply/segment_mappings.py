"""The server's segments as a process maps them; making them known to a device takes seconds."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync.vllm.apply.device_ops import MemoryRegistrar

__all__ = ["SegmentMappings"]


class SegmentMappings:
    """Segments of the server that this process has mapped, by id. Each is mapped once.

    Args:
        registrar: Makes them known to a device for as long as they are mapped; None: no device.
    """

    def __init__(self, registrar: MemoryRegistrar | None = None) -> None:
        self._mapped: dict[str, MappedSegment] = {}
        self._registrar = registrar

    def map(self, socket: str, ids: Sequence[str]) -> list[memoryview]:
        """Return the bytes of segments, in the order of `ids`.

        Raises:
            OSError: Nobody listens on the segment socket.
            LookupError: The server has no such segment.
        """
        missing = [name for name in dict.fromkeys(ids) if name not in self._mapped]
        if missing:
            with SegmentClient(socket) as client:
                received = client.map(missing)
            left = dict(zip(missing, received, strict=True))
            try:
                for name in missing:
                    self._mapped[name] = MappedSegment(*left.pop(name))
            finally:
                for fd, _ in left.values():
                    os.close(fd)
        if self._registrar is not None:
            for name in ids:
                self._registrar.register(name, self._mapped[name].view)
        return [self._mapped[name].view for name in ids]

    @property
    def ids(self) -> frozenset[str]:
        """What is mapped. Any thread may ask; what another one unmaps is in it until it has."""
        return frozenset(self._mapped)

    def unmap(self, ids: Iterable[str]) -> None:
        """Unmap these segments; one that somebody still views stays mapped."""
        for name in self.ids.intersection(ids):
            if self._registrar is not None:
                self._registrar.unregister(name)
            # Whoever views it keeps it; whoever maps it again has it registered again.
            with contextlib.suppress(BufferError):
                self._mapped[name].close()
                del self._mapped[name]

    def __len__(self) -> int:
        """Return the number of mapped segments."""
        return len(self._mapped)
