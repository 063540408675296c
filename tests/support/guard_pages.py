"""Memory that ends where it should: a touch beside it ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

__all__ = ["guarded", "guarded_copy"]

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(size: int, dtype: Any = np.uint8, *, at_end: bool = True) -> Any:
    """Return an array of `size` elements; behind it, or before it, nothing may be touched."""
    length = size * np.dtype(dtype).itemsize
    room = max(-(-length // _PAGE), 1) * _PAGE
    mapping = mmap.mmap(-1, room + 2 * _PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for guard in (address, address + _PAGE + room):
        if _libc.mprotect(ctypes.c_void_p(guard), _PAGE, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    begin = _PAGE + room - length if at_end else _PAGE
    # The view keeps the mapping alive.
    return np.frombuffer(mapping, np.uint8)[begin : begin + length].view(dtype)


def guarded_copy(data: Any, *, at_end: bool = True) -> Any:
    """Return such an array with this content."""
    made = guarded(len(data), data.dtype, at_end=at_end)
    made[:] = data
    return made
