"""What becomes of versions that trainers wrote in place and that did not count."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from weightsync_server.catalog.garbage_collector import GarbageCollector
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.serving import ServingState

__all__ = ["InPlaceVersions"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InPlaceVersions:
    """Drops them, wherever their pushes have come to.

    Attributes:
        give_up: Lets nothing become of a version that is not committed, nor of its push.
        collector: Deletes those that are.
        serving: Rejects those that cannot be deleted now.
    """

    give_up: Callable[[VersionRecord, WeightSyncError], Awaitable[None]]
    collector: GarbageCollector
    serving: ServingState

    async def delete(self, record: VersionRecord) -> None:
        """Have nobody take a version for the newest that was pushed and did not count.

        Repeating it is harmless.
        """
        if record.commit is None:
            return
        try:
            await self.collector.delete(record.version, force=True)
        except WeightSyncError as error:
            if error.reason is Reason.VERSION_UNKNOWN:
                return
            logger.warning("version %d did not count and stays: %s", record.version, error.message)
            await self.serving.reject(record.version, "a transaction that did not count")
