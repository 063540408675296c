"""A version that comes in shard by shard, for whoever reads what is there already.

What is read so is proved like everything else: by digests that begin after it was read, or, where
engines copied it from a trainer's GPU themselves, by digests of what they have.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.shm.incoming_version import ArrivalWriter
from weightsync_server.residency.slot import slot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightsync.model.manifest import Layout
    from weightsync.shm.incoming_version import IpcAddresses
    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.residency.segments import SegmentAllocator

__all__ = ["IncomingReader", "IncomingVersions"]


class IncomingReader:
    """Tells readers which shards of a version are complete and proved, and which lie on a GPU.

    Args:
        record: The version.
        layout: Of it.
        segments: Segment of each shard, in order; they stay its own until it has ended.
        keeper: Publishes what readers look at.

    Attributes:
        record: The version.
        ended_at: Since when nothing more comes: all is here, or its push has failed; None: more
            may.
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
        """Return the name on the segment socket of what engines look at; "": it has ended.

        A second time it is the same.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED, DISK_EXHAUSTED (descriptors).
        """
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


class IncomingVersions:
    """Announces the versions that come in.

    Args:
        keeper: Publishes what readers look at.

    Attributes:
        listeners: Told of each; they may read, or not.
    """

    def __init__(self, keeper: SegmentAllocator) -> None:
        self._keeper = keeper
        self.listeners: list[Callable[[IncomingReader], None]] = []

    def announce(
        self, record: VersionRecord, layout: Layout, segments: Sequence[Segment]
    ) -> IncomingReader:
        """Tell that the shards of a version will come into these segments; `end` must follow."""
        arriving = IncomingReader(record, layout, segments, self._keeper)
        for listener in self.listeners:
            listener(arriving)
        return arriving
