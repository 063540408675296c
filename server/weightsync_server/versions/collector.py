"""Who may be evicted or deleted, and the deletions that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from weightsync_server.versions.records import VersionRecord
    from weightsync_server.versions.registry import ModelVersions
    from weightsync_server.versions.retention import Retention

__all__ = ["Collector"]

logger = logging.getLogger(__name__)


class Collector:
    """Bounds memory and store; never touches what is live, leased, pinned or being written.

    Args:
        versions: The registry.
        retention: Bounds on what the store keeps.
    """

    def __init__(self, versions: ModelVersions, retention: Retention) -> None:
        self._versions = versions
        self._retention = retention
        self._background: set[asyncio.Task[None]] = set()

    def use(self, record: VersionRecord) -> str:
        """Tell why a version must stay, with what to do about it; empty: it need not."""
        if record.version == self._versions.live:
            return "live; apply another version first"
        if record.durability != pb.DURABILITY_COMMITTED:
            return "being pushed; abort the push instead"
        if record.pinned:
            return "pinned; unpin it first"
        if record.slot is not None and (record.slot.leases or record.slot.writing):
            return "staged for an apply or being read; retry when that has ended"
        return ""

    def order(self, record: VersionRecord) -> tuple[int, int] | None:
        """Tell when a version loses its slot, smallest first; None: it keeps it."""
        if self.use(record):
            return None
        if record.version == self._versions.newest and not record.rejected_reason:
            return (2, record.version)
        return (1 if record.version == self._versions.rollback_to else 0, record.version)

    def evict(self, record: VersionRecord) -> None:
        """Take note that a version loses its slot."""
        record.residency = pb.RESIDENCY_ABSENT
        record.manifest = None
        if self._versions.store.durable:
            self._versions.tell(record)
        else:
            # memory://: its slot was all there was of it.
            self._versions.forget(record)
            self.spawn(self._versions.scrub(record))

    def collect(self) -> None:
        """Begin to delete what exceeds the retention."""
        self.spawn(self._collect())

    async def close(self) -> None:
        """Wait for deletions."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    def _kept(self, record: VersionRecord) -> bool:
        ours = self._versions
        in_use = bool(self.use(record)) or record.slot is not None
        return in_use or record.version in (ours.newest, ours.rollback_to)

    async def _collect(self) -> None:
        records = [r for r in self._versions.list() if r.durability == pb.DURABILITY_COMMITTED]
        for record in self._retention.surplus(records, self._kept):
            if self._versions.find(record.version) is record and not self._kept(record):
                await self._versions.delete(record.version)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what nobody waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("deleting a version failed: %r", error)
