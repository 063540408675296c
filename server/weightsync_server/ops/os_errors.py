"""What an error of the operating system means for a caller: one table for the whole server.

`what` is always the act, as the subject of a sentence, such as "writing shard 3".
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from weightsync.errors import Reason, WeightSyncError
from weightsync.process_limits import file_limit_remedy, open_files_remedy

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_HANDLES = frozenset({errno.EMFILE, errno.ENFILE})
_NO_MEMORY = frozenset({errno.ENOMEM, errno.EAGAIN})


def _common(error: OSError, what: str) -> WeightSyncError | None:
    if error.errno in _NO_HANDLES:
        return WeightSyncError(
            Reason.DISK_EXHAUSTED,
            f"{what} failed: {error.strerror}; {open_files_remedy(error)}",
        )
    if error.errno in _NO_MEMORY:
        return WeightSyncError(
            Reason.MEMORY_EXHAUSTED, f"{what} failed: {error.strerror}; free memory on the host"
        )
    return None


def write_fault(error: OSError, what: str) -> WeightSyncError:
    if error.errno in _NO_SPACE:
        return WeightSyncError(
            Reason.DISK_EXHAUSTED,
            f"{what} failed: {error.strerror}; free space on that disk, or delete versions if it "
            "is the store's",
        )
    if error.errno == errno.EFBIG:
        return WeightSyncError(
            Reason.DISK_EXHAUSTED, f"{what} failed: {error.strerror}; {file_limit_remedy()}"
        )
    remedy = "check that disk"
    if error.errno == errno.EROFS:
        remedy = "mount that disk writable: the kernel log says why it is read-only"
    return _common(error, what) or WeightSyncError(
        Reason.FAULT, f"{what} failed: {error.strerror or error}; {remedy}"
    )


def read_fault(error: OSError, what: str) -> WeightSyncError:
    return _common(error, what) or WeightSyncError(
        Reason.DATA_CORRUPT,
        f"{what} failed: {error.strerror or error}; push the version again or restore the file",
    )


def system_fault(error: BaseException, what: str) -> WeightSyncError | None:
    """Return the refusal for an error that the system is to blame for; None: the fault is ours."""
    if isinstance(error, MemoryError):
        return WeightSyncError(
            Reason.MEMORY_EXHAUSTED, f"{what} failed: no memory is left; free memory on the host"
        )
    # A timeout of asyncio is an OSError, too, but no system has given it a number.
    if isinstance(error, OSError) and error.errno is not None:
        # The system's own words: those of whoever raised it may tell too much.
        return write_fault(OSError(error.errno, os.strerror(error.errno)), what)
    return None


def to_refusal(error: BaseException, what: str) -> WeightSyncError:
    """Return what a caller is told of any error: itself, what the system said, or FAULT."""
    if isinstance(error, WeightSyncError):
        return error
    return system_fault(error, what) or WeightSyncError(
        Reason.FAULT, f"{what} failed inside the server; see its log"
    )


@contextlib.contextmanager
def translate_os_errors(what: str) -> Iterator[None]:
    """Raise what the system refuses in the block as the refusal that it means."""
    try:
        yield
    except (OSError, MemoryError) as error:
        refusal = system_fault(error, what)
        if refusal is None:
            raise
        raise refusal from error
