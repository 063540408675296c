"""Shared memory mapped at addresses at which the kernel can use huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

__all__ = ["HUGE", "Mapping", "advise"]

#: One huge page on x86-64.
HUGE = 2 << 20

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def advise(address: int, size: int, advice: int) -> int:
    """Call madvise(2) without the GIL; return 0 or the error number."""
    # Through ctypes, because mmap.madvise holds the GIL.
    return 0 if _libc.madvise(address, size, advice) == 0 else ctypes.get_errno()


class Mapping:
    """The first `size` bytes behind a descriptor, writable, until `close`.

    Attributes:
        view: All bytes.
        address: Of the first; a multiple of `HUGE` where that helps.

    Args:
        fd: Writable descriptor; not needed any more afterwards.
        size: Bytes, a multiple of the page size.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int, size: int) -> None:
        slack = HUGE if size >= HUGE else 0
        # Python cannot map at a given address, so this takes a place that is large enough, and the
        # shared memory is put into it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._place = mmap.mmap(-1, size + slack, flags=flags)
        anchor = ctypes.c_char.from_buffer(self._place)
        begin = ctypes.addressof(anchor)
        # The traceback of an error must not keep the mapping.
        del anchor
        offset = -begin % HUGE if slack else 0
        self.address = begin + offset
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(self.address, size, prot, flags, fd, 0) != self.address:
            code = ctypes.get_errno()
            self._place.close()
            raise OSError(code, os.strerror(code))
        self.view = memoryview(self._place)[offset : offset + size]

    def keep_from_children(self) -> None:
        """Let no child that is forked from now on have it."""
        self._place.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Unmap; a view that somebody still holds keeps it until that is gone."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._place.close()
