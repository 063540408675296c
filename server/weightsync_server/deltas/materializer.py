"""Versions are made in slots the cheapest way: changed in place, copied, or read, then patched."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Layout, Manifest, ShardEntry
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.deltas.pushed_delta import DeltaShard, touched, write_layout
from weightsync_server.ops.tasks import all_done
from weightsync_server.residency.slot import Slot, slot_of
from weightsync_server.residency.slot_pool import SlotPool
from weightsync_server.residency.stager import compare
from weightsync_server.store.protocol import DELTA_DAMAGE, Store
from weightsync_server.workers.fetch.fetch_api import DeltaHeader, FetchApi, TensorDelta

if TYPE_CHECKING:
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.residency.segment_allocator import SegmentAllocator


logger = logging.getLogger(__name__)


#: What a byte costs, against one that is copied in memory: read from a disk and, of a delta,
#: unpacked and scattered (1 % of changes take 0.7 copies of the whole, and 0.6 % of its bytes).
_LOAD, _PATCH = 4, 100


class BuildStart(enum.Enum):
    #: They lie in the slot, left there by an earlier version.
    IN_PLACE = enum.auto()
    #: From the slot of another version.
    COPY = enum.auto()
    #: From the store.
    LOAD = enum.auto()


class ChainLink(NamedTuple):
    """One version of a chain; `manifest_digest` is its identity, encoding included.

    `size` counts its bytes in full, `delta_bytes` those of its delta shards, or 0 if it is kept in
    full. `resident`: it lies in another slot, proved. `readable`: what the store keeps can be read.
    """

    manifest_digest: str
    size: int
    delta_bytes: int
    resident: bool
    readable: bool


class Plan(NamedTuple):
    """A way to make the first version of a chain.

    It starts from the bytes of version `at` and patches those before it on top.
    """

    start: BuildStart
    at: int


def plan(chain: Sequence[ChainLink], remains: str) -> Plan | None:
    """Return the cheapest way to make the first version of a chain, or None.

    `chain` goes from that version through its bases to one that is kept in full. `remains` is the
    manifest digest of what the slot still holds, or empty.
    """
    ways: list[tuple[int, int, Plan]] = []
    patches = 0
    for at, link in enumerate(chain):
        if link.manifest_digest == remains:
            ways.append((patches, len(ways), Plan(BuildStart.IN_PLACE, at)))
        if link.resident:
            ways.append((patches + link.size, len(ways), Plan(BuildStart.COPY, at)))
        if not link.readable:
            break
        if not link.delta_bytes:
            ways.append((patches + _LOAD * link.size, len(ways), Plan(BuildStart.LOAD, at)))
            break
        patches += _PATCH * link.delta_bytes
    return min(ways)[2] if ways else None


#: Tries before a lost fetcher is taken for more than bad luck.
_ATTEMPTS = 3
#: Shards under way at once; the fetchers order the work among themselves.
_AT_ONCE = 8


class PatchInput(NamedTuple):
    """Proved deltas to patch with, by shard, in the order in which they apply.

    `document` is the canonical layout as fetchers read it, or None without deltas.
    """

    layout: Layout
    document: Segment | None
    deltas: Sequence[Sequence[DeltaShard]]


class Materializer:
    """Makes versions in slots that belong to them. Bytes of other slots are only read.

    `lock` is held while stored deltas are read; a task that removes some must take it.
    """

    def __init__(
        self, store: Store, slots: SlotPool, segments: SegmentAllocator, fetch: FetchApi
    ) -> None:
        self.lock = asyncio.Lock()
        self._store = store
        self._slots = slots
        self._segments = segments
        self._fetch = fetch
        self._known: WeakKeyDictionary[VersionRecord, tuple[DeltaShard, ...]] = WeakKeyDictionary()

    def check(self, record: VersionRecord) -> None:
        """Refuse with DATA_CORRUPT a committed version that cannot be made without luck."""
        if plan(self._links(record), "") is None:
            raise self._lost(record)

    async def build(
        self, slot: Slot, record: VersionRecord, manifest: Manifest, *, prove: bool = True
    ) -> None:
        """Fill a slot with a committed version; when this raises, the slot may hold anything.

        No other task may use the slot. Without `prove`, the caller digests the bytes.
        """
        # Whole shards are never removed from under a version that is being read.
        async with self.lock if record.base is not None else contextlib.nullcontext():
            for left in reversed(range(_ATTEMPTS)):
                way = plan(
                    self._links(record), slot.remains.manifest_digest if slot.remains else ""
                )
                if way is None:
                    raise self._lost(record)
                try:
                    await self._follow(way, slot, record, manifest, prove=prove)
                    return
                except WeightSyncError as error:
                    lost = error.reason is Reason.FETCHER_FAILED
                    if not left or not (lost or way.start is BuildStart.IN_PLACE):
                        raise
                    logger.warning(
                        "version %d is built from its delta again, because that failed: %s",
                        record.version,
                        error.message,
                    )

    async def change(self, slot: Slot, changed: PatchInput) -> list[list[bytes]]:
        """Patch the bytes in a slot; return the digests of all tensors by shard.

        When this raises, the slot may hold anything.
        """
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(index: int) -> list[bytes]:
            async with gate:
                await self.patch(slot.segments[index], index, changed)
                return await self._prove(slot.segments[index], index, changed)

        return await all_done([one(index) for index in range(len(changed.layout.shards))])

    async def patch(self, segment: Segment, index: int, changed: PatchInput) -> None:
        """Change a shard that holds the base; when this raises, it holds anything."""
        for shards in changed.deltas:
            for shard in shards:
                if index in shard.touches and changed.document is not None:
                    await self._fetch.patch(
                        segment, index, changed.document, shard.entry, shard.source
                    )

    async def inspect(
        self,
        document: Segment,
        layout: Layout,
        index: int,
        entry: ShardEntry,
        source: Segment | str,
    ) -> tuple[str, DeltaShard, list[TensorDelta]]:
        """Prove that a delta shard is whole and of this layout.

        Return the content digest of its base, the shard, and what it changes. `document` is the
        canonical `layout` as fetchers read it; `index` is the shard's in its push.
        """
        if "signature" not in vars(layout):
            await asyncio.to_thread(getattr, layout, "signature")
        header, changes = await self._fetch.inspect(document, entry, source)
        touches = await asyncio.to_thread(touched, layout, changes)
        if header != DeltaHeader(index, header.base_content_digest, layout.signature):
            raise WeightSyncError(
                Reason.SHARD_INVALID,
                f"the delta in shard {index} says that it is shard {header.shard} of layout "
                f"{header.layout_digest}, but the base has layout {layout.signature}; push the "
                "version in full",
            )
        return header.base_content_digest, DeltaShard(entry, source, touches), changes

    def remember(self, record: VersionRecord, shards: Sequence[DeltaShard]) -> None:
        """Take note of delta shards that were just stored, so that they need no second proof."""
        store, stored = self._store, []
        for index, shard in enumerate(shards):
            source = store.shard_path(record.model, record.version, index, delta=True)
            if source is not None:
                stored.append(shard._replace(source=source))
        self._known[record] = tuple(stored)

    # Inside

    def _links(self, record: VersionRecord) -> list[ChainLink]:
        durable = self._store.durable
        links = []
        for one in record.chain:
            commit = one.commit
            if commit is None:
                raise WeightSyncError(Reason.FAULT, f"version {one.version} is not committed")
            resident = one.slot is not None and one.residency == pb.RESIDENCY_STAGED
            size = commit.delta_bytes if one.base is not None else 0
            readable = durable and not one.damaged
            links.append(
                ChainLink(commit.manifest_digest, commit.size_bytes, size, resident, readable)
            )
        return links

    def _lost(self, record: VersionRecord) -> WeightSyncError:
        damaged = next((one for one in record.chain if one.damaged), record)
        of = f"version {damaged.version}, which it is based on: " if damaged is not record else ""
        return WeightSyncError(Reason.DATA_CORRUPT, f"{of}{damaged.damaged or 'it was not kept'}")

    async def _follow(
        self, way: Plan, slot: Slot, record: VersionRecord, manifest: Manifest, *, prove: bool
    ) -> None:
        chain = record.chain
        source = chain[way.at]
        with contextlib.ExitStack() as stack:
            # Before the first await, so that nobody takes away what the plan counts on.
            if way.start is BuildStart.COPY and source.slot is not None:
                stack.enter_context(self._reading(slot_of(source)))
            if way.start is BuildStart.IN_PLACE:
                slot.revive()
            scratch = self._slots.scratch()
            stack.callback(self._slots.discard, scratch)
            changed = await self._stored(scratch, manifest, chain[: way.at])
            gate = asyncio.Semaphore(_AT_ONCE)

            async def one(index: int) -> list[bytes]:
                async with gate:
                    segment = await self._begin(way.start, source, slot, manifest.layout, index)
                    await self.patch(segment, index, changed)
                    return await self._prove(segment, index, changed) if prove else []

            found = await all_done([one(index) for index in range(len(manifest.layout.shards))])
        if prove:
            compare(
                manifest, found, "in the store" if way.start is BuildStart.LOAD else "in memory"
            )

    async def _begin(
        self, start: BuildStart, source: VersionRecord, slot: Slot, layout: Layout, index: int
    ) -> Segment:
        size = layout.shards[index].size
        segment = slot.segments.get(index) or await self._slots.segment(slot, index, size)
        if start is BuildStart.COPY:
            await self._fetch.copy(source.place.segments[index], size, segment)
        elif start is BuildStart.LOAD:
            path = self._store.shard_path(source.model, source.version, index)
            if path is None:
                raise WeightSyncError(Reason.DATA_CORRUPT, f"shard {index} was not kept")
            await self._fetch.load(path, size, segment)
        return segment

    async def _prove(self, segment: Segment, index: int, changed: PatchInput) -> list[bytes]:
        if changed.deltas:
            await failpoints.reach("delta.patched")
        return await self._fetch.digest(segment, changed.layout.shards[index])

    async def _stored(
        self, scratch: Slot, manifest: Manifest, deltas: Sequence[VersionRecord]
    ) -> PatchInput:
        """Return the stored deltas of these versions, newest first, all proved."""
        if not deltas:
            return PatchInput(manifest.layout, None, ())
        document = await write_layout(scratch, self._segments, manifest)
        found = []
        for record in reversed(deltas):
            if record not in self._known:
                self._known[record] = await self._read(record, document, manifest.layout)
            found.append(self._known[record])
        return PatchInput(manifest.layout, document, found)

    async def _read(
        self, record: VersionRecord, document: Segment, layout: Layout
    ) -> tuple[DeltaShard, ...]:
        store = self._store
        delta = await store.delta(record.model, record.version)

        async def one(index: int, entry: ShardEntry) -> DeltaShard:
            source = store.shard_path(record.model, record.version, index, delta=True) or ""
            try:
                _, shard, _ = await self.inspect(document, layout, index, entry, source)
            except WeightSyncError as error:
                if error.reason not in DELTA_DAMAGE:
                    raise
                raise WeightSyncError(
                    Reason.DATA_CORRUPT, f"the delta of version {record.version}: {error.message}"
                ) from error
            return shard

        return tuple(await all_done([one(*pair) for pair in enumerate(delta.layout.shards)]))

    @contextlib.contextmanager
    def _reading(self, slot: Slot) -> Iterator[None]:
        slot.leases += 1
        try:
            yield
        finally:
            self._slots.end_lease(slot)


_RUN = "run_id"


def find_base(versions: VersionTable, content_digest: str, run_id: str) -> VersionRecord:
    """Return the newest version with this content that a delta can be based on.

    An empty `run_id` matches any run. Raises BASE_MISMATCH, which tells what is held.
    """
    why = f"no version here has content {content_digest}"
    # What this host alone has comes last: nobody else has it for a base.
    for base in sorted(versions.list(), key=lambda record: -record.order):
        if base.commit is None or base.content_digest != content_digest:
            continue
        damaged = next((record for record in base.chain if record.damaged), None)
        other = base.metadata.get(_RUN, "")
        if damaged is not None:
            why = f"version {damaged.version} is damaged in the store"
        elif run_id and other and run_id != other:
            why = f"version {base.version} is of run {other[:100]!a}"
        else:
            return base
    raise mismatch(versions, why)


def mismatch(versions: VersionTable, why: str) -> WeightSyncError:
    newest = versions.find(versions.newest)
    digest = newest.content_digest if newest is not None else ""
    return WeightSyncError(
        Reason.BASE_MISMATCH,
        f"the delta has no base: {why}, the newest is version {versions.newest} with content "
        f"{digest or '(none)'}; push this version in full",
        metadata={"held_version": str(versions.newest), "held_content_digest": digest},
    )
