"""A safetensors file in memory, made of parts of another: it is handed on as the other would be."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.free_memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["in_memory"]

#: Bytes that the kernel copies in one call.
_PIECE = 1 << 30


def in_memory(header: bytes, fd: int, ranges: Sequence[tuple[int, int]], what: str) -> int:
    """Return a descriptor of a safetensors file in memory; the caller closes it.

    Args:
        header: Its header, as long as a multiple of 8 bytes.
        fd: Where its data are.
        ranges: Begin and end of them there, in their order.
        what: Whose it is, for the sentence.

    Raises:
        WeightSyncError: MEMORY_EXHAUSTED: there is no room for it, or its data cannot be read.
    """
    size = sum(end - begin for begin, end in ranges)
    if size > (free := available_bytes()):
        raise WeightSyncError(
            Reason.MEMORY_EXHAUSTED,
            f"{what} takes {size} bytes of memory while it is read, and {free} are there; free as "
            "much",
        )
    copy = os.memfd_create("weightsync-checkpoint")
    try:
        os.write(copy, len(header).to_bytes(8, "little") + header)
        for begin, end in ranges:
            _append(copy, fd, begin, end)
    except OSError as error:
        os.close(copy)
        raise WeightSyncError(
            Reason.MEMORY_EXHAUSTED,
            f"{what} cannot be read: {error}; it needs as much memory as its files",
        ) from error
    return copy


def _append(copy: int, fd: int, begin: int, end: int) -> None:
    while begin < end:
        count = os.sendfile(copy, fd, begin, min(_PIECE, end - begin))
        if not count:
            raise OSError(errno.EIO, "it became shorter")
        begin += count
