"""Chains of deltas stay short: now and then the newest version is kept in full instead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import about, event
from weightsync.model.manifest import Manifest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.commits import CommitService
from weightsync_server.catalog.garbage_collector import Surplus
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.version_events import ChainFolded
from weightsync_server.ops.settings_group import setting
from weightsync_server.ops.tasks import to_end
from weightsync_server.residency.slot import Slot, slot_of
from weightsync_server.residency.slot_pool import SlotPool
from weightsync_server.store.disk_quota import DiskQuota, DiskReservation
from weightsync_server.store.protocol import Store
from weightsync_server.workers.fetch.fetch_api import FetchApi

if TYPE_CHECKING:
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.deltas.pushed_delta import PushedDelta


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChainSettings:
    """Bounds on what must be read to make a version that is kept as a delta.

    During a fold, there may be twice as many deltas in a row.
    """

    length: int = setting(
        32,
        "Deltas in a row before a version is written in full in the background.",
        name="delta_chain_length",
        ge=1,
    )
    share: float = setting(
        0.5,
        "The same limit for their bytes, as a share of those of a whole version.",
        name="delta_chain_share",
        gt=0,
    )


class Compactor:
    """Rewrites the newest version in full when its chain is too long. No reader notices.

    It works from the version's slot, in the background, and stands back when somebody waits for
    that slot. `lock` is held by any task that reads stored deltas. `collect` is called when a
    version needs its base no more.
    """

    def __init__(
        self,
        table: VersionTable,
        commits: CommitService,
        slots: SlotPool,
        store: Store,
        fetch: FetchApi,
        disk: DiskQuota,
        limits: ChainSettings,
        *,
        lock: asyncio.Lock,
        collect: Callable[[], None],
    ) -> None:
        self._table = table
        self._commits = commits
        self._slots = slots
        self._store = store
        self._fetch = fetch
        self._disk = disk
        self._limits = limits
        self._lock = lock
        self._collect = collect
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def consider(self, surplus: Surplus, most_carried: int) -> None:
        """Begin to fold the newest version if its chain is too long, or carries too much."""
        newest = self._table.find(self._table.newest)
        busy = self._closed or self._task is not None
        if busy or newest is None or newest.base is None:
            return
        there = newest.slot is not None and newest.residency == pb.RESIDENCY_STAGED
        if there and (self._too_long(newest) or surplus.weighs_on(newest, most_carried)):
            # Leased at once: nobody writes over the bytes that are being kept.
            slot = slot_of(newest)
            slot.leases += 1
            # Not about the call that made the chain too long.
            with about(version=newest.version, push_id=None, apply_id=None, trace_id=None):
                self._task = asyncio.create_task(self._fold(newest), name="fold")
                self._task.add_done_callback(partial(self._ended, newest, slot))

    def stand_back(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        self._closed = True
        self.stand_back()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def rewrite(self, record: VersionRecord) -> None:
        """Write a damaged version, staged and leased by the caller, into the store anew, in full.

        DATA_CORRUPT: it is damaged in memory, too. A failure makes it no worse in the store.
        """
        if self._task is not None:
            await asyncio.wait([self._task])
        await self._fold(record)
        record.damage("")
        logger.info("version %d is whole in the store again", record.version)
        # What it was based on may go now.
        self._collect()

    async def admit(
        self, record: VersionRecord, manifest: Manifest, delta: PushedDelta, room: DiskReservation
    ) -> PushedDelta:
        """Return how a delta is to be kept: in full, where the chain would exceed every bound.

        The version lies in its slot, proved and not committed; `manifest` is of the whole version.
        `room` is an empty share of the push, closed afterwards: what is kept in full needs more.
        """
        if not delta.kept or len(delta.base.chain) <= 2 * self._limits.length:
            return delta
        await self._persist(record, manifest, room)
        self._table.events.publish(ChainFolded(record))
        return replace(delta, kept=False)

    def _too_long(self, record: VersionRecord) -> bool:
        deltas = [one.commit for one in record.chain[:-1] if one.commit is not None]
        if not deltas:
            return False
        size = sum(commit.delta_bytes for commit in deltas)
        most = self._limits.share * deltas[0].size_bytes
        return len(deltas) > self._limits.length or size > most

    def _ended(self, record: VersionRecord, slot: Slot, task: asyncio.Task[None]) -> None:
        # Not in the task: one that is cancelled before its first step does nothing.
        self._task = None
        self._slots.end_lease(slot)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, WeightSyncError):
            logger.warning(
                "version %d could not be stored in full yet: %s", record.version, error.message
            )
        elif error is not None:
            logger.error("storing version %d in full failed", record.version, exc_info=error)
        if record.base is None:
            logger.debug(
                "version %d is kept in full now", record.version, extra=event("version.folded")
            )
            self._table.events.publish(ChainFolded(record))
            # What it was based on may go now.
            self._collect()

    async def _fold(self, record: VersionRecord) -> None:
        manifest = await self._commits.manifest(record)
        try:
            await self._persist(record, manifest, self._disk.share())
            async with self._lock:
                await to_end(asyncio.ensure_future(self._swap(record, manifest)))
        except BaseException:
            # Of a version that was folded before the fault this removes nothing that it needs.
            await to_end(asyncio.ensure_future(self._store.tidy(record.model, record.version)))
            raise

    async def _swap(self, record: VersionRecord, manifest: Manifest) -> None:
        if record.commit is None:
            return
        whole = replace(record.commit, base_version=0, base_content_digest="", delta_bytes=0)
        await self._store.fold(whole, manifest)
        record.become_whole(whole)
        self._table.touch(record)

    async def _persist(
        self, record: VersionRecord, manifest: Manifest, room: DiskReservation
    ) -> None:
        """Write the whole shards, proved once more, one after the other: pushes go first."""
        try:
            await room.promise(manifest.layout.size)
            shards = zip(manifest.layout.shards, manifest.digests_by_shard, strict=True)
            for index, (entry, digests) in enumerate(shards):
                segment = record.place.segments[index]
                found = await self._fetch.digest(segment, entry)
                if tuple(found) != digests:
                    raise WeightSyncError(
                        Reason.DATA_CORRUPT, f"shard {index} changed in shared memory"
                    )
                target = self._store.shard_path(record.model, record.version, index)
                if target is not None:
                    await self._fetch.persist(segment, entry.size, target)
                    room.wrote(entry.size)
        finally:
            room.close()
