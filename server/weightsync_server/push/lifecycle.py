"""One push: the upload of one version into one slot."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth.callers import caller
from weightsync_server.push.checkpoint import keep_up
from weightsync_server.push.delta_push import DeltaPush
from weightsync_server.push.layout_parts import PushLayout
from weightsync_server.push.progress import progress
from weightsync_server.push.suspension import may_sleep, sleep
from weightsync_server.push.verification import check_arrived_header, verify_shard
from weightsync_server.residency.slot import slot_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.model.manifest import Layout, Manifest
    from weightsync.shm.incoming_version import Lying
    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.layout_cache import KnownLayout
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import ModelVersions
    from weightsync_server.ops.meters import Meters
    from weightsync_server.push.limits import PushLimits
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.push.sources.remote_stream import RemoteStream
    from weightsync_server.residency.incoming import IncomingReader
    from weightsync_server.residency.slot import Slot
    from weightsync_server.store.store_records import ShardCheckpoint

__all__ = ["FATAL", "Push"]

logger = logging.getLogger(__name__)

#: Refusals after which a push cannot become good any more.
FATAL = frozenset(
    {
        Reason.LAYOUT_INVALID,
        Reason.SHARD_INVALID,
        Reason.DIGEST_MISMATCH,
        Reason.MEMORY_EXHAUSTED,
        Reason.DISK_EXHAUSTED,
        Reason.VERSION_CONFLICT,
        Reason.VERSION_NOT_ABOVE,
        Reason.EPOCH_STALE,
        Reason.WRITER_LEFT,
        Reason.FAULT,
    }
)


class Push:
    """The state of one push. Changed on the event loop only.

    It is open until `committed` or `error` is set; either is set once and for ever. With `error`
    the slot is freed and everything stored of it removed, once nothing works on it any more.

    Attributes:
        id: Names the push.
        key: Idempotency key; empty: none.
        caller: Who began it.
        record: The version it brings.
        existing: The committed version that it repeats, or the live one that failed to commit.
        shards: Uploads by index.
        layout: What was told of them.
        delta: What it has besides if it is a delta.
        disk: The room in the store that it was promised.
        known: The layout, when the server knew it.
        opened: Done when the push has its slot, or has failed to get one.
        opening: The task that opens it; None: an earlier life of the server did.
        awaiting: Calls that wait until it is open.
        committed: The answer to its commit.
        error: Why it failed.
        committing: The task that commits it.
        sealing: The task that makes its manifest, once all bytes are proved.
        streams: Streams open now.
        writers: Ingest processes that may write into its segments now.
        declared_bytes: Sum of the shards' sizes so far.
        told: How far every shard came, once it has ended.
        request: The call that opened it.
        recorded: It is written down and survives a crash, as far as its bytes are kept.
        asleep: After a restart, or when nobody sent it for a while, what was kept of it, by shard;
            None: it is awake.
        waking: The task that wakes it.
        sleeping: The task that puts it to sleep.
        arriving: Tells engines which shards are here; None: nobody is told.
        first_byte_at: When the first bytes came, by the event loop's clock; 0: not yet.
        last_byte_at: When the last shard was complete; 0: none was since it was opened or woken.
    """

    def __init__(
        self,
        versions: ModelVersions,
        record: VersionRecord,
        request: pb.BeginPushRequest,
        limits: PushLimits,
        meters: Meters,
        on_end: Callable[[Push], None],
    ) -> None:
        self.id = secrets.token_hex(16)
        self.key = request.idempotency_key
        self.caller = caller.get()
        self.versions = versions
        self.record = record
        record.push_id, record.key = self.id, self.key
        self.existing: VersionRecord | None = None
        self.delta: DeltaPush | None = None
        self.disk = versions.disk.share()
        self.limits, self.meters = limits, meters
        self.shards: dict[int, ShardState] = {}
        self.known: KnownLayout | None = None
        self.request = request
        self.recorded = False
        self.asleep: dict[int, ShardCheckpoint] | None = None
        self.waking: asyncio.Task[None] | None = None
        self.sleeping: asyncio.Task[None] | None = None
        self.shard_count = request.shard_count
        self.total_bytes = request.total_bytes
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.opening: asyncio.Task[None] | None = None
        self.awaiting = 0
        self.committed: pb.CommitPushResponse | None = None
        self.error: WeightSyncError | None = None
        self.committing: asyncio.Task[pb.CommitPushResponse] | None = None
        self.sealing: asyncio.Task[Manifest] | None = None
        self.streams = 0
        self.writers: set[RemoteStream] = set()
        self.arriving: IncomingReader | None = None
        self.first_byte_at = self.last_byte_at = 0.0
        self.declared_bytes = 0
        self.layout = PushLayout(self)
        self.told: list[pb.ShardProgress] | None = None
        self._on_end = on_end
        self._closing: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._drowsy: asyncio.TimerHandle | None = None

    # Life

    @property
    def stores(self) -> bool:
        """Its shards go to a disk; those of a repeated version lie there already."""
        again = self.existing and self.existing.commit
        return self.versions.store.durable and again is None

    @property
    def place(self) -> Slot:
        """Where its shards go: the slot of its version or, of a delta, memory of their own."""
        return slot_of(self.record) if self.delta is None else self.delta.parcel

    def based_on(self, base: VersionRecord | None) -> None:
        """Take note that this is a delta, and of which version; None: it is not."""
        if base is not None:
            self.delta = DeltaPush(self.versions, self.record, base, self.meters)
            # It has the tensors of its base.
            self.record.layout_check = base.layout_check

    def check_open(self) -> None:
        """Raise the error of a push that failed."""
        if self.error is not None:
            raise self.error

    def rename(self, push_id: str) -> None:
        """Take the id under which an earlier life of the server opened the push."""
        self.id = self.record.push_id = push_id

    def touch(self) -> None:
        """Put the idle timeouts off; they run only while no stream is connected."""
        for timer in (self._idle, self._drowsy):
            if timer is not None:
                timer.cancel()
        self._idle = self._drowsy = None
        if self.streams == 0 and self.error is None and self.committed is None:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self.limits.resume_timeout_s, self._too_idle)
            self._drowsy = loop.call_later(self.limits.sleep_after_s, self._fall_asleep)

    @property
    def until(self) -> float:
        """When it is dropped unless somebody goes on with it, by the event loop's clock."""
        return self._idle.when() if self._idle is not None else 0.0

    def join(self) -> None:
        """A stream begins to serve the push."""
        if self.streams >= self.limits.max_streams:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"the push has {self.streams} streams, the most there may be; use those",
                retry_after_s=1.0,
            )
        self.streams += 1
        self.touch()

    def leave(self, stream: object) -> None:
        """A stream ends; what it owned can be sent by another."""
        for upload in list(self.shards.values()):
            if upload.owner is stream:
                upload.owner = None
                if upload.tensors is None:
                    # A layout that was cut is sent again from its beginning.
                    del self.shards[upload.index]
        self.streams -= 1
        self.touch()

    def fail(self, error: WeightSyncError, outcome: str = "failed") -> None:
        """End the push without a commit; what was committed already stays."""
        if self.error is not None or self.committed is not None:
            return
        self.error = error
        self.touch()
        self.quiet()
        if not self.opened.done():
            self.opened.set_result(None)
        logger.info("push of version %d ended: %s", self.record.version, error.message)
        self.meters.count_push(outcome)
        self._closing = asyncio.create_task(self._close())
        self.disk.end(error, self._closing)

    def succeed(self, response: pb.CommitPushResponse) -> None:
        """End the push with its answer."""
        self.committed = response
        self.touch()
        self.quiet()
        self.meters.count_push("already" if response.already else "committed")
        self._on_end(self)

    def announce(self, layout: Layout) -> None:
        """Let engines read the version as it comes, if all of it is new and has its memory."""
        if self.delta is not None or self.existing is not None:
            return
        segments = [self.shards[index].segment for index in range(len(layout.shards))]
        known = [segment for segment in segments if segment is not None]
        if len(known) == len(segments):
            self.arriving = self.versions.arrivals.announce(self.record, layout, known)

    def lies(self, upload: ShardState, where: Lying) -> None:
        """Take note of where a trainer has a shard on a GPU."""
        if self.arriving is not None:
            self.arriving.announce_ipc(upload.index, where)

    def came(self, upload: ShardState) -> None:
        """Take note that a shard is proved."""
        if self.arriving is not None:
            self.arriving.mark_complete(upload.index)

    def quiet(self) -> None:
        """Tell engines of no more shards."""
        if self.arriving is not None:
            self.arriving.end()
            self.arriving = None

    def again(self) -> pb.CommitPushResponse:
        """Return the answer to a commit that was done before."""
        response = pb.CommitPushResponse()
        if self.committed is not None:
            response.CopyFrom(self.committed)
        response.already = True
        return response

    def strip(self) -> None:
        """Keep only what may still be asked for: ended pushes are remembered by the hundred."""
        self.told = progress(self)
        self.disk.close()
        if self.delta is not None:
            self.delta.end()
        self.shards = {}
        self.known = self.sealing = self.asleep = self.arriving = None
        self.opening = self.waking = self.sleeping = None
        self.layout = PushLayout(self)

    async def closed(self) -> None:
        """Wait until a push that failed has freed everything."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # First of all: what they begin until they end is ended below.
        tasks_of_life = (self.opening, self.waking, self.sleeping)
        starting = [task for task in tasks_of_life if task is not None]
        for start in starting:
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        tasks: list[asyncio.Task[Any]] = []
        for upload in self.shards.values():
            for task in upload.working:
                if task is not None:
                    task.cancel()
                    tasks.append(task)
            if upload.allocation is not None:
                tasks.append(upload.allocation)
        tasks += [task for task in (self.committing, self.sealing) if task is not None]
        if self.delta is not None:
            if self.sealing is not None:
                self.sealing.cancel()
            await self.delta.cease()
        # Memory is freed from under nobody: fetchers let go before a cancelled task ends.
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.committed is not None:
            # The commit was too far to be called back, and was told as done.
            self.error = None
            return
        await asyncio.gather(*(writer.cease() for writer in self.writers))
        try:
            # Who shuts down will be asked to go on.
            stays = self.error is not None and self.error.reason is Reason.SHUTTING_DOWN
            await self.versions.drop(self.record, keep=stays and self.recorded)
        finally:
            for upload in self.shards.values():
                upload.segment = None
            self._on_end(self)

    def _too_idle(self) -> None:
        self._idle = None
        if self.committing is not None and not self.committing.done():
            self.touch()
            return
        self.fail(
            WeightSyncError(
                Reason.PUSH_ABORTED,
                f"the push was idle for {self.limits.resume_timeout_s:g} s and was dropped; "
                "begin it again",
            ),
            "aborted",
        )

    def _fall_asleep(self) -> None:
        self._drowsy = None
        if self.sleeping is None and may_sleep(self):
            self.sleeping = asyncio.create_task(sleep(self))
            self.sleeping.add_done_callback(lambda task: task.cancelled() or task.exception())
        if self.recorded and self.asleep is None:
            # In use, or found to be while it falls asleep.
            loop = asyncio.get_running_loop()
            self._drowsy = loop.call_later(self.limits.sleep_after_s, self._fall_asleep)

    # Bytes

    async def allocated(self, upload: ShardState) -> Segment:
        """Return the shard's segment, made by now, whatever is in it; the engine may take it."""
        if upload.checking is not None and not upload.checking.done():
            await asyncio.wait([upload.checking])
        if upload.segment is None and upload.allocation is not None:
            upload.segment = await asyncio.shield(upload.allocation)
        self.check_open()
        if upload.segment is None:
            raise WeightSyncError(Reason.FAULT, f"shard {upload.index} has no memory; push again")
        return upload.segment

    async def ready(self, upload: ShardState) -> Segment:
        """Return the shard's segment, with what survived a crash."""
        if upload.restoring is not None:
            await asyncio.wait([upload.restoring])
        return await self.allocated(upload)

    async def advance(self, upload: ShardState, segment: Segment) -> None:
        """Do what is due when the received bytes have reached the upload's mark.

        Raises:
            WeightSyncError: SHARD_INVALID when the header is not the layout's.
        """
        if not upload.headed:
            await check_arrived_header(upload, segment, self.known)
            self.check_open()
            upload.headed = True
        if not upload.complete:
            await keep_up(self, upload, segment)
        elif upload.verification is None:
            await failpoints.reach("receive.shard")
            upload.owner = None
            self.last_byte_at = asyncio.get_running_loop().time()
            self.verify(upload, segment)

    def verify(self, upload: ShardState, segment: Segment) -> None:
        """Begin to digest a complete shard and to make it durable."""
        upload.verification = asyncio.create_task(verify_shard(self, upload, segment))
