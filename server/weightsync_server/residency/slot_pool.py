"""The slots of one model: who gets one, in which order, and who waits."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.residency.slot import Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.residency.segments import SegmentAllocator

__all__ = ["SlotPool"]

_RETRY_AFTER_S = 1.0

#: Order in which versions lose their slot, smallest first; None: this one keeps it.
Order = tuple[int, int]


def _state(slot: Slot) -> str:
    record = slot.record
    if record is None:
        return "retired" if slot.leases else "free"
    if slot.writing:
        return "receiving"
    return "live" if record.serving == pb.SERVING_LIVE else "staged"


def _push(slot: Slot) -> str:
    """Return the id of the open push that holds a slot; empty: none does."""
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

    Args:
        count: Number of slots.
        keeper: Makes their segments.
        order: When a version may lose its slot to another one.
        evict: Called when it does, before the slot is emptied.
        durable: What loses its slot can be read from the store again.
    """

    def __init__(
        self,
        count: int,
        keeper: SegmentAllocator,
        order: Callable[[VersionRecord, VersionRecord], Order | None],
        evict: Callable[[VersionRecord], None],
        *,
        durable: bool,
    ) -> None:
        self.slots = [Slot(index, keeper) for index in range(count)]
        #: Told when somebody waits for a slot.
        self.on_wait: Callable[[], None] = lambda: None
        #: Called with a version that one reader less relies on.
        self.on_unleased: Callable[[VersionRecord], None] = lambda _: None
        self._scratch: set[Slot] = set()
        self._keeper = keeper
        self._order = order
        self._evict = evict
        self._durable = durable
        self._waiting: deque[tuple[asyncio.Future[Slot], VersionRecord]] = deque()

    async def take(
        self, record: VersionRecord, timeout_s: float, more: Callable[[], float] = float
    ) -> Slot:
        """Return a slot that belongs to `record` and is being written.

        Args:
            record: The version.
            timeout_s: Longest wait, seconds.
            more: Asked when that is over for how many seconds more to wait; 0: no longer.

        Raises:
            WeightSyncError: NO_SLOT when none came free in that time.
        """
        slot = None if self._waiting else self._claim(record)
        if slot is not None:
            return slot
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        entry = (future, record)
        self._waiting.append(entry)
        self.on_wait()
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
        """Refuse what would have to wait for a slot, and have one freed for the next try.

        Raises:
            WeightSyncError: NO_SLOT.
        """
        if record.slot is None and (self._waiting or self._candidate(record) is None):
            self.on_wait()
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
        """Bytes of the budget that slots and scratch slots hold."""
        return sum(slot.reserved_bytes for slot in (*self.slots, *self._scratch))

    def scratch(self) -> Slot:
        """Return a slot outside of the pool, for what is no version; `discard` must follow."""
        slot = Slot(-1, self._keeper)
        self._scratch.add(slot)
        return slot

    def borrow(self, record: VersionRecord) -> Slot:
        """Return a slot, at once, for what is read and given back: no version gets lost by it.

        Where none is free, and bytes that lose theirs could not be read again, it is a `scratch`.
        `give_back` must follow.
        """
        idle = self._durable or any(slot.free for slot in self.slots)
        slot = self._claim(record) if idle else None
        if slot is None:
            slot = self.scratch()
            slot.begin(record)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Empty what was borrowed."""
        if slot in self._scratch:
            self.discard(slot)
        else:
            slot.empty()
        self.wake()

    def discard(self, slot: Slot) -> None:
        """Give the memory of a scratch slot back."""
        self._scratch.discard(slot)
        slot.empty()
        slot.trim()

    def close(self) -> None:
        """Give all memory back."""
        for slot in list(self._scratch):
            self.discard(slot)
        for slot in self.slots:
            slot.empty()
            slot.trim()

    def release(self, holder: VersionRecord) -> None:
        """Empty the slot that a version holds, if it holds one; its memory stays for the next.

        Never another's: a version that has lost its slot already holds none.
        """
        if holder.slot is not None:
            holder.slot.empty()
            self.wake()

    def end_lease(self, slot: Slot) -> None:
        """Take note that a reader relies on the bytes of a slot no more."""
        slot.leases -= 1
        if slot.record is not None:
            self.on_unleased(slot.record)
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
        """Return the segment for a shard of `slot`: a spare one, or a new one.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED, after the memory of idle slots was given up.
        """
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
        """Reserve memory for `total` bytes of shards before the first of them arrives.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED, after the memory of idle slots was given up.
        """
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
        """Return what each slot holds."""
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
        """Return the slot that a version would get now, or None."""
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

    def none_free(self, waited: float) -> WeightSyncError:
        """Return the refusal of whoever waited for a slot in vain, for so many seconds."""
        states = "; ".join(_described(slot) for slot in self.slots)
        pushes = [push for push in map(_push, self.slots) if push]
        # A trainer that died in mid-push leaves one that holds its slot.
        abort = "abort a push that nobody sends (`weightsync abort ID`), " if pushes else ""
        return WeightSyncError(
            Reason.NO_SLOT,
            f"no slot came free in {max(0.0, waited):g} s ({states}); retry, apply, {abort}"
            "unpin versions, or raise slots",
            metadata={"slots": str(len(self.slots))}
            | ({"push_ids": ",".join(pushes)} if pushes else {}),
            retry_after_s=_RETRY_AFTER_S,
        )


def _used(slot: Slot) -> int:
    manifest = slot.record.manifest if slot.record else None
    if manifest is not None:
        return manifest.layout.size
    return sum(segment.capacity for segment in slot.segments.values())
