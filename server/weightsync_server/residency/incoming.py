"""A version that comes in shard by shard, for whoever reads what is there already.

What is read is proved by digests that begin after it was read, or, where engines copied it from a
trainer's GPU themselves, by digests of what they have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.model.manifest import Layout
from weightsync.shm.incoming_version import ArrivalWriter, IpcAddresses
from weightsync.shm.segments import Segment
from weightsync_server.residency.slot import slot_of

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.residency.segment_allocator import SegmentAllocator


class IncomingReader:
    """Tells readers which shards of a version are complete and proved, and which lie on a GPU.

    It is published to the model's events before anything has come, for who may read it or not.
    The `segments`, by shard, stay the version's own until it has ended. Nothing more comes since
    `ended_at`; None: more may.
    """

    def __init__(
        self,
        record: VersionRecord,
        layout: Layout,
        segments: Sequence[Segment],
        keeper: SegmentAllocator,
    ) -> None:
        self.record = record
        self._layout = layout
        self._ids = tuple(segment.id for segment in segments)
        self._keeper = keeper
        self._slot = slot_of(record)
        self._life = self._slot.lives
        self._complete: set[int] = set()
        self._ipc: dict[int, IpcAddresses] = {}
        self.ended_at: float | None = None
        self._writer: ArrivalWriter | None = None
        # Engines ask at the same time, and all look at one.
        self._making = asyncio.Lock()

    @property
    def stays(self) -> bool:
        """Whether its bytes lie where they came, and nobody else's came there since."""
        return self.record.slot is self._slot and self._slot.lives == self._life

    def announce_ipc(self, shard: int, where: IpcAddresses) -> None:
        """Take note that a trainer has a shard on a GPU, where readers may copy it themselves."""
        self._ipc[shard] = where
        if self._writer is not None:
            self._writer.mark_ipc(shard, where)

    def mark_complete(self, shard: int) -> None:
        """Take note that all bytes of a shard are here and proved; they do not change any more."""
        self._complete.add(shard)
        if self._writer is not None:
            self._writer.mark(shard)

    def end(self) -> None:
        """Take note that nothing more comes; further calls do nothing."""
        if self.ended_at is None:
            self.ended_at = clock.monotonic()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.end()
            self._keeper.conceal(writer.segment)

    async def offer(self) -> str:
        """Return the name of the segment that engines look at, or empty if it has ended."""
        async with self._making:
            if self._writer is None and self.ended_at is None:
                await self._make()
        if self._writer is None:
            return ""
        # Each time: an engine that asks now may not have been there when another one did.
        self._keeper.expose([self._writer.segment.id, *self._ids])
        return self._writer.segment.id

    async def _make(self) -> None:
        made: list[ArrivalWriter] = []
        await self._keeper.write(partial(self._written, made))
        (self._writer,) = made
        if self.ended_at is not None:
            self.end()
            return
        for shard, where in self._ipc.items():
            self._writer.mark_ipc(shard, where)
        for shard in self._complete:
            self._writer.mark(shard)

    def _written(self, made: list[ArrivalWriter]) -> Segment:
        made.append(ArrivalWriter(self._layout, self._ids))
        return made[-1].segment
