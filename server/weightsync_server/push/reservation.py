"""What a push is promised before its bytes come: a share, the store's disk, then shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segments import Segment
from weightsync_server.residency.slot import Slot, slot_of
from weightsync_server.residency.slot_pool import SlotPool
from weightsync_server.store.disk_quota import DiskQuota
from weightsync_server.store.protocol import Store

if TYPE_CHECKING:
    from weightsync_server.push.shard_part import ShardState
    from weightsync_server.push.state import PushState


class PushReservation:
    """Where the shards of one push go, in memory and on disk, which was promised to have `disk`."""

    def __init__(self, state: PushState, store: Store, slots: SlotPool, quota: DiskQuota) -> None:
        self._state = state
        self._store = store
        self._slots = slots
        self._quota = quota
        self.disk = quota.share()

    @property
    def on_disk(self) -> bool:
        """Its shards go to a disk; those of a repeated version lie there already."""
        existing = self._state.existing
        return self._store.durable and (existing is None or existing.commit is None)

    @property
    def in_parts(self) -> bool:
        """What came of a shard can be kept before all of it is here."""
        return self._store.local

    @property
    def slot(self) -> Slot:
        """Where its shards go: the slot of its version or, of a delta, memory of their own."""
        delta = self._state.delta
        return slot_of(self._state.record) if delta is None else delta.scratch

    async def reserve(self, total: int) -> None:
        """Reserve disk and memory for `total` bytes of shards; 0: not known yet."""
        if self.on_disk:
            await self.disk.promise(total)
        await self._slots.promise(self.slot, total)

    def reuse(self, shard: ShardState) -> Segment | None:
        """Return memory that the slot has for a shard, the disk having room for all so far."""
        if self.on_disk and not self.disk.covers(self._state.declared_bytes):
            return None
        return self.slot.reuse(shard.index, shard.entry.size)

    async def allocate(self, shard: ShardState, total: int) -> Segment:
        """Return the segment for a shard, the disk having room for `total` bytes of the push."""
        if self.on_disk:
            await self.disk.promise(total)
        return await self._slots.segment(self.slot, shard.index, shard.entry.size)

    def target(self, shard: ShardState) -> str | None:
        """Return the path at which the store keeps a shard; None: it keeps none."""
        record, delta = self._state.record, self._state.delta is not None
        return self._store.shard_path(record.model, record.version, shard.index, delta=delta)

    def renew(self) -> None:
        """Give up what the disk was promised; what comes from now on is promised again."""
        self.disk.close()
        self.disk = self._quota.share()


#: Seconds after its last begin for which a caller still has a share.
_REMEMBERED_S = 600.0
_RETRY_AFTER_S = 1.0


class CallerShares:
    """Divides the `total` open pushes among the callers that want some; a lone one may have all."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._wanted: dict[str, float] = {}

    def check(self, who: str, open_pushes: int) -> None:
        now = clock.monotonic()
        self._wanted[who] = now
        # No more callers count than can have a push each.
        recent = sorted(self._wanted.items(), key=lambda item: item[1])[-self._total :]
        self._wanted = {name: at for name, at in recent if now - at < _REMEMBERED_S}
        share = -(-self._total // len(self._wanted))
        if open_pushes >= share:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"{who} has {open_pushes} pushes open, its share of {self._total} while "
                f"{len(self._wanted)} callers push; commit or abort one, or raise max_pushes",
                retry_after_s=_RETRY_AFTER_S,
            )
