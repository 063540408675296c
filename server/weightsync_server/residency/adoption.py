"""Files that the engine offers, with tensors kept of a version: committed, or only proved."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.checkpoint_folder import CheckpointFile, packed, read_layout, shown
from weightsync.model.manifest import Manifest, TensorEntry
from weightsync.shm.segment_socket import OfferedFile
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.commits import CommitService
from weightsync_server.catalog.engine_layouts import EngineLayouts
from weightsync_server.catalog.record import VersionRecord, local_number
from weightsync_server.ops.tasks import all_done, in_thread
from weightsync_server.residency.orphans import OrphanReaper
from weightsync_server.residency.slot import Slot, SlotLease
from weightsync_server.residency.slot_pool import SlotPool
from weightsync_server.residency.stager import Stager, load_shard
from weightsync_server.store.protocol import SHARD_DAMAGE, Store
from weightsync_server.store.store_records import CommitRecord
from weightsync_server.workers.fetch.fetch_api import FetchApi

if TYPE_CHECKING:
    from weightsync_server.catalog.layout_compatibility import LayoutCompatibility
    from weightsync_server.catalog.table import VersionTable


class KeptTensors(NamedTuple):
    """What stays of a version: `files` hold those tensors, in memory.

    `alike` names those left out because each was the same matrix as one that comes.
    """

    files: list[OfferedFile]
    alike: frozenset[str]


def kept_files(
    files: Sequence[OfferedFile], base: Manifest, segments: Sequence[Segment]
) -> KeptTensors:
    """Return the tensors of a version that files lack, in memory; the caller closes them.

    One that was the same matrix as a tensor that comes, as a tied head is that was written out, is
    left out: it would be the old one.

    Raises:
        WeightSyncError: ENGINE_REFUSED; the files hold what the version has not, or has with
            another dtype or shape.
    """
    layout = base.layout
    known = {tensor.name: tensor for tensor in layout.tensors}
    brought = {tensor.name for tensor in _checked(files, known)}
    pairs = list(zip(layout.tensors, base.digests, strict=True))
    sent = {(t.dtype, t.shape, digest) for t, digest in pairs if t.name in brought}
    equal = {
        t.name for t, digest in pairs if len(t.shape) > 1 and (t.dtype, t.shape, digest) in sent
    }
    left_out = brought | equal
    kept: list[OfferedFile] = []
    try:
        shards = zip(layout.shards, layout.by_shard, segments, strict=True)
        for at, (entry, tensors, segment) in enumerate(shards):
            left = [tensor for tensor in tensors if tensor.name not in left_out]
            if not left:
                continue
            name = f"kept-{at:05}"
            file = CheckpointFile(name, entry.size, segment.fd, entry, tuple(left), (0, 0))
            fd = packed(file, left, "what the update leaves out")
            kept.append((name, os.fstat(fd).st_size, fd))
    except BaseException:
        for _, _, fd in kept:
            os.close(fd)
        raise
    return KeptTensors(kept, frozenset(equal - brought))


def _checked(files: Sequence[OfferedFile], known: dict[str, TensorEntry]) -> Sequence[TensorEntry]:
    tensors = read_layout(sorted(files)).tensors
    for tensor in tensors:
        before = known.get(tensor.name)
        if before is None or (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
            what = f"has {before.dtype} {list(before.shape)} there" if before else "is not there"
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "send all tensors, or send these exactly as in the version that is served: "
                f"{shown(tensor.name)}, {tensor.dtype} {list(tensor.shape)}, {what}",
            )
    return tensors


#: Tensors that a refusal names.
_NAMED = 10
_SLOT_WAIT_S = 60.0
#: For a version that comes in under the checkpoint's number, most often with its content, seconds.
_ARRIVAL_WAIT_S = 60.0
#: What files are, and what to do about those that cannot be read.
_CHECKPOINT = (
    "the engine's checkpoint",
    "restore its files, or restart vLLM on a whole checkpoint",
)
_UPDATE = ("the update", "send it again")


class OriginNumbers(Protocol):
    """The origin of a server that follows one: it alone gives numbers."""

    url: str

    async def find(self, content_digest: str) -> CommitRecord | None:
        """Return the newest version with this content; None: it has none, or cannot be asked."""


class CheckpointAdoption:
    """Makes versions of files that the engine has, or holds them for the engine only.

    `origin` returns what this server follows; None: it gives numbers by itself. `turn` is held
    while the checkpoint of one engine becomes the first version; the other engines then take up
    that one.
    """

    def __init__(
        self,
        table: VersionTable,
        commits: CommitService,
        slots: SlotPool,
        stager: Stager,
        orphans: OrphanReaper,
        store: Store,
        fetch: FetchApi,
        origin: Callable[[], OriginNumbers | None] = lambda: None,
    ) -> None:
        self._table = table
        self._commits = commits
        self._slots = slots
        self._stager = stager
        self._orphans = orphans
        self._store = store
        self._fetch = fetch
        self._origin = origin
        self.turn = asyncio.Lock()

    async def adopt(self, files: Sequence[OfferedFile], version: int) -> VersionRecord:
        """Commit the engine's checkpoint as a version, or find the version that it is.

        The caller closes `files`. `version` is the number if it is new; 0: the next.
        """
        # Registered only when it turns out to be new: what it is, its content tells.
        record = VersionRecord(self._table.name, version)
        async with self._arriving(record, files, _CHECKPOINT) as manifest:
            # Others that use the store may have numbered it meanwhile.
            await self._commits.catch_up()
            number = await self._number(record, manifest.content_digest)
            if len(self._slots.slots) > 1:
                # Of the origin's number; a fetch needs a slot beside ours.
                await self._table.settled(number, _ARRIVAL_WAIT_S)
            known = self._table.same_content(manifest.content_digest)
            if known is not None:
                self._stager.hand_over(record, known, manifest)
                return known
            # No await between here and `add`: a push may take the number meanwhile.
            if record.version and record.version < self._table.next_version():
                raise self._table.not_above(record.version)
            number = record.version or number or self._table.adoption_version()
            if self._table.find(number) is not None:
                # Not ours then: what is stored under it is dropped with nothing of this.
                raise _taken(number)
            record.renumber(number)
            try:
                await self._commit_new(record, manifest, adopted=True)
            except WeightSyncError as error:
                if error.reason is Reason.VERSION_CONFLICT:
                    raise _taken(record.version) from error
                raise
            return record

    async def receive(
        self,
        files: Sequence[OfferedFile],
        metadata: dict[str, str],
        accepted: LayoutCompatibility,
        base: VersionRecord | None = None,
        layouts: EngineLayouts | None = None,
    ) -> VersionRecord:
        """Commit what a trainer has sent to the engine as the next version, whatever its content.

        It is guarded by epochs, as a push without one is. The caller closes `files`. `accepted`
        refuses tensors that the engine does not take, and `layouts` parts that leave out what it
        needs. `base` is the version whose other tensors stay; None: the files have all of them.
        """
        if (origin := self._origin()) is not None:
            raise WeightSyncError(
                Reason.SERVER_FOLLOWS,
                f"this server follows {origin.url} and takes no updates from a trainer; push there",
            )
        record = VersionRecord(self._table.name, 0, self._commits.epoch, metadata)
        async with (
            self._with_kept(files, base) as kept,
            self._arriving(record, [*files, *kept.files], _UPDATE) as manifest,
        ):
            if await accepted.check(manifest.layout.tensors):
                record.check_layout(pb.LAYOUT_CHECK_PASSED)
            if kept.alike and layouts is not None:
                await _check_alike(kept.alike, manifest.layout.tensors, layouts)
            record.renumber(self._table.next_version())
            await self._commit_new(record, manifest, adopted=False)
            return record

    @contextlib.asynccontextmanager
    async def _with_kept(
        self, files: Sequence[OfferedFile], base: VersionRecord | None
    ) -> AsyncIterator[KeptTensors]:
        if base is None:
            yield KeptTensors([], frozenset())
            return
        made: list[KeptTensors] = []
        lease = await self._stager.lease(base, _SLOT_WAIT_S, for_engine=False, durable=False)
        try:
            with lease:
                manifest = await self._commits.manifest(base)
                segments = lease.segments
                # Whoever cancels this waits for the thread, and what it has made is closed.
                await in_thread(lambda: made.append(kept_files(files, manifest, segments)))
            yield made[0]
        finally:
            for _, _, fd in (file for kept in made for file in kept.files):
                os.close(fd)

    async def _number(self, record: VersionRecord, content: str) -> int:
        """Return the number of content that has none here; 0: the table gives it one.

        A server that follows takes its origin's. Of servers that use one store, the first to create
        a number there has it, later the one with the newest epoch; the others' content stays their
        own.
        """
        if record.version:
            return 0
        if (origin := self._origin()) is None:
            own = not self._table.newest or await self._commits.collects()
            return 0 if own else local_number(content)
        version = await origin.find(content)
        if version is None or self._means_other(version):
            return local_number(content)
        record.add_metadata(version.metadata)
        return version.version

    def _means_other(self, version: CommitRecord) -> bool:
        """Tell whether the origin's number has other content here, as after it was begun anew."""
        known = self._table.committed(version.version)
        return known is not None and known.content_digest != version.content_digest

    @contextlib.asynccontextmanager
    async def _arriving(
        self, record: VersionRecord, files: Sequence[OfferedFile], what: tuple[str, str]
    ) -> AsyncIterator[Manifest]:
        """Read files into a slot for the body, which commits them or gives the slot to another."""
        slot = await self._slots.take(record, _SLOT_WAIT_S)
        try:
            yield await self._read(slot, sorted(files), what)
        except BaseException:
            if record.durability != pb.DURABILITY_COMMITTED:
                await self._orphans.drop(record)
            raise

    @contextlib.asynccontextmanager
    async def borrow(self, files: Sequence[OfferedFile]) -> AsyncIterator[SlotLease]:
        """Lend the engine's checkpoint to it, in memory that is given back after the block.

        It makes no version, and none loses its bytes for good. The caller closes `files`.
        """
        record = VersionRecord(self._table.name, 0)
        slot = self._slots.borrow(record)
        try:
            self._table.staged(record, await self._read(slot, sorted(files), _CHECKPOINT))
            # It is staged, so nothing is waited for.
            with await self._stager.lease(record, 0, for_engine=True, durable=False) as lease:
                yield lease
        finally:
            self._slots.give_back(slot)

    async def _read(
        self, slot: Slot, files: Sequence[OfferedFile], what: tuple[str, str]
    ) -> Manifest:
        try:
            return await self._read_whole(slot, files)
        except WeightSyncError as error:
            if error.reason not in SHARD_DAMAGE:
                raise
            name, remedy = what
            raise WeightSyncError(
                error.reason, f"{name} cannot be read: {error.message}; {remedy}"
            ) from error

    async def _read_whole(self, slot: Slot, files: Sequence[OfferedFile]) -> Manifest:
        # To its end: the caller closes the files then.
        layout = await in_thread(read_layout, files)
        await self._slots.promise(slot, layout.size)
        loads = [
            load_shard(self._slots, self._fetch, slot, layout, shard, fd)
            for shard, (_, _, fd) in enumerate(files)
        ]
        digests = [digest for found in await all_done(loads) for digest in found]
        if len(digests) != len(layout.tensors):
            raise WeightSyncError(Reason.SHARD_INVALID, "it changed during the push")
        return await self._commits.seal(layout, digests)

    async def _commit_new(
        self, record: VersionRecord, manifest: Manifest, *, adopted: bool
    ) -> None:
        self._table.add(record)
        segments = record.place.ordered()
        writes = []
        for index, shard in enumerate(manifest.layout.shards):
            target = self._store.shard_path(record.model, record.version, index)
            if target is not None:
                writes.append(self._fetch.persist(segments[index], shard.size, target))
        await all_done(writes)
        await self._commits.commit(record, manifest, adopted=adopted)


async def _check_alike(
    alike: frozenset[str], tensors: Sequence[TensorEntry], layouts: EngineLayouts
) -> None:
    """Refuse a part without a tensor that it left out and that an engine holds by itself.

    The trainer may not have it tied: the copy might be old.
    """
    try:
        await layouts.check_whole(tensors)
    except WeightSyncError as error:
        if error.reason is not Reason.ENGINE_REFUSED:
            raise
        names = ", ".join(shown(name) for name in sorted(alike)[:_NAMED])
        more = f" and {len(alike) - _NAMED} more" if len(alike) > _NAMED else ""
        raise WeightSyncError(
            error.reason,
            f"send {names}{more} as well: it was bit for bit equal to a matrix that is sent, so "
            f"it cannot be kept, and the engine needs it ({error.message})",
            metadata=error.metadata,
        ) from error


def _taken(version: int) -> WeightSyncError:
    return WeightSyncError(
        Reason.PUSH_ABORTED,
        f"version {version} is arriving under the number of the engine's checkpoint; retry when "
        "it has arrived",
        retry_after_s=1.0,
    )
