"""The one place at which files change: whoever writes, flushes, renames or removes asks here.

So a test that puts another function in the place of one of these fails or forgets any step. They
are called as `files.fsync(fd)`, never imported by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from weightsync import failpoints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Buffer

__all__ = [
    "allocate",
    "append",
    "create",
    "create_unnamed",
    "flush_directory",
    "fsync",
    "link",
    "open_written",
    "pwrite",
    "rename",
    "unlink",
    "write",
]

_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE = 0o640
#: Every disk writes a multiple of this without the page cache, from memory that begins at one.
_BLOCK = 4096


def create(path: Path | str) -> int:
    """Return a descriptor of a new file; one that exists is an error."""
    return os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)


def create_unnamed(directory: Path | str) -> int:
    """Return a descriptor of a new file without a name; `link` may give it one."""
    return os.open(directory, os.O_WRONLY | os.O_CLOEXEC | os.O_TMPFILE, _MODE)


def open_written(path: Path | str, *, new: bool = False) -> int:
    """Return a descriptor of a file to write into, which keeps what it holds.

    Args:
        path: The file; never followed if it is a link.
        new: Make it where it is missing; else that is an error.
    """
    return os.open(path, _FLAGS | (os.O_CREAT if new else 0), _MODE)


def append(path: Path | str) -> int:
    """Return a descriptor that writes behind the end of a file that exists."""
    return os.open(path, _FLAGS | os.O_APPEND)


def write(fd: int, data: Buffer) -> None:
    """Write all of a small piece of data."""
    failpoints.hit("file.write")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def pwrite(fd: int, data: Buffer, offset: int) -> int:
    """Write at an offset and return how many bytes were; fewer than asked is no error.

    Whole blocks go to the disk past the page cache, where the file system can: that takes a fifth
    of the processor's time, above all for a file that was reserved. They become durable with
    `fsync`, as the others do.
    """
    view = memoryview(data).cast("B")
    if before := -offset % _BLOCK:
        return os.pwrite(fd, view[:before], offset)
    if whole := len(view) // _BLOCK * _BLOCK:
        with contextlib.suppress(OSError), _past_cache(fd):
            return os.pwrite(fd, view[:whole], offset)
    # Also what failed: the same error comes again, unless it was that the disk or the memory of
    # these bytes does not allow it.
    return os.pwrite(fd, view, offset)


@contextlib.contextmanager
def _past_cache(fd: int) -> Iterator[None]:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def allocate(fd: int, size: int) -> None:
    """Reserve the first `size` bytes, so that a full disk is met before any is written."""
    if size:
        os.posix_fallocate(fd, 0, size)


def fsync(fd: int) -> None:
    """Make the bytes of a file durable; after an error nothing is known of them."""
    failpoints.hit("file.fsync")
    os.fsync(fd)


def cut(fd: int, size: int) -> None:
    """Cut a file off; what was behind its new end may come back after a loss of power."""
    os.ftruncate(fd, size)


def rename(source: Path | str, target: Path | str) -> None:
    """Give a file another name, in the place of what had it; durable after `flush_directory`."""
    failpoints.hit("file.rename")
    os.replace(source, target)  # noqa: PTH105 - paths come as text too


def link(fd: int, target: Path | str) -> None:
    """Give an unnamed file its name, in one step; durable after `flush_directory`.

    Raises:
        FileExistsError: Another file has it.
    """
    # Python follows the link in /proc only where it is given a directory, which this path ignores.
    os.link(f"/proc/self/fd/{fd}", target, src_dir_fd=fd, follow_symlinks=True)


def unlink(path: Path | str) -> None:
    """Remove a file; that it is missing is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - paths come as text too


def flush_directory(path: Path | str) -> None:
    """Make the names in a directory durable."""
    failpoints.hit("file.flush_directory")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
