"""Which committed versions may be deleted, which are to bound the store, and the deletions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.serving import ServingState
from weightsync_server.ops.settings_group import setting

if TYPE_CHECKING:
    from weightsync_server.catalog.commits import CommitService
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.store.disk_quota import DiskQuota


logger = logging.getLogger(__name__)


async def nothing() -> frozenset[str]:
    """Return that no other server needs anything, as where there is none."""
    return frozenset()


class GarbageCollector:
    """Bounds the store; never touches what is live, leased, pinned or being written.

    Contents that `needed_elsewhere` returns stay; while it raises `WeightSyncError`, all do.
    `SurplusFound` is published before anything is deleted.
    """

    def __init__(
        self,
        table: VersionTable,
        serving: ServingState,
        commits: CommitService,
        retention: Retention,
        disk: DiskQuota,
        needed_elsewhere: Callable[[], Awaitable[frozenset[str]]] = nothing,
    ) -> None:
        self._needed_elsewhere = needed_elsewhere
        self._unknown = ""
        self._table = table
        self._serving = serving
        self._commits = commits
        self._retention = retention
        self._disk = disk
        self._background: set[asyncio.Task[None]] = set()

    def use(self, record: VersionRecord) -> str:
        """Tell why a version must stay, with what to do about it; empty: it need not."""
        if self._serving.is_live(record.version):
            return "live; apply another version first"
        if record.durability != pb.DURABILITY_COMMITTED:
            return "being pushed; abort the push instead"
        if record.pinned:
            return "pinned; unpin it first"
        slot = record.slot
        if record.awaited or (slot is not None and (slot.leases or slot.writing)):
            return "staged for an apply or being read; retry when that has ended"
        return ""

    async def delete(self, version: int, *, force: bool = False) -> None:
        """Delete a committed version; its number is never used again.

        With `force`, even if a rollback or other servers need it.
        """
        if not force:
            await self._refuse_needed(self._table.get(version))
        await self._delete(version, force=force)

    async def _refuse_needed(self, record: VersionRecord) -> None:
        try:
            needed = record.content_digest in await self._needed_elsewhere()
            why = "a member of the fleet serves it, applies it or would roll back to it"
        except WeightSyncError as error:
            needed, why = True, f"whether the fleet needs it is not known now: {error.message}"
        if needed:
            raise WeightSyncError(
                Reason.VERSION_IN_USE,
                f"version {record.version} of model {record.model} is kept: {why}; delete it with "
                "force if it is not needed",
                metadata={"version": str(record.version)},
            )

    async def _delete(self, version: int, *, force: bool = False) -> None:
        record = self._table.get(version)
        need = self.need(record)
        if not need and not force and version in self._serving.ways_back:
            need = "the one that a rollback would go back to; delete it with force if it may go"
        if need:
            raise WeightSyncError(
                Reason.VERSION_IN_USE,
                f"version {version} of model {record.model} is {need}",
                metadata={"version": str(version)},
            )
        await self._commits.erase(record)

    def need(self, record: VersionRecord) -> str:
        use = self.use(record)
        if use or not record.holds:
            above = [r.version for r in self._table.list() if r.base is record]
            if use or not above:
                return use
            return f"the base of version {min(above)}; delete that one first"
        return "the base of a delta that is being pushed; retry when that push has ended"

    def collect(self) -> None:
        self.spawn(self._collect())

    async def close(self) -> None:
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    def _kept(self, record: VersionRecord) -> bool:
        in_use = bool(self.use(record)) or record.slot is not None or record.holds > 0
        back = self._serving.ways_back
        return in_use or record.version == self._table.newest or record.version in back

    async def _collect(self) -> None:
        if not await self._commits.collects():
            # The server that has the epoch does, and folds.
            return
        needed: frozenset[str] = frozenset()
        if self._surplus(needed).doomed:
            try:
                needed = await self._needed()
            except WeightSyncError as error:
                self._tell_unknown(error.message)
                return
        self._unknown = ""
        surplus = self._surplus(needed)
        self._table.events.publish(SurplusFound(surplus, self._retention.versions))
        for record in surplus.doomed:
            there = self._table.find(record.version) is record
            if there and not self._kept(record) and not self.need(record):
                await self._delete_surplus(record.version)

    def _surplus(self, needed: frozenset[str]) -> Surplus:
        records = [r for r in self._table.list() if r.durability == pb.DURABILITY_COMMITTED]

        def kept(record: VersionRecord) -> bool:
            return record.content_digest in needed or self._kept(record)

        return self._retention.surplus(records, kept)

    async def _needed(self) -> frozenset[str]:
        """Return what other servers need, their pins being known here from then on."""
        await self._serving.read_marks()
        return await self._needed_elsewhere()

    def _tell_unknown(self, why: str) -> None:
        if why != self._unknown:
            self._unknown = why
            logger.warning(
                "no version is deleted for now, because it is not known which ones other servers "
                "need: %s",
                why,
            )

    async def _delete_surplus(self, version: int) -> None:
        try:
            await self._delete(version)
        except WeightSyncError as error:
            if error.reason is not Reason.VERSION_IN_USE:
                raise
            # Of another version in the store; it does not keep those that follow.
            logger.warning("version %d could not be removed yet: %s", version, error.message)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        # In a context of its own: its lines in the log are about no call.
        task = asyncio.create_task(work, context=Context())
        self._background.add(task)
        self._disk.frees(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("deleting a version failed: %r", error)


class Surplus(NamedTuple):
    """What exceeds the bounds.

    `doomed` are in the order of deletion, a delta before its base. `carried` stay only because a
    version that stays is based on them. `full`: bytes are over the limit even without the doomed.
    """

    doomed: list[VersionRecord]
    carried: list[VersionRecord]
    full: bool

    def weighs_on(self, newest: VersionRecord, most: int) -> bool:
        """Tell whether to keep the newest version in full, so that at most `most` are carried."""
        carried = sum(_stored(record) for record in self.carried)
        gains = newest.commit is not None and carried > newest.commit.size_bytes
        return len(self.carried) > most or (self.full and gains)


class SurplusFound(NamedTuple):
    surplus: Surplus
    #: How many versions may be carried for the sake of others.
    most_carried: int


@dataclass(frozen=True)
class Retention:
    """Bounds on what is kept; 0 bytes is no limit. Bases of kept deltas do not count."""

    versions: int = setting(
        8, "Committed versions kept in the store.", name="retain_versions", ge=2
    )
    bytes: int = setting(0, "Bytes kept in the store; 0: no limit.", name="retain_bytes", ge=0)

    def surplus(
        self, records: Iterable[VersionRecord], kept: Callable[[VersionRecord], bool]
    ) -> Surplus:
        """Return what exceeds the bounds, oldest first; what is `kept` counts and stays."""
        ordered = sorted(records, key=lambda record: record.order)
        count = len(ordered)
        size = sum(map(_stored, ordered))
        chosen = []
        for record in ordered:
            if count <= self.versions and (not self.bytes or size <= self.bytes):
                break
            if kept(record) or record.commit is None:
                continue
            chosen.append(record)
            count -= 1
            size -= _stored(record)
        return self._divided(ordered, chosen)

    def _divided(
        self, ordered: Sequence[VersionRecord], chosen: Sequence[VersionRecord]
    ) -> Surplus:
        gone = {record.version for record in chosen}
        needed = {
            base.version
            for record in ordered
            if record.version not in gone
            for base in record.chain[1:]
        }
        doomed = [record for record in reversed(chosen) if record.version not in needed]
        carried = [record for record in chosen if record.version in needed]
        left = sum(map(_stored, ordered)) - sum(map(_stored, doomed))
        return Surplus(doomed, carried, bool(self.bytes) and left > self.bytes)


def _stored(record: VersionRecord) -> int:
    return record.commit.stored_bytes if record.commit is not None else 0
