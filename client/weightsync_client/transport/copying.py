"""Copies that digest what they copy: in C where a processor gains by that, else NumPy's.

This imports NumPy, so it is imported late.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsync.delta.kernels import chosen
from weightsync.delta.kernels.native import address, digest_bytes, function
from weightsync.model.digest import TensorDigester

if TYPE_CHECKING:
    import numpy.typing as npt

#: All pieces but the last have a multiple of so many bytes.
STEP = 1024
_LONGEST_SHORT = 240
#: Below this a call of NumPy's and one of xxhash's are as fast.
_LEAST = 384 << 10
#: On processors without one of these levels, two passes are faster, or nobody has measured.
_LEVELS = frozenset({"avx2", "avx512"})


class NativeCopier:
    """Copies a text piece by piece, and digests what it copies; as fast with pieces of any size.

    What is digested is written past the caches (copying.h).

    `size` must be above 240 bytes: shorter texts are digested in another way. `level` is avx2 or
    avx512.
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
        """Copy the next piece; ValueError: it is none that can come next; nothing was written.

        `piece` is contiguous, and a multiple of `STEP` bytes unless it is the last. `target` is as
        long, and not kept. The GIL is released while a large one is copied.
        """
        size, left = len(piece), self._left - len(piece)
        # Before there are arrays: in a traceback they would keep the memory.
        if size != len(target) or left < 0 or (left and size % STEP) or not size:
            raise ValueError(f"{size} bytes for {len(target)}, {self._left} of {self._size} left")
        data, place = np.frombuffer(piece, np.uint8), np.frombuffer(target, np.uint8)
        both = address(data), address(place)
        first, last = self._left == self._size, left == 0
        self._copy(address(self._state), *both, size, first, last)
        self._left = left

    def digest(self) -> bytes:
        """Return the `weightsync.model.digest.tensor_digest` of all pieces."""
        out = np.empty(16, np.uint8)
        function("finish_digest", self._level)(address(self._state), self._size, address(out))
        return out.tobytes()


class PlainCopier:
    """See `NativeCopier`; fastest with pieces that fit into a cache."""

    def __init__(self) -> None:
        self._digester = TensorDigester()

    def update(self, piece: memoryview, target: memoryview) -> None:
        self._digester.update(piece)
        # NumPy lets other threads run meanwhile; a memoryview does not.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(piece, np.uint8))

    def digest(self) -> bytes:
        return self._digester.digest()


@cache
def _level() -> str:
    return str(getattr(chosen(), "level", ""))


def copier_of(size: int) -> NativeCopier | PlainCopier:
    if size >= _LEAST and _level() in _LEVELS:
        return NativeCopier(size, _level())
    return PlainCopier()
