"""One shard from its first byte, durable on the way, to its proof; then the manifest of all.

Nothing below knows a push's life: it raises, and what runs it here fails the push.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import about
from weightsync.model.layout import check_version
from weightsync.model.manifest import Manifest
from weightsync.shm.segments import Segment
from weightsync_server.ops import traces
from weightsync_server.ops.metrics import Meters
from weightsync_server.ops.os_errors import to_refusal, translate_os_errors
from weightsync_server.ops.tasks import is_running, start_task
from weightsync_server.push.partial_push import PartPush
from weightsync_server.push.progress import missing
from weightsync_server.push.shard_part import PartFraming, ShardPart, ShardState
from weightsync_server.push.slice_changes import lay_changes
from weightsync_server.push.state import check_open
from weightsync_server.push.verification import (
    check_arrived_header,
    check_file,
    check_taken_back,
    verify,
    verify_slices,
)
from weightsync_server.workers.fetch.fetch_api import FetchApi

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.lifecycle import PushLifecycle
    from weightsync_server.push.progress import PushAnnouncement
    from weightsync_server.push.push_settings import PushSettings
    from weightsync_server.push.reservation import PushReservation
    from weightsync_server.push.state import PushState


logger = logging.getLogger(__name__)


_T = TypeVar("_T")

#: Failures of the fetchers, not of the push: the next step tries again.
_PASSING = frozenset({Reason.FETCHER_FAILED, Reason.SHUTTING_DOWN})


class ShardPipeline:
    def __init__(
        self,
        state: PushState,
        lifecycle: PushLifecycle,
        reservation: PushReservation,
        checkpointer: Checkpointer,
        announcement: PushAnnouncement,
        model: Model,
        meters: Meters,
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._reservation = reservation
        self._checkpointer = checkpointer
        self._announcement = announcement
        self._model = model
        self._fetch = model.fetch
        self._meters = meters
        #: When the first bytes came, by the event loop's clock; 0: not yet.
        self._first_byte_at = 0.0
        #: When the last shard was complete; 0: none was since the push was opened or resumed.
        self._last_byte_at = 0.0

    # For those who bring the bytes

    def begin_receive(self) -> None:
        if not self._first_byte_at:
            self._first_byte_at = asyncio.get_running_loop().time()

    async def ready(self, shard: ShardState) -> Segment:
        """Return the shard's segment, with what survived a crash."""
        if shard.tasks.restore is not None:
            await asyncio.wait([shard.tasks.restore])
        return await self.allocated(shard)

    async def allocated(self, shard: ShardState) -> Segment:
        """Return the shard's segment, made by now, whatever is in it; the engine may take it."""
        checking, allocation = shard.tasks.checking, shard.tasks.allocation
        if is_running(checking):
            await asyncio.wait([checking])
        if shard.segment is None and allocation is not None:
            shard.segment = await asyncio.shield(allocation)
        check_open(self._state)
        if shard.segment is None:
            raise WeightSyncError(Reason.FAULT, f"shard {shard.index} has no memory; push again")
        return shard.segment

    async def advance(self, part: ShardPart) -> None:
        """Do what is due when the received bytes have reached the part's watermark."""
        shard, segment = part.shard, part.shard.segment
        if part.framing is PartFraming.FILE and segment is not None:
            await self._check_header(shard, segment)
            if not part.complete:
                await self._checkpoint(part, segment)
            elif shard.tasks.verification is None:
                await failpoints.reach("receive.shard")
                part.owner = None
        if segment is not None:
            self.take_arrived(shard)

    def take_arrived(self, shard: ShardState) -> None:
        if not shard.arrived or shard.tasks.verification is not None:
            return
        shard.whole = True
        self._last_byte_at = asyncio.get_running_loop().time()
        self.verify(shard)

    def take_digests(self, part: ShardPart, first: int, digests: bytes) -> None:
        """Take digests that a writer computed, which may come before its bytes and after them."""
        part.give(first, digests)
        check_file(part.shard)
        if part.framing is not PartFraming.FILE:
            self.take_arrived(part.shard)

    # For the push

    def start(
        self, work: Coroutine[Any, Any, _T], what: str, passing: frozenset[Reason] = frozenset()
    ) -> asyncio.Task[_T]:
        """Return a task for a part of the push, whose failure is the push's.

        `what` names the act, as the subject of a sentence. Refusals in `passing` do not fail the
        push: the work is done again when asked for again.
        """
        with about(**self._state.facts):
            task = start_task(self._run(work, what, passing))
        # One that is cancelled before its first step has not awaited its work.
        task.add_done_callback(lambda _: work.close())
        return task

    def verify(self, shard: ShardState) -> None:
        # A task of the push: whoever brought the last of it may leave at any time.
        what = f"verifying shard {shard.index}"
        # Several writers wait for each other, and nobody asks again.
        passing = frozenset() if self._state.writers.several else _PASSING
        shard.tasks.verification = self.start(self._prove(shard), what, passing)

    async def sealed(self) -> Manifest:
        """Return the manifest of a complete push once every shard is verified and durable.

        What failed with FETCHER_FAILED is tried again.
        """
        self._proceed()
        await self._verified()
        return await asyncio.shield(self._seal())

    def observe_receive(self) -> None:
        if self._last_byte_at:
            # Where a restart has left nothing to send, nothing was received.
            seconds = self._last_byte_at - self._first_byte_at
            self._meters.observe_phase("receive", seconds)
            if (work := self._state.work) is not None:
                ago_s = asyncio.get_running_loop().time() - self._last_byte_at
                work.add(traces.ended("push.receive", seconds, ago_s))

    def restart(self) -> None:
        """Take note that the push was suspended: from now on its bytes come again."""
        self._first_byte_at = self._last_byte_at = 0.0

    # One shard

    async def _run(
        self, work: Coroutine[Any, Any, _T], what: str, passing: frozenset[Reason]
    ) -> _T:
        try:
            return await work
        except Exception as error:
            refusal = to_refusal(error, what)
            if refusal is not error:
                logger.exception("%s of version %d", what, self._state.record.version)
            if refusal.reason not in passing:
                self._lifecycle.fail(refusal)
            if refusal is error:
                raise
            raise refusal from error

    async def _check_header(self, shard: ShardState, segment: Segment) -> None:
        if not shard.headed:
            await check_arrived_header(shard, segment, self._state.known)
            check_open(self._state)
            shard.headed = True

    async def _checkpoint(self, part: ShardPart, segment: Segment) -> None:
        """Begin to make what came durable where it is worth it, and set the next watermark.

        Waits only when a crash would lose too much.
        """
        shard = part.shard
        if not self._state.recorded:
            part.watermark = part.size
            return
        task = shard.tasks.checkpoint
        if task is None or task.done():
            work = self._checkpointer.catch_up(shard, segment)
            task = self.start(work, f"keeping shard {shard.index}", _PASSING)
            shard.tasks.checkpoint = task
        if self._checkpointer.lags(shard):
            await asyncio.wait([task])
            check_open(self._state)
        self._checkpointer.set_watermark(shard)

    async def _prove(self, shard: ShardState) -> None:
        segment = await self.ready(shard)
        await check_taken_back(shard.index, segment, shard.parts.values())
        await lay_changes(self._fetch, shard, segment)
        segment.fill(0, shard.header or b"")
        # The stream that brought the last bytes may have been cut before it came to that.
        await self._check_header(shard, segment)
        digesting = asyncio.create_task(self._digest(shard, segment))
        persisting = asyncio.create_task(self._persist(shard, segment))
        try:
            await asyncio.gather(digesting, persisting)
        except BaseException:
            digesting.cancel()
            persisting.cancel()
            await asyncio.gather(digesting, persisting, return_exceptions=True)
            raise

    async def _digest(self, shard: ShardState, segment: Segment) -> None:
        started = time.perf_counter()
        found = await verify(self._fetch, shard, segment)
        self._meters.observe_phase("digest", time.perf_counter() - started)
        if shard.file is None:
            await verify_slices(self._fetch, shard, segment, found)
        if isinstance(delta := self._state.delta, PartPush):
            await delta.compose(shard, segment, found)
        elif delta is not None:
            await delta.inspect(shard, segment)
        shard.found = found
        check_file(shard)
        self._announcement.mark_complete(shard)
        shard.digested.set()
        self._proceed()

    async def _persist(self, shard: ShardState, segment: Segment) -> None:
        if not self._reservation.on_disk:
            return
        if self._state.recorded:
            await self._checkpointer.finish(shard, segment)
            return
        entry, target = shard.entry, self._reservation.target(shard)
        if isinstance(delta := self._state.delta, PartPush):
            made = await delta.composed(shard.index)
            entry, segment = made.entry, made.segment
        if target is not None:
            started = time.perf_counter()
            await self._fetch.persist(segment, entry.size, target)
            self._reservation.disk.wrote(entry.size)
            self._meters.observe_phase("persist", time.perf_counter() - started)

    # All of them

    async def _verified(self) -> None:
        shards = self._state.shards.values()
        for shard in shards:
            task = shard.tasks.verification
            failed = task is not None and task.done() and not shard.verified
            if (task is None or failed) and shard.segment is not None:
                # A fetcher was lost three times: another may live by now.
                self.verify(shard)
        tasks = [shard.tasks.verification for shard in shards if shard.tasks.verification]
        await asyncio.wait(tasks)
        check_open(self._state)
        for task in tasks:
            task.result()

    def _proceed(self) -> None:
        state = self._state
        # Without a count, a sum or a commit there may be shards of which nothing came yet.
        if not (state.shard_count or state.request.total_bytes) or state.error is not None:
            return
        if all(shard.found is not None for shard in state.shards.values()) and not missing(state):
            self._seal()

    def _seal(self) -> asyncio.Task[Manifest]:
        """Return the task that makes the manifest, once; its content does not change any more."""
        tasks = self._lifecycle.tasks
        if tasks.sealing is None:
            # The commit asks for its outcome, if there is one.
            tasks.sealing = start_task(self._stage())
        return tasks.sealing

    async def _stage(self) -> Manifest:
        state = self._state
        what = f"sealing version {state.record.version}"
        try:
            manifest = await self._run(self._manifest(), what, _PASSING)
        except WeightSyncError as error:
            if error.reason in _PASSING:
                # The next commit tries again.
                self._lifecycle.tasks.sealing = None
            raise
        if state.existing is None and state.error is None:
            self._model.table.staged(state.record, manifest)
        return manifest

    async def _manifest(self) -> Manifest:
        state = self._state
        ordered = [state.shards[index] for index in sorted(state.shards)]
        found = [digest for shard in ordered for digest in shard.found or ()]
        await failpoints.reach("commit.seal")
        if state.known is not None:
            layout = state.known.layout
        else:
            layout = await asyncio.to_thread(
                check_version,
                [shard.entry for shard in ordered],
                [shard.tensors or () for shard in ordered],
            )
        if state.delta is not None:
            return await state.delta.build(Manifest(layout, tuple(found)))
        return await self._model.commits.seal(layout, found)


class Checkpointer:
    """Makes the shards of one push durable, as far as they came. It raises what goes wrong."""

    def __init__(
        self, reservation: PushReservation, fetch: FetchApi, limits: PushSettings, meters: Meters
    ) -> None:
        self._reservation = reservation
        self._fetch = fetch
        self._limits = limits
        self._meters = meters

    def set_watermark(self, shard: ShardState) -> None:
        """Set the number of received bytes at which it is worth it again, of a shard's file."""
        if (file := shard.file) is None:
            return
        if not shard.headed:
            file.watermark = shard.entry.data_start
        elif not self._reservation.in_parts:
            file.watermark = file.size
        else:
            file.watermark = min(file.received + self._limits.keep_bytes, file.size)

    def lags(self, shard: ShardState) -> bool:
        """Whether so much is not durable yet that a crash would lose too much."""
        if not self._reservation.in_parts:
            return False
        lag = shard.received - shard.durable_bytes
        return lag > self._limits.loss_bytes - self._limits.keep_bytes

    async def catch_up(self, shard: ShardState, segment: Segment) -> None:
        """Make durable what came of an incomplete shard, where it is worth it."""
        least = self._limits.keep_bytes
        if not self._reservation.in_parts:
            return
        while shard.received - shard.durable_bytes >= least and not shard.complete:
            await self._step(shard, segment)

    async def finish(self, shard: ShardState, segment: Segment) -> None:
        if shard.tasks.checkpoint is not None:
            await asyncio.wait([shard.tasks.checkpoint])
        while shard.durable_bytes < shard.entry.size:
            await self._step(shard, segment)

    async def save(self, shard: ShardState) -> None:
        """Make all that came of a shard durable; what cannot be made so is logged."""
        segment = shard.segment
        if segment is None or not shard.headed:
            return
        if not (self._reservation.in_parts or shard.complete):
            return
        try:
            while shard.durable_bytes < shard.received:
                await self._step(shard, segment)
        except WeightSyncError as error:
            durable = shard.durable_bytes
            logger.warning("shard %d is kept up to byte %d: %s", shard.index, durable, error)

    async def _step(self, shard: ShardState, segment: Segment) -> None:
        target = self._reservation.target(shard)
        if target is None:
            raise WeightSyncError(Reason.FAULT, "this store keeps no shards; use another store")
        with translate_os_errors(f"keeping shard {shard.index}"):
            await failpoints.reach("receive.keep")
        begin, end, started = shard.durable_bytes, shard.received, time.perf_counter()
        await self._fetch.keep(segment, shard.entry, begin, end, target)
        shard.durable_bytes = end
        if begin == 0:
            # The first bytes reserve the whole file.
            self._reservation.disk.wrote(shard.entry.size)
        self._meters.observe_phase("persist", time.perf_counter() - started)
