"""What a fetcher does with a segment: digest it, write it to a file, fill it from a file."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_shard, parse_header
from weightsync_server.ops import durable_files
from weightsync_server.ops.os_errors import read_fault, write_fault

if TYPE_CHECKING:
    import threading

    from weightsync.model.manifest import ShardEntry

__all__ = [
    "PIECE",
    "BrokenError",
    "Cancelled",
    "check_length",
    "digest",
    "load",
    "look",
    "persist",
    "read_pieces",
    "write_pieces",
]

#: Bytes between two looks at whether the server still wants the result.
PIECE = 16 << 20


class Cancelled(Exception):  # noqa: N818 - no error: the server asked for it
    """The server no longer wants the result."""


class BrokenError(WeightSyncError):
    """What this process works with has failed: it must end, and another takes its place."""


def look(stop: threading.Event) -> None:
    """Raise Cancelled if the server no longer wants the result."""
    if stop.is_set():
        raise Cancelled


def digest(
    view: memoryview, shard: ShardEntry, part: tuple[int, int], stop: threading.Event
) -> bytes:
    """Return the joined 16-byte digests of a shard's tensors, in the order of their bytes.

    The header in the segment is parsed and checked again, so that no digest is of other bytes than
    the header tells.

    Args:
        view: Begins with the shard.
        shard: Its declared sizes in bytes.
        part: Number and count of parts of equal size: only tensors that begin in it are digested.
        stop: Set when the server no longer wants the result.

    Raises:
        WeightSyncError: SHARD_INVALID or LAYOUT_INVALID.
        Cancelled: The server no longer wants it.
    """
    failpoints.hit("fetcher.digest")
    if shard.data_start > shard.size or shard.size > len(view):
        raise WeightSyncError(
            Reason.LAYOUT_INVALID, f"a shard of {shard.size} bytes in {len(view)} bytes of memory"
        )
    found = int.from_bytes(view[:8], "little")
    if found != shard.header_size:
        raise WeightSyncError(
            Reason.SHARD_INVALID,
            f"the shard tells a header of {found} bytes, the layout {shard.header_size}",
        )
    ordered = check_shard(shard, parse_header(view[8 : shard.data_start]))
    number, count = part
    size = max(1, shard.size - shard.data_start)
    parts = []
    since = 0
    for tensor in ordered:
        # An empty tensor at the very end begins in none.
        if min(tensor.begin * count // size, count - 1) != number:
            continue
        since += tensor.end - tensor.begin
        if since >= PIECE:
            look(stop)
            since = 0
        begin = shard.data_start + tensor.begin
        parts.append(tensor_digest(view[begin : begin + tensor.end - tensor.begin]))
    return b"".join(parts)


def write_pieces(fd: int, view: memoryview, begin: int, stop: threading.Event) -> None:
    """Make the bytes of `view` from `begin` on durable at the same place of a file.

    Raises:
        OSError: They are not.
        Cancelled: The server no longer wants it.
    """
    done = begin
    while done < len(view):
        look(stop)
        done += durable_files.pwrite(fd, view[done : done + PIECE], done)
    durable_files.fsync(fd)


def persist(view: memoryview, target: str, temporary: str, stop: threading.Event) -> None:
    """Write `view` to the file `target`: all of it and flushed, or not at all.

    The directory is made where it is missing and not flushed: that is the commit's part.

    Raises:
        WeightSyncError: DISK_EXHAUSTED, FAULT.
        Cancelled: The server no longer wants it.
    """
    what = f"writing {Path(target).name}"
    try:
        failpoints.hit("fetcher.persist")
        Path(target).parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        fd = durable_files.create(temporary)
    except OSError as error:
        raise write_fault(error, what) from error
    try:
        try:
            # Reserved first: a full disk is met before any byte is written.
            durable_files.allocate(fd, len(view))
            write_pieces(fd, view, 0, stop)
        finally:
            os.close(fd)
        durable_files.rename(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            durable_files.unlink(temporary)
        if isinstance(error, OSError):
            raise write_fault(error, what) from error
        raise


def load(fd: int, view: memoryview, stop: threading.Event) -> None:
    """Fill `view` with the whole file `fd`, whose offset is neither used nor moved.

    Raises:
        WeightSyncError: DATA_CORRUPT when the file has another length or cannot be read.
        Cancelled: The server no longer wants it.
    """
    try:
        failpoints.hit("fetcher.load")
        check_length(fd, len(view), "shard")
        os.posix_fadvise(fd, 0, len(view), os.POSIX_FADV_SEQUENTIAL)
        read_pieces(fd, view, "shard", stop)
    except OSError as error:
        raise read_fault(error, "reading a stored shard") from error


def check_length(fd: int, size: int, what: str) -> None:
    """Refuse what is no file of `size` bytes.

    Raises:
        WeightSyncError: DATA_CORRUPT.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise _length(status.st_size, size, what)


def read_pieces(fd: int, view: memoryview, what: str, stop: threading.Event) -> None:
    """Fill `view` with the begin of a file.

    Raises:
        WeightSyncError: DATA_CORRUPT; it is shorter.
        OSError: It cannot be read.
        Cancelled: The server no longer wants it.
    """
    done = 0
    while done < len(view):
        look(stop)
        count = os.preadv(fd, [view[done : done + PIECE]], done)
        if not count:
            raise _length(done, len(view), what)
        done += count


def _length(found: int, wanted: int, what: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.DATA_CORRUPT,
        f"a stored {what} has {found} bytes and should have {wanted}; push the version again or "
        "restore the file",
    )
