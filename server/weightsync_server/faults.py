"""What an error of the operating system means for a caller: one table for fetchers and stores."""

from __future__ import annotations

import errno

from weightsync.errors import Reason, WeightSyncError

__all__ = ["read_fault", "write_fault"]

# EFBIG is a limit on file size, set by an administrator (RLIMIT_FSIZE) or by the file system.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_HANDLES = frozenset({errno.EMFILE, errno.ENFILE})
_NO_MEMORY = frozenset({errno.ENOMEM, errno.EAGAIN})


def _common(error: OSError, what: str) -> WeightSyncError | None:
    if error.errno in _NO_HANDLES:
        return WeightSyncError(
            Reason.DISK_EXHAUSTED,
            f"{what} failed: {error.strerror}; raise the limit on open files",
        )
    if error.errno in _NO_MEMORY:
        return WeightSyncError(
            Reason.MEMORY_EXHAUSTED, f"{what} failed: {error.strerror}; free memory on the host"
        )
    return None


def write_fault(error: OSError, what: str) -> WeightSyncError:
    """Return the refusal for an error met while writing; nothing that was written counts.

    Args:
        error: What the operating system said.
        what: The act, as the subject of a sentence, such as "writing shard 3".
    """
    if error.errno in _NO_SPACE:
        return WeightSyncError(
            Reason.DISK_EXHAUSTED,
            f"{what} failed: {error.strerror}; free space in the store or delete versions",
        )
    return _common(error, what) or WeightSyncError(
        Reason.FAULT, f"{what} failed: {error.strerror or error}; check the store's disk"
    )


def read_fault(error: OSError, what: str) -> WeightSyncError:
    """Return the refusal for an error met while reading what was stored.

    Args:
        error: What the operating system said.
        what: The act, as the subject of a sentence, such as "reading shard 3".
    """
    return _common(error, what) or WeightSyncError(
        Reason.DATA_CORRUPT,
        f"{what} failed: {error.strerror or error}; push the version again or restore the file",
    )
