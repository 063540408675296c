"""Who may be evicted or deleted, and the deletions that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.retention import Retention
    from weightsync_server.model import ModelVersions

__all__ = ["GarbageCollector"]

logger = logging.getLogger(__name__)


class GarbageCollector:
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
        slot = record.slot
        if record.awaited or (slot is not None and (slot.leases or slot.writing)):
            return "staged for an apply or being read; retry when that has ended"
        return ""

    def deletable(self, record: VersionRecord, *, force: bool = False) -> VersionRecord:
        """Return a version that may be deleted.

        Args:
            record: The version.
            force: The way back of a rollback may go.

        Raises:
            WeightSyncError: VERSION_IN_USE.
        """
        need = self.need(record)
        if not need and not force and record.version == self._versions.rollback_to:
            need = "the one that a rollback would go back to; delete it with force if it may go"
        if need:
            raise WeightSyncError(
                Reason.VERSION_IN_USE,
                f"version {record.version} of model {record.model} is {need}",
                metadata={"version": str(record.version)},
            )
        return record

    def need(self, record: VersionRecord) -> str:
        """Tell why a version must not be deleted, with what to do; empty: it may be."""
        use = self.use(record)
        if use or not record.holds:
            above = [r.version for r in self._versions.list() if r.base is record]
            if use or not above:
                return use
            return f"the base of version {min(above)}; delete that one first"
        return "the base of a delta that is being pushed; retry when that push has ended"

    def order(self, record: VersionRecord, claimer: VersionRecord) -> tuple[int, int] | None:
        """Tell when a version loses its slot to another, smallest first; None: it keeps it."""
        if self.use(record):
            return None
        if record.holds and not self._versions.store.durable and claimer.base is not record:
            # Its only copy, which a delta needs.
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
        in_use = bool(self.use(record)) or record.slot is not None or record.holds > 0
        return in_use or record.version in (ours.newest, ours.rollback_to)

    async def _collect(self) -> None:
        records = [r for r in self._versions.list() if r.durability == pb.DURABILITY_COMMITTED]
        surplus = self._retention.surplus(records, self._kept)
        self._versions.folder.consider(surplus, self._retention.versions)
        for record in surplus.doomed:
            there = self._versions.find(record.version) is record
            if there and not self._kept(record) and not self.need(record):
                await self._versions.delete(record.version)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what nobody waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        self._versions.disk.frees(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("deleting a version failed: %r", error)
