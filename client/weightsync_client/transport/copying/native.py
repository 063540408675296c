"""One pass over the source, in C: what is digested is written past the caches (copying.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from weightsync.delta.kernels.native import address, digest_bytes, function

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["NativeCopier"]

_CHUNK = 1024
_LONGEST_SHORT = 240


class NativeCopier:
    """See `weightsync_client.transport.copying.Copier`; as fast with pieces of any size.

    Args:
        size: More than 240 bytes: shorter texts are digested in another way.
        level: avx2 or avx512.

    Raises:
        ValueError: It is not more.
    """

    def __init__(self, size: int, level: str) -> None:
        if size <= _LONGEST_SHORT:
            raise ValueError(f"{size} bytes")
        self._size = size
        self._left = size
        self._level = level
        self._copy = function("copy_piece", level)
        self._state: npt.NDArray[Any] = np.empty(digest_bytes(), np.uint8)

    def update(self, piece: memoryview, target: memoryview) -> None:
        """Digest and copy the next piece at once.

        Raises:
            ValueError: It is none that can come next; nothing was written.
        """
        size, left = len(piece), self._left - len(piece)
        # Before there are arrays: in a traceback they would keep the memory.
        if size != len(target) or left < 0 or (left and size % _CHUNK) or not size:
            raise ValueError(f"{size} bytes for {len(target)}, {self._left} of {self._size} left")
        data, place = np.frombuffer(piece, np.uint8), np.frombuffer(target, np.uint8)
        both = address(data), address(place)
        first, last = self._left == self._size, left == 0
        self._copy(address(self._state), *both, size, first, last)
        self._left = left

    def digest(self) -> bytes:
        """Return the digest."""
        out = np.empty(16, np.uint8)
        function("finish_digest", self._level)(address(self._state), self._size, address(out))
        return out.tobytes()
