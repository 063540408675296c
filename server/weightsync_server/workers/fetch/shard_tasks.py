"""What a fetcher does with a segment: digest it, write it to a file, fill it from a file.

A task's `stop` is set when the server no longer wants the result; then it raises `Cancelled`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import TensorDigester, tensor_digest
from weightsync.model.layout import check_shard, parse_header
from weightsync.model.manifest import ShardEntry
from weightsync.model.tensor_slices import SliceSpan
from weightsync.wire.child_channel import read_note
from weightsync_server.ops import durable_files
from weightsync_server.ops.os_errors import read_fault, write_fault
from weightsync_server.store import checkpoint_index

#: Bytes between two looks at whether the server still wants the result.
PIECE = 16 << 20


class Cancelled(Exception):  # noqa: N818 - no error: the server asked for it
    """The server no longer wants the result."""


class BrokenError(WeightSyncError):
    """What this process works with has failed: it must end, and another takes its place."""


def look(stop: threading.Event) -> None:
    if stop.is_set():
        raise Cancelled


def digest(
    view: memoryview, shard: ShardEntry, part: tuple[int, int], stop: threading.Event
) -> bytes:
    """Return the joined 16-byte digests of a shard's tensors, in the order of their bytes.

    The header in the segment is checked again, so that no digest is of other bytes than it tells.
    `part` is number and count of parts of equal size: only tensors that begin there are digested.
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
            f"the shard declares a header of {found} bytes, the layout {shard.header_size}",
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
    """Make the bytes of `view` from `begin` on durable at the same place of a file."""
    done = begin
    while done < len(view):
        look(stop)
        done += durable_files.pwrite(fd, view[done : done + PIECE], done)
    durable_files.fsync(fd)


def persist(view: memoryview, target: str, temporary: str, stop: threading.Event) -> None:
    """Write all of `view` to the file `target` and flush it, or write nothing.

    A missing directory is made; flushing it is left to the commit.
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
    """Fill `view` with the whole file `fd`, whose offset is neither used nor moved."""
    try:
        failpoints.hit("fetcher.load")
        read_whole(fd, view, "shard", stop)
    except OSError as error:
        raise read_fault(error, "reading a stored shard") from error


def read_whole(fd: int, view: memoryview, what: str, stop: threading.Event) -> None:
    """Fill `view` with a file that has exactly its length; DATA_CORRUPT: it has another."""
    status = os.fstat(fd)
    found, is_file = status.st_size, stat.S_ISREG(status.st_mode)
    if is_file and found == len(view):
        os.posix_fadvise(fd, 0, len(view), os.POSIX_FADV_SEQUENTIAL)
        found = _read(fd, view, 0, stop)
    if not is_file or found != len(view):
        raise WeightSyncError(
            Reason.DATA_CORRUPT,
            f"a stored {what} has {found} bytes and should have {len(view)}; push the version "
            "again or restore the file",
        )


def _read(fd: int, view: memoryview, offset: int, stop: threading.Event) -> int:
    """Fill `view` from an offset of a file on, as far as that goes; return how far."""
    done = 0
    while done < len(view):
        look(stop)
        count = os.preadv(fd, [view[done : done + PIECE]], offset + done)
        if not count:
            break
        done += count
    return done


def digest_slices(view: memoryview, fd: int, stop: threading.Event) -> bytes:
    """Return the joined 16-byte digests of slices, each of its bytes in row-major order.

    `fd` says where they lie, as `FetchApi.digest_slices` writes it.
    """
    order = read_note(fd)
    digests = []
    for begin, run, counts, strides in order["spans"]:
        digester = TensorDigester()
        for piece in SliceSpan(begin, run, tuple(counts), tuple(strides)).pieces(view):
            look(stop)
            digester.update(piece)
        digests.append(digester.digest())
    return b"".join(digests)


def keep(
    view: memoryview, shard: ShardEntry, begin: int, target: str, stop: threading.Event
) -> None:
    """Make the bytes of `view` from `begin` on durable in `target`, and the list beside it.

    Repeating it is harmless. The first call reserves the whole file.
    """
    try:
        failpoints.hit("fetcher.keep")
        _write(view, shard, begin, target, stop)
        failpoints.hit("fetcher.kept")
        digest = tensor_digest(view[begin:]).hex()
        header = tensor_digest(view[8 : shard.data_start]).hex()
        checkpoint_index.note(
            target, shard, header, checkpoint_index.Range(begin, len(view), digest)
        )
        if begin == 0:
            durable_files.flush_directory(Path(target).parent)
    except OSError as error:
        raise write_fault(error, f"writing {Path(target).name}") from error


def _write(
    view: memoryview, shard: ShardEntry, begin: int, target: str, stop: threading.Event
) -> None:
    fd = durable_files.open_written(target, new=begin == 0)
    try:
        if begin == 0:
            durable_files.allocate(fd, shard.size)
        write_pieces(fd, view, begin, stop)
    finally:
        os.close(fd)


def restore(view: memoryview, shard: ShardEntry, source: str, stop: threading.Event) -> int:
    """Read what was kept of a shard into `view`; return how many bytes are as they were.

    Raises DATA_CORRUPT when nothing can be read.
    """
    failpoints.hit("fetcher.restore")
    try:
        index = checkpoint_index.read(source)
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise read_fault(error, "reading what was kept of a shard") from error
    except ValueError as error:
        raise WeightSyncError(Reason.DATA_CORRUPT, f"{error}; send the shard again") from error
    try:
        good = 0
        for part in index.ranges if index.entry == shard else ():
            # A file that is too short leaves what lay there before, which has another digest.
            _read(fd, view[part.begin : part.end], part.begin, stop)
            if tensor_digest(view[part.begin : part.end]).hex() != part.digest:
                break
            good = part.end
        return good
    except OSError as error:
        raise read_fault(error, "reading what was kept of a shard") from error
    finally:
        os.close(fd)
