"""Files that hold secrets: read whole, refused when others may read or change them."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Stamp", "read_private", "refused", "stamp"]

_MAX_BYTES = 1 << 20
_FORBIDDEN = stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH


class Stamp(NamedTuple):
    """Tells whether a file is still the one that was read."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def stamp(path: Path) -> Stamp | None:
    """Return the stamp of what a path names now, links followed; None: nothing that is there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return Stamp(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


def read_private(path: Path, what: str) -> bytes:
    """Return the content of a file that only its owner changes and others cannot read.

    Args:
        path: The file, or a link to it.
        what: What it is, as the subject of a sentence, such as "the authority file".

    Raises:
        WeightSyncError: REQUEST_INVALID; it cannot be read, or its owner or mode is too open.
    """
    try:
        # O_NONBLOCK: a pipe in its place must not make the server wait.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise refused(f"{what} {path} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise refused(f"{what} {path} is no file of at most 1 MiB; name another")
        if status.st_mode & _FORBIDDEN:
            raise refused(
                f"{what} {path} has mode {stat.S_IMODE(status.st_mode):04o}, so others may read or "
                "change it; set it to 0600 or 0640"
            )
        if status.st_uid not in (0, os.geteuid()):
            raise refused(
                f"{what} {path} belongs to user {status.st_uid}; make root or this server's user "
                "its owner"
            )
        return os.read(fd, _MAX_BYTES)
    finally:
        os.close(fd)


def refused(sentence: str) -> WeightSyncError:
    """Return the error for a file that cannot be used."""
    return WeightSyncError(Reason.REQUEST_INVALID, sentence)
