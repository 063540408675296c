"""One slot: the segments of one resident version, reused from version to version."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segments import reserved_size

if TYPE_CHECKING:
    from collections.abc import Collection

    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.residency.segments import SegmentAllocator

__all__ = ["Residue", "Slot", "slot_of"]


class Residue(NamedTuple):
    """The bytes of a version that lost its slot, as long as nobody has written over them.

    Attributes:
        manifest_digest: Which version it was.
        segments: Its shards, in order; all of them are spare segments of the slot.
    """

    manifest_digest: str
    segments: tuple[Segment, ...]


class Slot:
    """Segments by shard index, and spare ones of an earlier version.

    Attributes:
        index: Number of the slot, from 0.
        lives: How many versions it was given to; bytes of one stay as they came for one life.
        record: Version whose bytes lie here or arrive; None: none.
        writing: The bytes are not final yet.
        leases: Readers that rely on the bytes.
        segments: Segment of each shard.
        document: The staged document, once somebody asked for it.
        remains: What the spare segments still hold; None: nothing that is of use.
    """

    def __init__(self, index: int, keeper: SegmentAllocator) -> None:
        self.index = index
        self.lives = 0
        self.record: VersionRecord | None = None
        self.writing = False
        self.leases = 0
        self.segments: dict[int, Segment] = {}
        self.document: Segment | None = None
        self.remains: Residue | None = None
        self._keeper = keeper
        self._spares: list[Segment] = []
        self._promised = 0

    @property
    def free(self) -> bool:
        """Nobody uses it."""
        return self.record is None and not self.writing and not self.leases

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the budget that it holds."""
        owned = [*self.segments.values(), *self._spares]
        if self.document is not None:
            owned.append(self.document)
        return sum(segment.capacity for segment in owned) + self._promised

    def ordered(self) -> list[Segment]:
        """Segments in the order of the shards."""
        return [self.segments[index] for index in range(len(self.segments))]

    def begin(self, record: VersionRecord) -> None:
        """Give the slot to a version whose bytes will be written."""
        self.empty()
        self.lives += 1
        self.record = record
        self.writing = True
        record.slot = self

    def pass_to(self, record: VersionRecord) -> None:
        """Give the slot with its bytes to another record."""
        if self.record is not None:
            self.record.slot = None
        self.record = record
        record.slot = self

    def promise(self, total: int) -> None:
        """Reserve memory for `total` bytes of shards beyond what the spare segments hold.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED.
        """
        more = reserved_size(total) - sum(segment.capacity for segment in self._spares)
        if total and more > 0:
            self._keeper.budget.reserve(more)
            self._promised = more

    def reuse(self, shard: int, size: int) -> Segment | None:
        """Put a spare segment that fits without much waste in the shard's place."""
        capacity = reserved_size(size)
        fits = [s for s in self._spares if capacity <= s.capacity <= capacity + capacity // 4]
        if not fits:
            return None
        segment = min(fits, key=lambda s: s.capacity)
        self._spares.remove(segment)
        self.segments[shard] = segment
        # Somebody is about to write into it.
        self.remains = None
        return segment

    def holds(self, digests: Collection[str]) -> bool:
        """Tell whether what remains here is one of these versions, by manifest digest."""
        return self.remains is not None and self.remains.manifest_digest in digests

    def revive(self) -> None:
        """Put the segments of what remains back into their places, for somebody to change them."""
        if self.remains is not None:
            self._spares = [spare for spare in self._spares if spare not in self.remains.segments]
            self.segments = dict(enumerate(self.remains.segments))
            self.remains = None

    def spoil(self) -> None:
        """Take note that the bytes are not what they should be: nothing of use will remain."""
        self.writing = True

    async def create(self, shard: int, size: int) -> Segment:
        """Put a new segment in the shard's place.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED.
        """
        promised = min(self._promised, reserved_size(size))
        self._promised -= promised
        try:
            segment = await self._keeper.create(size, promised)
        except BaseException:
            self._promised += promised
            raise
        self.segments[shard] = segment
        return segment

    def settle(self) -> None:
        """The bytes are final: give back what the version does not need."""
        self.writing = False
        self._drop_promise()
        self.trim()

    def trim(self) -> None:
        """Retire the spare segments."""
        self.remains = None
        while self._spares:
            self._keeper.retire(self._spares.pop())

    def empty(self) -> None:
        """Forget the version; its segments become spare ones."""
        if self.record is not None:
            self.record.slot = None
            # Whatever was being written is no version.
            commit = None if self.writing else self.record.commit
            whole = Residue(commit.manifest_digest, tuple(self.ordered())) if commit else None
            self.remains = whole
        self.record = None
        self.writing = False
        self._drop_promise()
        for index in sorted(self.segments):
            segment = self.segments[index]
            if segment.taken_back():
                self._spares.append(segment)
            else:
                # A trainer that failed may still write into it: it holds no version any more.
                self._keeper.retire(segment)
        self.segments = {}
        if self.document is not None:
            # Read by the engine during prepare only, so nobody is waited for.
            self._keeper.conceal(self.document)
            self.document = None

    def _drop_promise(self) -> None:
        if self._promised:
            self._keeper.budget.release(self._promised, touched=False)
            self._promised = 0


def slot_of(record: VersionRecord) -> Slot:
    """Return the slot of a version that has one.

    Raises:
        WeightSyncError: FAULT; the server lost count.
    """
    slot = record.slot
    if isinstance(slot, Slot):
        return slot
    raise WeightSyncError(Reason.FAULT, f"version {record.version} has no slot; call again")
