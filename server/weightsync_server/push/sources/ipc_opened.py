"""Memory of trainers on GPUs from which was copied once, and which others may open therefore.

The driver believes a handle: one that was tampered with opens what is not there, and whoever reads
that has lost his device for good. A process of the server's own reads it first, and may die of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync.shm.incoming_version import IpcAddresses

__all__ = ["Places"]

#: Tensors of a few trainers of large models.
_MOST = 1 << 16

#: Handle, offset and size.
_Place = tuple[bytes, int, int]


class Places:
    """The places that were read last, so many at most.

    Args:
        most: How many.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        #: In the order of their last reading.
        self._read: dict[_Place, None] = {}

    def add(self, where: IpcAddresses, sizes: Sequence[int]) -> None:
        """Take note that all of a shard was read.

        Args:
            where: It lies.
            sizes: Of its tensors, in bytes, in the order of their places.
        """
        for place in _each(where, sizes):
            self._read.pop(place, None)
            self._read[place] = None
        while len(self._read) > self._most:
            del self._read[next(iter(self._read))]

    def discard(self, where: IpcAddresses, sizes: Sequence[int]) -> None:
        """Take note that a shard could not be read; see `add`."""
        for place in _each(where, sizes):
            self._read.pop(place, None)

    def have(self, where: IpcAddresses, sizes: Sequence[int]) -> bool:
        """Return whether all of a shard was read before; see `add`."""
        return all(place in self._read for place in _each(where, sizes))


def _each(where: IpcAddresses, sizes: Sequence[int]) -> Iterator[_Place]:
    for (handle, offset), size in zip(where, sizes, strict=True):
        yield handle, offset, size
