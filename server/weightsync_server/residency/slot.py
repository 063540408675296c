"""One slot: the segments of one resident version, kept where they are by leases."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segments import Segment, reserved_size

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.residency.segment_allocator import SegmentAllocator


class Residue(NamedTuple):
    """The bytes of a version that lost its slot, in spare segments by shard, not written over."""

    manifest_digest: str
    segments: tuple[Segment, ...]


class Slot:
    """Segments by shard index, and spare ones of an earlier version.

    Attributes:
        lives: How many versions it was given to; bytes stay as they came for one life.
        record: Version whose bytes lie here or arrive; None: none.
        writing: The bytes are not final yet.
        leases: Readers that rely on the bytes.
        document: The staged document, once it was asked for.
        remains: What the spare segments still hold of use; None: nothing.
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
        return self.record is None and not self.writing and not self.leases

    @property
    def reserved_bytes(self) -> int:
        owned = [*self.segments.values(), *self._spares]
        if self.document is not None:
            owned.append(self.document)
        return sum(segment.capacity for segment in owned) + self._promised

    def ordered(self) -> list[Segment]:
        return [self.segments[index] for index in range(len(self.segments))]

    def begin(self, record: VersionRecord) -> None:
        self.empty()
        self.lives += 1
        self.record = record
        self.writing = True
        record.occupy(self)

    def pass_to(self, record: VersionRecord) -> None:
        if self.record is not None:
            self.record.occupy(None)
        self.record = record
        record.occupy(self)

    def promise(self, total: int) -> None:
        """Reserve memory for `total` bytes of shards beyond what the spare segments hold."""
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
        self.writing = True

    async def create(self, shard: int, size: int) -> Segment:
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
        self.remains = None
        while self._spares:
            self._keeper.retire(self._spares.pop())

    def empty(self) -> None:
        if self.record is not None:
            self.record.occupy(None)
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
    slot = record.slot
    if isinstance(slot, Slot):
        return slot
    raise WeightSyncError(Reason.FAULT, f"version {record.version} has no slot; call again")


@dataclass(eq=False)
class SlotLease:
    """While it is held, the segments are neither written nor retired.

    The `slot` counts it already. `staged_id` names its document on the segment socket. `on_release`
    is called once.
    """

    record: VersionRecord
    staged_id: str
    segments: list[Segment]
    slot: Slot = field(repr=False)
    on_release: Callable[[], None] = field(repr=False)
    _active: bool = True

    def release(self) -> None:
        """End it; further calls do nothing."""
        if self._active:
            self._active = False
            self.on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
