"""Versions into slots and onto the segment socket, through fetchers, with the proof of them.

Digests are begun after the last reader has read: earlier ones may have seen other bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import about
from weightsync.model.manifest import Layout, Manifest
from weightsync.shm.staged_version import StagedVersion
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.commits import CommitService
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.serving import ServingState
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import all_done
from weightsync_server.residency.slot import Slot, SlotLease, slot_of
from weightsync_server.residency.slot_pool import SlotPool
from weightsync_server.store.protocol import SHARD_DAMAGE, Store
from weightsync_server.workers.fetch.fetch_api import FetchApi

if TYPE_CHECKING:
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.residency.segment_allocator import SegmentAllocator

    #: Fills a slot with a committed version and proves it.
    Materialize = Callable[[Slot, VersionRecord, Manifest], Awaitable[None]]


async def load_shard(
    slots: SlotPool, fetch: FetchApi, slot: Slot, layout: Layout, shard: int, source: int | str
) -> list[bytes]:
    entry = layout.shards[shard]
    segment = await slots.segment(slot, shard, entry.size)
    await fetch.load(source, entry.size, segment)
    return await fetch.digest(segment, entry)


def compare(manifest: Manifest, found: Sequence[Sequence[bytes]], where: str) -> None:
    """Raise DATA_CORRUPT for shards unlike a manifest, naming the first other tensor.

    `found` are the digests, shard by shard; `where` is for the error's sentence.
    """
    flat = tuple(digest for digests in found for digest in digests)
    if len(flat) != len(manifest.digests):
        raise WeightSyncError(Reason.DATA_CORRUPT, f"the shards {where} hold different tensors")
    if flat != manifest.digests:
        pairs = zip(manifest.layout.tensors, manifest.digests, flat, strict=True)
        tensor = next(tensor for tensor, ours, theirs in pairs if ours != theirs)
        name = json.dumps(tensor.name[:100])
        raise WeightSyncError(
            Reason.DATA_CORRUPT, f"the bytes of tensor {name} {where} have a different digest"
        )


class StagedDigests:
    """Digests each shard of a leased version once, in the order of `Layout.largest_first`.

    The lease outlives it: call `cancel` before it is released.
    """

    def __init__(self, lease: SlotLease, manifest: Manifest, fetchers: FetchApi) -> None:
        self._shards = list(zip(lease.segments, manifest.layout.shards, strict=True))
        self._manifest = manifest
        #: What the manifest tells of the shards that readers have proved.
        self._trusted: dict[int, Sequence[bytes]] = {}
        self._order = manifest.layout.largest_first
        self._fetchers = fetchers
        self._begun: list[asyncio.Task[Sequence[bytes]]] = []

    def trust(self, shards: frozenset[int]) -> None:
        """Take note that every reader has proved by itself what it has of these shards."""
        declared = self._manifest.digests_by_shard if shards else []
        self._trusted = {index: declared[index] for index in shards}

    def begin(self, count: int) -> None:
        """Begin with those of the first `count` shards that are not begun yet."""
        for index in self._order[len(self._begun) : max(0, count)]:
            self._begun.append(asyncio.create_task(self._digest(index)))

    async def all(self) -> list[Sequence[bytes]]:
        """Return the digests of all tensors, shard by shard; when this raises, all have ended."""
        self.begin(len(self._shards))
        found = dict(zip(self._order, await all_done(self._begun), strict=True))
        return [found[index] for index in range(len(self._shards))]

    async def _digest(self, index: int) -> Sequence[bytes]:
        if index in self._trusted:
            return self._trusted[index]
        return await self._fetchers.digest(*self._shards[index])

    async def cancel(self) -> None:
        """Forget what was begun; afterwards no fetcher is at a segment for it."""
        begun, self._begun = self._begun, []
        self._trusted = {}
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


_RESTORE = "restore the store from a copy, or delete the version and push its content again"


def _not_ours(record: VersionRecord, what: str, remedy: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.DATA_CORRUPT,
        f"version {record.version} of model {record.model}: {what}; {remedy}",
        metadata={"version": str(record.version)},
    )


def _until(deadline: float) -> float:
    return deadline - asyncio.get_running_loop().time()


class Stager:
    def __init__(
        self,
        table: VersionTable,
        serving: ServingState,
        commits: CommitService,
        slots: SlotPool,
        segments: SegmentAllocator,
        store: Store,
        fetch: FetchApi,
        *,
        check: Callable[[VersionRecord], None],
        materialize: Materialize,
    ) -> None:
        self._table = table
        self._serving = serving
        self._commits = commits
        self._slots = slots
        self._segments = segments
        self._store = store
        self._fetch = fetch
        self._check = check
        self._materialize = materialize
        self._loading: dict[int, asyncio.Task[None]] = {}
        #: Of those that wait for a slot, when the last who asked for it gives up.
        self._queued: dict[int, float] = {}
        self._documents = asyncio.Lock()

    async def close(self) -> None:
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)

    async def stage(
        self, version: int, timeout_s: float, *, for_engine: bool = True, durable: bool = True
    ) -> SlotLease:
        """Return a lease on a version whose bytes lie in a slot, read from the store if need be.

        `version` is a committed one, or the live one. With `for_engine`, an engine will map the
        segments, so they count until they are released. Without `durable`, a version that is staged
        will do before it is committed.
        """
        record = self._table.get(version)
        return await self.lease(record, timeout_s, for_engine=for_engine, durable=durable)

    async def lease(
        self, record: VersionRecord, timeout_s: float, *, for_engine: bool, durable: bool
    ) -> SlotLease:
        """Return a lease on a version that may have no number; see `stage`."""
        self._refuse_incomplete(record, durable=durable)
        deadline = asyncio.get_running_loop().time() + timeout_s
        # Meanwhile it is in use: nobody deletes it, nor gets its slot before we have our lease.
        try:
            with record.wanted():
                # Who else uses it may find damage before our turn: then it is read once more.
                while record.slot is None or record.residency != pb.RESIDENCY_STAGED:
                    await self._loaded(record, timeout_s, deadline)
                slot = slot_of(record)
                slot.leases += 1
        finally:
            self._slots.wake()
        try:
            document = await self._document(record, slot)
        except BaseException:
            self._slots.end_lease(slot)
            raise
        if for_engine:
            self._segments.expose([document, *(s.id for s in slot.segments.values())])
        return SlotLease(
            record, document, slot.ordered(), slot, partial(self._slots.end_lease, slot)
        )

    def hand_over(self, record: VersionRecord, known: VersionRecord, manifest: Manifest) -> None:
        """Give a record's slot, verified, to the committed version that it repeats, or free it."""
        same = known.commit is not None and known.commit.manifest_digest == manifest.manifest_digest
        # Whoever reads it already waits for a slot of its own: with this one it would hold two.
        if same and known.slot is None and known.version not in self._loading:
            slot_of(record).pass_to(known)
            # Also one whose only copy had been damaged.
            known.recover()
            self._table.staged(known, manifest)
        else:
            self._slots.release(record)

    @contextlib.asynccontextmanager
    async def digesting(self, lease: SlotLease) -> AsyncIterator[StagedDigests]:
        """Give digests for `verify`; nobody is at them when the body has ended."""
        digests = StagedDigests(lease, await self._commits.manifest(lease.record), self._fetch)
        try:
            yield digests
        finally:
            await digests.cancel()

    async def verify(self, lease: SlotLease, digests: StagedDigests | None = None) -> None:
        """Prove again that the segments hold the version, or raise DATA_CORRUPT.

        After that error the next `stage` reads the store. `digests` None begins them now.
        """
        with translate_os_errors("verifying a staged version"):
            await failpoints.reach("stage.verify")
        record = lease.record
        self._refuse_failed(record)
        manifest = await self._commits.manifest(record)
        digests = digests or StagedDigests(lease, manifest, self._fetch)
        try:
            found = await digests.all()
            compare(manifest, found, "in shared memory")
        except WeightSyncError as error:
            if error.reason not in SHARD_DAMAGE:
                raise
            self._damaged(record, lease.slot)
            remedy = (
                "the server reads it from the store again"
                if self._store.durable and record.commit is not None
                else "push it again"
            )
            raise _not_ours(record, error.message, remedy) from error
        self._refuse_failed(record)

    def _refuse_failed(self, record: VersionRecord) -> None:
        if record.orphaned and not self._serving.is_live(record.version):
            raise WeightSyncError(
                Reason.PUSH_ABORTED,
                f"the push of version {record.version} ended without a commit; push it again",
                metadata={"version": str(record.version)},
            )

    def _refuse_incomplete(self, record: VersionRecord, *, durable: bool) -> None:
        if record.durability == pb.DURABILITY_COMMITTED:
            return
        staged = record.slot is not None and record.residency == pb.RESIDENCY_STAGED
        coming = record.durability == pb.DURABILITY_RECEIVING
        # Somebody asked for the live one already.
        if staged and (self._serving.is_live(record.version) or (coming and not durable)):
            return
        missing = record.missing_text()
        waived = ", or set require_durable to false" if staged and coming else ""
        raise WeightSyncError(
            Reason.PUSH_INCOMPLETE,
            f"version {record.version} of model {record.model} is not committed"
            f"{': missing ' + missing if missing else ''}; commit its push first{waived}",
            metadata={"version": str(record.version)},
        )

    async def _loaded(self, record: VersionRecord, timeout_s: float, deadline: float) -> None:
        version = record.version
        task = self._loading.get(version)
        # One that has ended is forgotten a moment later: what it came to is not for who comes now.
        if task is None or task.done():
            # Owned by nobody who waits: a caller that gives up leaves a version that is staged.
            self._queued[version] = deadline
            with about(version=version):
                task = self._loading[version] = asyncio.create_task(self._load(record))
            task.add_done_callback(partial(self._ended, version))
        elif version in self._queued:
            self._queued[version] = max(self._queued[version], deadline)
        done, _ = await asyncio.wait([task], timeout=max(0.0, _until(deadline)))
        if done:
            task.result()
        elif version in self._queued:
            # Whoever waits longer goes on waiting.
            raise self._slots.none_free(timeout_s)
        else:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                f"version {version} is still being read from the store; retry",
                retry_after_s=1.0,
            )

    def _ended(self, version: int, task: asyncio.Task[None]) -> None:
        if self._loading.get(version) is task:
            del self._loading[version]
            self._queued.pop(version, None)
        if not task.cancelled():
            # Retrieved: whoever waited may be gone.
            task.exception()

    async def _load(self, record: VersionRecord) -> None:
        with translate_os_errors(f"reading version {record.version} from the store"):
            await failpoints.reach("stage.load")
        try:
            self._check(record)
        except WeightSyncError as error:
            raise _not_ours(record, error.message, _RESTORE) from error
        slot = await self._slots.take(record, 0, lambda: _until(self._queued[record.version]))
        del self._queued[record.version]
        record.begin_staging()
        self._table.touch(record)
        try:
            manifest = await self._commits.manifest(record)
            await self._materialize(slot, record, manifest)
        except BaseException as error:
            record.leave_memory()
            slot.spoil()
            self._slots.release(record)
            self._table.touch(record)
            if isinstance(error, WeightSyncError) and error.reason in SHARD_DAMAGE:
                self._table.report_damage(record)
                raise _not_ours(record, error.message, _RESTORE) from error
            raise
        self._table.staged(record, manifest)

    def _damaged(self, record: VersionRecord, slot: Slot) -> None:
        if record.slot is not slot:
            return
        if record.commit is None:
            # Its push may be at work in the slot, and frees it when it fails to commit.
            record.lose()
            record.begin_staging()
            self._table.touch(record)
            return
        record.evict()
        if not self._store.durable:
            # Its only copy is gone: no apply may choose it.
            record.lose()
        slot.spoil()
        self._slots.release(record)
        self._table.touch(record)
        self._table.report_damage(record)

    async def _document(self, record: VersionRecord, slot: Slot) -> str:
        async with self._documents:
            if slot.document is None:
                manifest = await self._commits.manifest(record)
                ids = tuple(segment.id for segment in slot.ordered())
                staged = StagedVersion(manifest, ids)
                slot.document = await self._segments.write(staged.to_segment)
            return slot.document.id
