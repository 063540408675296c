"""Versions that will not be committed: those that an engine relies on stay until it has another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from weightsync.model.manifest import Manifest
    from weightsync_server.catalog.commits import CommitService, CommittedDelta
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.serving import ServingState
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.residency.slot_pool import SlotPool
    from weightsync_server.store.protocol import Store


logger = logging.getLogger(__name__)


class OrphanReaper:
    """Drops versions whose push failed, none from under an engine that serves or prepares it."""

    def __init__(
        self,
        table: VersionTable,
        serving: ServingState,
        slots: SlotPool,
        commits: CommitService,
        store: Store,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._table = table
        self._serving = serving
        self._slots = slots
        self._commits = commits
        self._store = store
        self._spawn = spawn

    def use(self, record: VersionRecord) -> str:
        if self._table.find(record.version) is not record:
            return ""
        if self._serving.is_live(record.version):
            return "live; apply another version or roll back first"
        if record.slot is not None and record.slot.leases:
            return "staged for an apply; retry when that has ended"
        return ""

    async def drop(self, record: VersionRecord, *, keep: bool = False) -> None:
        """Label a version as failed; forget it, its slot and what was stored of it when unused.

        Nothing may write to its segments or its files any more.
        """
        # First of all, so that no apply begins to use it while the store is asked.
        record.fail()
        if self.use(record):
            logger.warning(
                "version %d failed to commit and is %s", record.version, self.use(record)
            )
            self._table.publish(record)
        if not keep:
            await self._discard(record)
        if self._table.find(record.version) is record:
            record.orphan()
            self.settle(record)
        else:
            self._slots.release(record)

    def settle(self, record: VersionRecord) -> None:
        if not record.orphaned or self.use(record):
            return
        record.end_orphan()
        self._table.remove(record)
        self._slots.release(record)
        if record.served:
            # What an engine served under a number is never another content.
            self._spawn(self._commits.scrub(record))
        elif record.pinned or record.rejected_reason or record.hold_reason:
            self._spawn(self._commits.unmark(record))

    async def revive(
        self,
        record: VersionRecord,
        manifest: Manifest,
        *,
        epoch: int,
        trainer_verified: bool,
        delta: CommittedDelta | None = None,
        probes: str = "",
    ) -> None:
        """Commit a failed version that is still live, its shards having been stored anew."""
        if self._table.find(record.version) is not record or record.manifest is None:
            raise self._table.not_above(record.version)
        if record.manifest.manifest_digest != manifest.manifest_digest:
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"version {record.version} is live with content {record.content_digest}; push the "
                "same content in the same shards, or push it as a higher version",
                metadata={"content_digest": record.content_digest},
            )
        # While it is being committed nobody may drop it, live or not.
        record.reopen(epoch)
        try:
            await self._commits.commit(
                record,
                record.manifest,
                trainer_verified=trainer_verified,
                delta=delta,
                probes=probes,
            )
        except BaseException:
            await self.drop(record)
            raise

    async def _discard(self, record: VersionRecord) -> None:
        known = self._table.find(record.version)
        if not record.version or (known is not None and known.commit is not None):
            # Nothing was stored of a checkpoint without a number, nor of a repeated push.
            return
        try:
            await self._store.discard(record.model, record.version)
        except (WeightSyncError, OSError) as error:
            # The store removes uncommitted leftovers when it is opened.
            logger.warning(
                "leftover files of version %d could not be removed yet: %s", record.version, error
            )
