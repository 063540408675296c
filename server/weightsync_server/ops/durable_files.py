"""The one place at which files change, so that a test can make any step fail or be forgotten.

Its functions are called as `files.fsync(fd)`, never imported by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import invalid_request

if TYPE_CHECKING:
    from typing_extensions import Buffer


_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE = 0o640
#: Every disk writes a multiple of this without the page cache, from memory that begins at one.
_BLOCK = 4096


def create(path: Path | str) -> int:
    return os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)


def create_unnamed(directory: Path | str) -> int:
    """Return a descriptor of a new file without a name; `link` may give it one."""
    return os.open(directory, os.O_WRONLY | os.O_CLOEXEC | os.O_TMPFILE, _MODE)


def open_written(path: Path | str, *, new: bool = False) -> int:
    """Return a descriptor to write into a file, which keeps what it holds; follows no link."""
    return os.open(path, _FLAGS | (os.O_CREAT if new else 0), _MODE)


def append(path: Path | str) -> int:
    return os.open(path, _FLAGS | os.O_APPEND)


def write(fd: int, data: Buffer) -> None:
    failpoints.hit("file.write")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def pwrite(fd: int, data: Buffer, offset: int) -> int:
    """Write at an offset and return how many bytes were; fewer than asked is no error.

    Whole blocks go to the disk past the page cache, where the file system can: that takes a fifth
    of the processor's time, above all for a file that was reserved. Only `fsync` makes them
    durable.
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
    """Give an unnamed file its name, in one step; durable after `flush_directory`."""
    # Python follows the link in /proc only where it is given a directory, which this path ignores.
    os.link(f"/proc/self/fd/{fd}", target, src_dir_fd=fd, follow_symlinks=True)


def unlink(path: Path | str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - paths come as text too


def flush_directory(path: Path | str) -> None:
    failpoints.hit("file.flush_directory")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class StateLock:
    """Held until `close` or the end of the process, however it ends; makes the `folder`."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise invalid_request(
                f"state_dir {folder} cannot be written ({error.strerror}); choose another or make "
                "it this user's"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise invalid_request(
                f"another weightsync-server uses {folder}; stop it, or choose another state_dir"
            ) from None

    def close(self) -> None:
        os.close(self._fd)
