"""The lock on the state directory: two servers never run on one state."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["StateLock"]


class StateLock:
    """Held until `close` or the end of the process, however it ends.

    Args:
        folder: The state directory; made when missing.

    Raises:
        WeightSyncError: REQUEST_INVALID when another server holds it or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"state_dir {folder} cannot be written ({error.strerror}); choose another or make "
                "it this user's",
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"another weightsync-server runs on {folder}; stop it or choose another state_dir",
            ) from None

    def close(self) -> None:
        """Let another server in."""
        os.close(self._fd)
