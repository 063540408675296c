"""What a fetcher does with a shard that is still arriving: keep its bytes, and read them back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync_server.ops import durable_files
from weightsync_server.ops.os_errors import read_fault, write_fault
from weightsync_server.store import checkpoint_index
from weightsync_server.workers.fetch.shard_tasks import PIECE, look, write_pieces

if TYPE_CHECKING:
    import threading

    from weightsync.model.manifest import ShardEntry

__all__ = ["keep", "restore"]


def keep(
    view: memoryview, shard: ShardEntry, begin: int, target: str, stop: threading.Event
) -> None:
    """Make the bytes of `view` from `begin` on durable in the file `target`, and the list beside.

    Repeating it is harmless. The whole file is reserved with its first bytes.

    Raises:
        WeightSyncError: DISK_EXHAUSTED, FAULT.
        Cancelled: The server no longer wants it.
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
    """Read what was kept of a shard back into `view`; return how many bytes are as they were.

    Raises:
        WeightSyncError: DATA_CORRUPT when nothing of it can be read.
        Cancelled: The server no longer wants it.
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
            look(stop)
            _read(fd, view[part.begin : part.end], part.begin)
            if tensor_digest(view[part.begin : part.end]).hex() != part.digest:
                break
            good = part.end
        return good
    except OSError as error:
        raise read_fault(error, "reading what was kept of a shard") from error
    finally:
        os.close(fd)


def _read(fd: int, view: memoryview, offset: int) -> None:
    # A file that is too short leaves what lay there before, which has another digest.
    while view:
        count = os.preadv(fd, [view[:PIECE]], offset)
        if not count:
            return
        view = view[count:]
        offset += count
