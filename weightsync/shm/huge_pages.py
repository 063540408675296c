"""Shared memory mapped at addresses at which the kernel can use huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

__all__ = ["HUGE", "MAP_NORESERVE", "Mapping", "advise", "map_at", "reserve"]

#: One huge page on x86-64.
HUGE = 2 << 20

MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def advise(address: int, size: int, advice: int) -> int:
    """Call madvise(2) without the GIL; return 0 or the error number."""
    # Through ctypes, because mmap.madvise holds the GIL.
    return 0 if _libc.madvise(address, size, advice) == 0 else ctypes.get_errno()


def reserve(size: int) -> tuple[mmap.mmap, int, int]:
    """Take addresses for `size` bytes at which huge pages can lie; nothing is there yet.

    Returns:
        What has the addresses until it is closed, where in it the first byte is, and its address.

    Raises:
        OSError: There are not so many.
    """
    slack = HUGE if size >= HUGE else 0
    # Python cannot map at a given address, so this takes a place that is large enough.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    place = mmap.mmap(-1, size + slack, flags=flags)
    anchor = ctypes.c_char.from_buffer(place)
    begin = ctypes.addressof(anchor)
    # The traceback of a later error must not keep the mapping.
    del anchor
    offset = -begin % HUGE if slack else 0
    return place, offset, begin + offset


def map_at(address: int, size: int, prot: int, flags: int, fd: int) -> None:
    """Put the first `size` bytes behind a descriptor at reserved addresses, by one call.

    Raises:
        OSError: It cannot be mapped; what was there is there still.
    """
    if _libc.mmap(address, size, prot, flags | _MAP_FIXED, fd, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


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
        self._place, offset, self.address = reserve(size)
        try:
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            map_at(self.address, size, prot, mmap.MAP_SHARED, fd)
        except OSError:
            self._place.close()
            raise
        self.view = memoryview(self._place)[offset : offset + size]

    def keep_from_children(self) -> None:
        """Let no child that is forked from now on have it."""
        self._place.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Unmap; a view that somebody still holds keeps it until that is gone."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._place.close()
