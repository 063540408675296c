"""What a push was promised before its bytes come: the store's disk, then shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync_server.residency.slot import slot_of

if TYPE_CHECKING:
    from weightsync.shm.segments import Segment
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.push.state import PushState
    from weightsync_server.residency.slot import Slot
    from weightsync_server.residency.slot_pool import SlotPool
    from weightsync_server.store.disk_quota import DiskQuota
    from weightsync_server.store.protocol import Store

__all__ = ["PushReservation"]


class PushReservation:
    """Where the shards of one push go, in memory and on disk.

    Args:
        state: The push.
        store: Where versions are kept.
        slots: Have their memory.
        quota: Promises room in the store.

    Attributes:
        disk: What the store's disk was promised to have for it.
    """

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
        """Reserve disk and memory for `total` bytes of shards; 0: not known yet.

        Raises:
            WeightSyncError: DISK_EXHAUSTED, MEMORY_EXHAUSTED; or why the push failed meanwhile.
        """
        if self.on_disk:
            await self.disk.promise(total)
        await self._slots.promise(self.slot, total)

    def reuse(self, shard: ShardState) -> Segment | None:
        """Return memory that the slot has for a shard, the disk having room for all so far."""
        if self.on_disk and not self.disk.covers(self._state.declared_bytes):
            return None
        return self.slot.reuse(shard.index, shard.entry.size)

    async def allocate(self, shard: ShardState, total: int) -> Segment:
        """Return the segment for a shard, the disk having room for `total` bytes of the push.

        Raises:
            WeightSyncError: DISK_EXHAUSTED, MEMORY_EXHAUSTED; or why the push failed meanwhile.
        """
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
