"""Host memory for copies of tensors that come one after the other."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["CopyMemory"]

#: Bytes of a block; a larger tensor gets a block of its own.
_BLOCK_BYTES = 64 << 20


class CopyMemory:
    """Memory that is used again once nobody reads what lies in it: new pages cost more than a copy.

    One thread takes, any may let go. It holds no more than was in use at one time.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._block: NDArray[np.uint8] | None = None
        self._at = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes, in use as long as the array or a view of it is."""
        if self._block is None or len(self._block) - self._at < size:
            # Where nobody reads the block any more, it is the next one as well.
            self._block, self._at = None, 0
            self._block = self._new(size)
        begin, self._at = self._at, self._at + size
        return self._block[begin : self._at]

    def _new(self, size: int) -> NDArray[np.uint8]:
        import numpy as np

        fitting = (at for at, memory in enumerate(self._free) if len(memory) >= size)
        at = next(fitting, None)
        if at is None:
            self._free.clear()
            memory = np.empty(max(size, _BLOCK_BYTES), np.uint8)
        else:
            memory = self._free.pop(at)
        # Its views keep the block, not the memory, and the block's end gives the memory back.
        block = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(block, self._free.append, memory).atexit = False
        return block
