"""The life of one push: streams join and leave, it succeeds or fails, and then frees everything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ops.metrics import Meters
from weightsync_server.ops.tasks import TaskSet, is_running
from weightsync_server.push.progress import progress, traced_facts
from weightsync_server.push.state import Phase
from weightsync_server.residency.orphans import OrphanReaper
from weightsync_server.store.store_records import ShardCheckpoint

if TYPE_CHECKING:
    from weightsync_server.push.progress import PushAnnouncement
    from weightsync_server.push.push_settings import PushSettings
    from weightsync_server.push.reservation import PushReservation
    from weightsync_server.push.state import PushState


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


class SegmentWriter(Protocol):
    async def cease(self) -> None:
        """Return when it writes no more, and never will for this push's stream."""


class PushLifecycle:
    """Begins and ends what a push as a whole goes through.

    It is open until `committed` or `error` of its state is set, once and for ever. With `error` the
    slot is freed and everything stored of it removed, once nothing works on it any more.

    `suspend` is called when the push was not used for a while, `on_end` once, when it is committed,
    or has failed and freed everything.

    Attributes:
        writers: Ingest processes that may write into its segments now.
        opened: Done when the push has its slot, or has failed to get one.
        awaiting: Calls without which it would not go on.
    """

    def __init__(
        self,
        state: PushState,
        orphans: OrphanReaper,
        limits: PushSettings,
        meters: Meters,
        reservation: PushReservation,
        announcement: PushAnnouncement,
        *,
        suspend: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._state = state
        self._orphans = orphans
        self._limits = limits
        self._meters = meters
        self._reservation = reservation
        self._announcement = announcement
        self._suspend = suspend
        self._on_end = on_end
        self.tasks = TaskSet()
        self.writers: set[SegmentWriter] = set()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.awaiting = 0
        self._idle: asyncio.TimerHandle | None = None
        self._quiet: asyncio.TimerHandle | None = None

    @property
    def phase(self) -> Phase:
        state = self._state
        if state.error is not None:
            return Phase.FAILED
        if state.committed is not None:
            return Phase.COMMITTED
        if state.suspended is not None:
            return Phase.SUSPENDED
        if not self.opened.done():
            return Phase.OPENING
        if self.tasks.committing is not None:
            return Phase.COMMITTING
        return Phase.RECEIVING if self.tasks.sealing is None else Phase.SEALING

    @property
    def ended(self) -> bool:
        return self._state.error is not None or self._state.committed is not None

    # Use

    def touch(self) -> None:
        """Put the idle timeouts off; they run only while no stream is connected."""
        for timer in (self._idle, self._quiet):
            if timer is not None:
                timer.cancel()
        self._idle = self._quiet = None
        if self._state.streams == 0 and not self.ended:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._limits.resume_timeout_s, self._too_idle)
            self._quiet = loop.call_later(self._limits.sleep_after_s, self._too_quiet)

    @property
    def until(self) -> float:
        """When it is dropped unless somebody goes on with it, by the event loop's clock."""
        return self._idle.when() if self._idle is not None else 0.0

    def join(self) -> None:
        writers = self._state.writers
        most = max(self._limits.max_streams, 2 * writers.count if writers.several else 0)
        if self._state.streams >= most:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"the push has {self._state.streams} streams, the most there may be; use those",
                retry_after_s=1.0,
            )
        self._state.streams += 1
        self.touch()

    def leave(self, stream: object) -> None:
        """A stream ends; what it owned can be sent by another."""
        for shard in list(self._state.shards.values()):
            if shard.describer is stream:
                # A layout that was cut is sent again from its beginning.
                del self._state.shards[shard.index]
                shard.layout_ended.set()
            for part in shard.parts.values():
                if part.owner is stream:
                    part.owner = None
        self._state.streams -= 1
        self.touch()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        self.awaiting += 1
        try:
            yield
        finally:
            self.awaiting -= 1

    # Changes

    def open(self) -> None:
        self.opened.set_result(None)
        self._state.writers.start()
        # Whoever waits may be cancelled before it hears of it: then the idle timeout ends the push.
        self.touch()

    def mark_resumable(self) -> None:
        """The push is written down, and goes on from what the store keeps of it."""
        self._state.recorded = True

    def suspend(self, checkpoints: dict[int, ShardCheckpoint]) -> None:
        """The push has no slot any more, but what was made durable of it."""
        self._state.suspended = checkpoints
        self.tasks.sealing = self.tasks.resuming = None
        self.opened = asyncio.get_running_loop().create_future()
        if (delta := self._state.delta) is not None:
            self._state.delta = delta.renewed()
            delta.end()

    def recover(self, checkpoints: dict[int, ShardCheckpoint]) -> None:
        self._state.recorded = self._state.recovered = True
        self._state.suspended = checkpoints

    def resume(self) -> dict[int, ShardCheckpoint]:
        checkpoints, self._state.suspended = self._state.suspended or {}, None
        return checkpoints

    def fail(self, error: WeightSyncError, outcome: str = "failed", why: str = "") -> None:
        """End the push without a commit; what was committed already stays.

        Callers that still work on it get `error`. It is counted as `outcome`; the log says `why`
        instead of the error's message.
        """
        if self.ended:
            return
        self._state.error = error
        self._state.failed_at = asyncio.get_running_loop().time()
        self.touch()
        self._announcement.end()
        self._state.writers.close()
        if not self.opened.done():
            self.opened.set_result(None)
        version = self._state.record.version
        logger.info(
            "push of version %d ended: %s",
            version,
            why or error.message,
            extra=event("push.ended", reason=error.reason.value, **self._state.facts),
        )
        self._meters.count_push(outcome)
        self.tasks.closing = asyncio.create_task(self._close())
        self._reservation.disk.end(error, self.tasks.closing)

    def succeed(self, response: pb.CommitPushResponse) -> None:
        self._state.committed = response
        self.touch()
        self._announcement.end()
        self._state.writers.close()
        self._meters.count_push("already" if response.already else "committed")
        if not response.already:
            self._meters.count_cast(min(self._state.cast_tensors, response.tensor_count))
        self._end()

    def restore(self, response: pb.CommitPushResponse) -> None:
        """The push was committed in an earlier life of the server, or has been forgotten since."""
        self.opened.set_result(None)
        self._state.committed = response

    def again(self) -> pb.CommitPushResponse:
        response = pb.CommitPushResponse()
        if self._state.committed is not None:
            response.CopyFrom(self._state.committed)
        response.already = True
        return response

    async def closed(self) -> None:
        if self.tasks.closing is not None:
            await asyncio.shield(self.tasks.closing)

    # The end

    async def _close(self) -> None:
        state = self._state
        await self._cancel_tasks()
        if state.committed is not None:
            # The commit was too far to be called back, and its answer was given.
            state.error = None
            return
        await asyncio.gather(*(writer.cease() for writer in self.writers))
        try:
            # Who shuts down will be asked to go on.
            stays = state.error is not None and state.error.reason is Reason.SHUTTING_DOWN
            await self._orphans.drop(state.record, keep=stays and state.recorded)
        finally:
            for shard in state.shards.values():
                shard.segment = None
            self._end()

    async def _cancel_tasks(self) -> None:
        own = self.tasks
        # First of all: what they begin until they end is ended below.
        starting = [
            task for task in (own.opening, own.resuming, own.suspending) if task is not None
        ]
        for start in starting:
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        tasks: list[asyncio.Task[Any]] = []
        for shard in self._state.shards.values():
            for task in shard.cancellable:
                if task is not None:
                    task.cancel()
                    tasks.append(task)
            if shard.tasks.allocation is not None:
                tasks.append(shard.tasks.allocation)
        tasks += [task for task in (own.committing, own.sealing) if task is not None]
        if self._state.delta is not None:
            if own.sealing is not None:
                own.sealing.cancel()
            await self._state.delta.cease()
        # Memory is freed from under nobody: fetchers let go before a cancelled task ends.
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self) -> None:
        """Keep only what may still be asked for: ended pushes are remembered by the hundred."""
        state = self._state
        if state.work is not None:
            error = state.error.message if state.error is not None else ""
            state.work.end(traced_facts(state), error)
            state.work = None
        self.tasks = TaskSet(closing=self.tasks.closing)
        state.final = progress(state)
        self._reservation.disk.close()
        if state.delta is not None:
            state.delta.end()
        state.suspended = None
        self._on_end()

    def _too_idle(self) -> None:
        self._idle = None
        if is_running(self.tasks.committing):
            self.touch()
            return
        self.fail(
            WeightSyncError(
                Reason.PUSH_ABORTED,
                f"the push was idle for {self._limits.resume_timeout_s:g} s and was dropped; "
                "begin it again",
            ),
            "aborted",
        )

    def _too_quiet(self) -> None:
        self._quiet = None
        self._suspend()
        if self._state.recorded and self._state.suspended is None:
            # In use, or found to be while it is suspended.
            loop = asyncio.get_running_loop()
            self._quiet = loop.call_later(self._limits.sleep_after_s, self._too_quiet)
