"""The slots of one model: who gets one, who waits, and which version loses its slot."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.garbage_collector import GarbageCollector
from weightsync_server.catalog.serving import ServingState
from weightsync_server.catalog.version_events import LeaseEnded, SlotWanted
from weightsync_server.residency.slot import Slot

if TYPE_CHECKING:
    from weightsync_server.catalog.commits import CommitService
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.residency.segment_allocator import SegmentAllocator


_RETRY_AFTER_S = 1.0


def _state(slot: Slot) -> str:
    record = slot.record
    if record is None:
        return "retired" if slot.leases else "free"
    if slot.writing:
        return "receiving"
    return "live" if record.serving == pb.SERVING_LIVE else "staged"


def _push(slot: Slot) -> str:
    record = slot.record
    # A slot is written, too, while a committed version is read from the store.
    if record is None or not slot.writing or record.durability != pb.DURABILITY_RECEIVING:
        return ""
    return record.push_id


def _described(slot: Slot) -> str:
    record = slot.record
    if record is None:
        return f"slot {slot.index}: leased"
    push = _push(slot)
    marks = [f"receiving by push {push}" if push else _state(slot)]
    if record.pinned:
        marks.append("pinned")
    if slot.leases:
        marks.append("leased")
    return f"slot {slot.index}: version {record.version} {' '.join(marks)}"


class SlotPool:
    """Gives slots out in the order free, superseded, oldest; first come, first served.

    No version that is live, leased, pinned or being written loses its slot. If `durable`, one that
    does can be read from the store again.
    """

    def __init__(
        self,
        count: int,
        keeper: SegmentAllocator,
        table: VersionTable,
        serving: ServingState,
        commits: CommitService,
        collector: GarbageCollector,
        *,
        durable: bool,
    ) -> None:
        self.slots = [Slot(index, keeper) for index in range(count)]
        self._events = table.events
        self._scratch: set[Slot] = set()
        self._keeper = keeper
        self._table = table
        self._serving = serving
        self._commits = commits
        self._collector = collector
        self._durable = durable
        self._waiting: deque[tuple[asyncio.Future[Slot], VersionRecord]] = deque()

    async def take(
        self, record: VersionRecord, timeout_s: float, more: Callable[[], float] = float
    ) -> Slot:
        """Return a slot that belongs to `record` and is being written.

        After `timeout_s`, `more` returns for how many seconds more to wait. Raises NO_SLOT at 0.
        """
        slot = None if self._waiting else self._claim(record)
        if slot is not None:
            return slot
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        entry = (future, record)
        self._waiting.append(entry)
        self._events.publish(SlotWanted())
        left = max(0.0, timeout_s)
        try:
            await asyncio.wait([future], timeout=left)
            while not future.done() and (left := more()) > 0:
                await asyncio.wait([future], timeout=left)
        except asyncio.CancelledError:
            self._forget(entry)
            raise
        if future.done():
            return future.result()
        self._forget(entry)
        raise self.none_free(timeout_s)

    def check_room(self, record: VersionRecord) -> None:
        """Refuse what would have to wait for a slot, and have one freed for the next try."""
        if record.slot is None and (self._waiting or self._candidate(record) is None):
            self._events.publish(SlotWanted())
            raise self.none_free(0)

    def _forget(self, entry: tuple[asyncio.Future[Slot], VersionRecord]) -> None:
        future, record = entry
        if future.done():
            # Served in the moment in which the caller gave up.
            self.release(record)
            return
        self._waiting.remove(entry)
        # Whoever stood behind may want another slot than this one.
        self.wake()

    @property
    def reserved_bytes(self) -> int:
        return sum(slot.reserved_bytes for slot in (*self.slots, *self._scratch))

    def scratch(self) -> Slot:
        """Return a slot outside of the pool, for what is no version; `discard` must follow."""
        slot = Slot(-1, self._keeper)
        self._scratch.add(slot)
        return slot

    def borrow(self, record: VersionRecord) -> Slot:
        """Return a slot, at once, to be given back by `give_back`: no version gets lost by it.

        It is a `scratch` where none is free, and evicted bytes could not be read again.
        """
        idle = self._durable or any(slot.free for slot in self.slots)
        slot = self._claim(record) if idle else None
        if slot is None:
            slot = self.scratch()
            slot.begin(record)
        return slot

    def give_back(self, slot: Slot) -> None:
        if slot in self._scratch:
            self.discard(slot)
        else:
            slot.empty()
        self.wake()

    def discard(self, slot: Slot) -> None:
        self._scratch.discard(slot)
        slot.empty()
        slot.trim()

    def close(self) -> None:
        for slot in list(self._scratch):
            self.discard(slot)
        for slot in self.slots:
            slot.empty()
            slot.trim()

    def release(self, holder: VersionRecord) -> None:
        """Empty the slot that a version still holds, if any; its memory stays for the next."""
        if holder.slot is not None:
            holder.slot.empty()
            self.wake()

    def end_lease(self, slot: Slot) -> None:
        slot.leases -= 1
        if slot.record is not None:
            self._events.publish(LeaseEnded(slot.record))
        self.wake()

    def wake(self) -> None:
        """Look again whether somebody who waits can be served. Call it after any change."""
        while self._waiting:
            future, record = self._waiting[0]
            if not future.done():
                slot = self._claim(record)
                if slot is None:
                    return
                future.set_result(slot)
            self._waiting.popleft()

    async def segment(self, slot: Slot, shard: int, size: int) -> Segment:
        """Return a spare or new segment for a shard; idle slots give up their memory for it."""
        segment = slot.reuse(shard, size)
        if segment is not None:
            return segment
        try:
            return await slot.create(shard, size)
        except WeightSyncError as error:
            if error.reason is not Reason.MEMORY_EXHAUSTED:
                raise
        await self._trim(slot)
        return await slot.create(shard, size)

    async def promise(self, slot: Slot, total: int) -> None:
        """Reserve memory for `total` bytes of shards before the first of them arrives."""
        try:
            slot.promise(total)
            return
        except WeightSyncError as error:
            if error.reason is not Reason.MEMORY_EXHAUSTED:
                raise
        await self._trim(slot)
        slot.promise(total)

    async def _trim(self, slot: Slot) -> None:
        slot.trim()
        for other in self.slots:
            if other.free:
                other.trim()
        await self._keeper.unmapped()

    def status(self) -> list[pb.SlotStatus]:
        return [
            pb.SlotStatus(
                slot=slot.index,
                version=slot.record.version if slot.record else 0,
                state=_state(slot),
                reserved_bytes=slot.reserved_bytes,
                used_bytes=_used(slot),
                leases=slot.leases,
            )
            for slot in self.slots
        ]

    def _claim(self, record: VersionRecord) -> Slot | None:
        slot = self._candidate(record)
        if slot is not None:
            if slot.record is not None:
                self._evict(slot.record)
            slot.begin(record)
        return slot

    def _candidate(self, record: VersionRecord) -> Slot | None:
        free = [slot for slot in self.slots if slot.free]
        if free:
            # The one that holds what the version is based on, else that with most warm memory.
            bases = {r.commit.manifest_digest for r in record.chain if r.commit}
            return max(free, key=lambda s: (s.holds(bases), s.reserved_bytes))
        ranked = [
            (order, slot.index)
            for slot in self.slots
            if not slot.writing
            and not slot.leases
            and slot.record is not None
            # A version that only its slot holds must not make room for its own repetition.
            and (self._durable or slot.record.version != record.version)
            and (order := self._order(slot.record, record)) is not None
        ]
        return self.slots[min(ranked)[1]] if ranked else None

    def _order(self, record: VersionRecord, claimer: VersionRecord) -> tuple[int, int] | None:
        """Tell when a version loses its slot to another, smallest first; None: it keeps it."""
        if self._collector.use(record):
            return None
        if record.holds and not self._durable and claimer.base is not record:
            # Its only copy, which a delta needs.
            return None
        if record.version == self._table.newest and not record.rejected_reason:
            return (2, record.version)
        return (1 if record.version in self._serving.ways_back else 0, record.version)

    def _evict(self, record: VersionRecord) -> None:
        record.evict()
        if self._durable:
            self._table.publish(record)
        else:
            # memory://: its slot was all there was of it.
            self._table.remove(record)
            self._collector.spawn(self._commits.scrub(record))

    def none_free(self, waited: float) -> WeightSyncError:
        states = "; ".join(_described(slot) for slot in self.slots)
        pushes = [push for push in map(_push, self.slots) if push]
        # A trainer that died in mid-push leaves one that holds its slot.
        abort = "abort a push that is no longer sent (`weightsync abort ID`), " if pushes else ""
        return WeightSyncError(
            Reason.NO_SLOT,
            f"no slot became free in {max(0.0, waited):g} s ({states}); retry, apply, "
            f"{abort}unpin versions, or raise slots",
            metadata={"slots": str(len(self.slots))}
            | ({"push_ids": ",".join(pushes)} if pushes else {}),
            retry_after_s=_RETRY_AFTER_S,
        )


def _used(slot: Slot) -> int:
    manifest = slot.record.manifest if slot.record else None
    if manifest is not None:
        return manifest.layout.size
    return sum(segment.capacity for segment in slot.segments.values())
