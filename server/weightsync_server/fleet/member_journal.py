"""What a member must know after a crash, before it has asked anybody."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import in_thread
from weightsync_server.store.documents import read_document, write_document

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MemberJournal"]

logger = logging.getLogger(__name__)


class MemberJournal:
    """One small file, replaced whole.

    Args:
        path: The file; its folder exists.

    Attributes:
        stopped_in: Number of the apply for which the host was stopped; 0: it may serve.
        seen: The highest number of an apply that was read.

    Raises:
        WeightSyncError: DATA_CORRUPT.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.stopped_in = self.seen = 0
        try:
            found = read_document(path)
            self.stopped_in, self.seen = int(found["stopped_in"]), int(found["seen"])
        except FileNotFoundError:
            pass
        except (ValueError, KeyError) as error:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"{path} is damaged, so that it is not known whether this host may serve; see "
                "`weightsync fleet status`, then remove the file",
            ) from error

    async def stop(self, number: int) -> None:
        """Write down that the host is about to be stopped; durable when this returns.

        Args:
            number: Of the apply; 0 where it is for another reason.

        Raises:
            WeightSyncError: It could not be.
        """
        # Above 0 also before any apply was read.
        await self._write(number or self.seen or 1, self.seen)

    async def serve(self) -> None:
        """Write down that the host may serve.

        Raises:
            WeightSyncError: It could not be.
        """
        await self._write(0, self.seen)

    async def see(self, number: int) -> None:
        """Write down that an apply was read.

        Raises:
            WeightSyncError: It could not be.
        """
        await self._write(self.stopped_in, max(number, self.seen))

    async def _write(self, stopped_in: int, seen: int) -> None:
        if (stopped_in, seen) == (self.stopped_in, self.seen):
            return
        document = {"stopped_in": stopped_in, "seen": seen}
        with translate_os_errors(f"writing {self._path}"):
            await in_thread(write_document, self._path, document)
        self.stopped_in, self.seen = stopped_in, seen
