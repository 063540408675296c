"""Live parameters of another process at addresses that stay, whatever may be done to them."""

from __future__ import annotations

import contextlib
import enum
import mmap

from weightsync.shm.huge_pages import MAP_NORESERVE, advise, map_at, reserve

__all__ = ["LiveMapping", "MemoryAccess"]


class MemoryAccess(enum.Enum):
    """What this process may do there, as protection and flags of mmap(2)."""

    NONE = (0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    """Nothing: whoever reads or writes there is ended by SIGSEGV. The memory is let go."""
    READ = (mmap.PROT_READ, mmap.MAP_SHARED)
    """Read what is live; whoever writes there is ended by SIGSEGV."""
    WRITE = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    """Write what is live."""
    COPY = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_NORESERVE)
    """Write a copy that nobody else sees."""


class LiveMapping:
    """The first `size` bytes behind a descriptor, which no child that is forked has.

    What is mapped is replaced as a whole, by one call of the kernel: no address is free meanwhile,
    and a thread that writes there has written either what is live or not. Through a descriptor for
    reading nothing can be written, whatever protection somebody gives the pages.

    Attributes:
        view: All bytes.

    Args:
        fd: Descriptor; the caller keeps it.
        size: Bytes, a multiple of the page size.
        access: What may be done there at first.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int, size: int, access: MemoryAccess = MemoryAccess.READ) -> None:
        self._place, offset, self._address = reserve(size)
        self._size = size
        try:
            self.put(fd, access)
        except BaseException:
            self._place.close()
            raise
        self.view = memoryview(self._place)[offset : offset + size]

    def put(self, fd: int, access: MemoryAccess) -> None:
        """Have what lies behind a descriptor here, at once.

        Args:
            fd: Descriptor of the same memory, not needed any more afterwards; of `NONE` any.
            access: What may be done from now on.

        Raises:
            OSError: It cannot be mapped so; all is as it was.
        """
        prot, flags = access.value
        where = -1 if access is MemoryAccess.NONE else fd
        map_at(self._address, self._size, prot, flags, where)
        advise(self._address, self._size, mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Let go of the memory; addresses that something views still are nobody's."""
        self.put(-1, MemoryAccess.NONE)
        with contextlib.suppress(BufferError):
            self.view.release()
            self._place.close()
