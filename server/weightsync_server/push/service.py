"""All pushes of the server: begun, found again, committed, dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import about
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.ops import traces
from weightsync_server.ops.metrics import Meters
from weightsync_server.ops.tasks import start_task
from weightsync_server.push.commit import check_complete, commit, meet
from weightsync_server.push.lifecycle import FATAL
from weightsync_server.push.opening import PushFactory, base_of, start
from weightsync_server.push.probes import take_probes
from weightsync_server.push.progress import missing, progress, status
from weightsync_server.push.push_index import PushIndex, check_same_push
from weightsync_server.push.reservation import CallerShares
from weightsync_server.push.resume import RecoveredPushes, loaded, resume
from weightsync_server.push.sources.grpc_stream import UploadStream
from weightsync_server.push.sources.remote_stream import DistantStream, RemoteStream
from weightsync_server.push.state import Phase, check_open
from weightsync_server.push.validation import check_begin, check_digest, refused
from weightsync_server.push.writers import MAX_REASON_CHARS

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.messages import Message
    from weightsync_server.push.parts import Push
    from weightsync_server.push.push_settings import PushSettings


class PushService:
    """The pushes of one model. A push that is not committed leaves nothing behind.

    `spans` makes a span of each; None: nobody traces them.
    """

    def __init__(
        self,
        model: Model,
        *,
        limits: PushSettings,
        meters: Meters,
        spans: traces.SpanMaker | None = None,
    ) -> None:
        self.limits = limits
        self.meters = meters
        self._spans = spans
        self._model = model
        self._factory = PushFactory(model, limits, meters, self._end)
        self._recovered = RecoveredPushes(model, self._factory)
        self._index = PushIndex(
            model.table, self._recovered, limits.remembered, limits.writer_timeout_s
        )
        self._open = self._index.open
        self._shares = CallerShares(limits.max_pushes)
        self._shut = False
        model.epochs.observe(self._refuse_stale)

    async def restore(self) -> None:
        """Take up the pushes of an earlier life of the server. Call it before any other call.

        Open ones sleep until they are asked for, or have been idle for too long.
        """
        for push in await self._recovered.open():
            self._open[push.state.id] = push

    async def close(self) -> None:
        """End every open push; commits under way are finished first. What is kept can go on."""
        self._shut = True
        for push in list(self._open.values()):
            if push.lifecycle.tasks.committing is not None:
                await asyncio.wait([push.lifecycle.tasks.committing])
            push.lifecycle.fail(
                WeightSyncError(
                    Reason.SHUTTING_DOWN, "the server is shutting down; push to it again later"
                ),
                "aborted",
            )
            await push.lifecycle.closed()

    # The calls

    async def begin(
        self, request: pb.BeginPushRequest, deadline_s: float | None, who: str = ""
    ) -> pb.BeginPushResponse:
        """Open a push, or join the one with the same idempotency key; a refusal changes nothing.

        `deadline_s` is the time left to the call, or None. Each caller `who` has its share of the
        pushes.
        """
        push = await self.open(request, deadline_s, who)
        response = pb.BeginPushResponse(
            push_id=push.state.id,
            version=push.state.record.version,
            epoch=push.state.record.epoch,
            shards=progress(push.state, request.writer),
            max_chunk_bytes=self.limits.max_chunk_bytes,
            layout_known=_layout_known(push, request),
        )
        if push.state.committed is not None:
            response.committed.CopyFrom(push.lifecycle.again())
        elif (delta := push.state.delta) is not None and push.state.request.partial:
            response.base_version = delta.base.version
            response.base_content_digest = delta.base.content_digest
        return response

    async def stream(
        self,
        requests: AsyncIterator[Message] | RemoteStream,
        deadline_s: float | None = None,
        who: str = "",
    ) -> pb.PushWeightsResponse:
        """Serve one PushWeights stream; unless its data is wrong, the push stays open."""
        if isinstance(requests, RemoteStream):
            return await DistantStream(self, requests, deadline_s, who).run()
        return await UploadStream(self, requests, deadline_s, who).run()

    async def commit(self, request: pb.CommitPushRequest) -> pb.CommitPushResponse:
        """Wait until every shard is verified and durable, then make the version exist."""
        return await self.commit_push(self.find(request.push_id), request)

    async def abort(self, request: pb.AbortPushRequest) -> pb.AbortPushResponse:
        """Drop a push that is not committed, live or in an apply; its slot is free on return."""
        push = self.find(request.push_id)
        self._refuse_used(push)
        if push.lifecycle.tasks.committing is not None:
            await asyncio.wait([push.lifecycle.tasks.committing])
        if push.state.committed is not None:
            raise WeightSyncError(
                Reason.VERSION_IN_USE,
                f"the push is committed as version {push.state.record.version}; delete that "
                "instead",
            )
        self._refuse_used(push)
        push.state.writers.check(request.writer)
        # It is mostly begun again at once, in another way, by the same client.
        said = f", saying {request.reason[:MAX_REASON_CHARS]!r}" if request.reason else ""
        why = push.state.writers.given_up(request)
        push.lifecycle.fail(why, "aborted", f"its client aborted it{said}")
        await push.lifecycle.closed()
        return pb.AbortPushResponse()

    def get(self, request: pb.GetPushRequest) -> pb.GetPushResponse:
        push = self.find(request.push_id)
        push.lifecycle.touch()
        response = pb.GetPushResponse(
            model=self._model.table.name,
            version=push.state.record.version,
            durability=pb.DURABILITY_RECEIVING,
            shards=progress(push.state, request.writer),
        )
        if push.state.committed is not None:
            response.durability = pb.DURABILITY_COMMITTED
        elif push.state.error is not None:
            response.durability = pb.DURABILITY_FAILED
            response.error = push.state.error.message
        return response

    def status(self) -> list[pb.PushStatus]:
        return [status(push.state) for push in self._open.values()]

    def overdue(self) -> Iterator[str]:
        """Yield a sentence for every push that nobody goes on with and that should be gone."""
        now = asyncio.get_running_loop().time()
        for push in self._open.values():
            if push.state.streams or push.lifecycle.phase in (Phase.OPENING, Phase.FAILED):
                continue
            if push.lifecycle.until < now:
                yield (
                    f"the push of version {push.state.record.version} is still open although it "
                    "is idle"
                )

    # For streams

    def find(self, push_id: str) -> Push:
        """Return a push that is open, ended lately, or brought a version that exists."""
        push = self._index.find(push_id)
        if push is None:
            raise WeightSyncError(
                Reason.PUSH_UNKNOWN,
                "no push with this id: it ended long ago, or the server restarted and its store "
                "keeps none; see in ListVersions whether it is committed, else begin it again",
            )
        self._trace(push)
        return push

    async def open(
        self,
        request: pb.BeginPushRequest,
        deadline_s: float | None,
        who: str = "",
        *,
        backfill: bool = False,
    ) -> Push:
        """Return the push that a begin opens or joins; it has its slot.

        See `begin`, and `VersionRecord` for `backfill`.
        """
        check_begin(request, self.limits)
        if self._shut:
            raise WeightSyncError(
                Reason.SHUTTING_DOWN, "the server is shutting down; push to it again later"
            )
        await failpoints.reach("receive.begin")
        self._check_model(request.model)
        self._model.epochs.check(request.epoch)
        await self._settled(request.version)
        await self._model.epochs.settle()
        push = await self._joined(request, deadline_s, who)
        if push is None:
            # No await between here and the entry in _open, nor since it was looked for: of two
            # pushes of a version, or of a key, one is open.
            epoch = self._model.epochs.check(request.epoch)
            if not request.writer:
                self._model.runs.check(request.client_run, request.epoch)
            push = self._create(request, epoch, who, backfill=backfill)
            push.state.writers.come(request.writer)
            await start(push, deadline_s)
        elif push.state.committed is None:
            await self._take_run(push, request)
        if push.state.writers.several and request.kind == pb.PUSH_KIND_DELTA:
            await push.bases.take(request)
        push.lifecycle.touch()
        return push

    async def commit_push(self, push: Push, request: pb.CommitPushRequest) -> pb.CommitPushResponse:
        """Commit one push, once, whoever asks how often."""
        check_digest("content_digest", request.content_digest)
        check_open(push.state)
        alone = not push.state.writers.several
        if push.state.delta is not None and alone and not request.content_digest:
            raise refused("the commit of a delta needs content_digest, that of the new version")
        if push.state.committed is not None:
            self._check_same(push.state.committed, request)
            return push.lifecycle.again()
        self._model.epochs.check(push.state.record.epoch)
        push.state.writers.check(request.writer)
        take_probes(push.state, request)
        push.state.cast_tensors = max(push.state.cast_tensors, request.cast_tensors)
        await meet(push, request)
        if push.lifecycle.tasks.committing is None:
            await resume(push)
            # Until it is known what is missing it stays awake.
            with push.lifecycle.awaited():
                await loaded(push)
        if push.lifecycle.tasks.committing is None:
            check_complete(push, request.shard_count)
            # From here on no shard is added.
            push.layout.finish()
            # Whoever asked may have left: the push remembers how it ended.
            with about(**push.state.facts):
                push.lifecycle.tasks.committing = start_task(commit(push, request.content_digest))
        try:
            response = await asyncio.shield(push.lifecycle.tasks.committing)
        except WeightSyncError:
            # Whoever is told that it failed finds its slot free and nothing left in the store.
            await push.lifecycle.closed()
            raise
        self._check_same(response, request)
        return response

    async def give_up(self, record: VersionRecord, error: WeightSyncError) -> None:
        """Give up a version that a trainer has written into an engine's memory.

        What is committed stays; repeating the call is harmless.
        """
        in_place = record.end_in_place()
        if in_place is None:
            return
        push = self._index.with_key(in_place.key)
        if push is None:
            if record.commit is None:
                await self._model.orphans.drop(record)
        else:
            push.lifecycle.fail(error)
            # Its commit waits for a proof that does not come.
            in_place.decide()
            await push.lifecycle.closed()

    # Inside

    def _check_model(self, name: str) -> None:
        if name != self._model.table.name:
            raise WeightSyncError(
                Reason.MODEL_UNKNOWN,
                f"no model {name[:128]!r} here; configured: {self._model.table.name}",
            )

    async def _joined(
        self, request: pb.BeginPushRequest, deadline_s: float | None, who: str
    ) -> Push | None:
        if not request.idempotency_key:
            return None
        push = self._index.with_key(request.idempotency_key)
        if push is None and request.writers > 1:
            failed = self._index.failed_with(request.idempotency_key, request.writer)
            if failed is not None:
                # All writers are told of each push that fails, so that they stay in step.
                check_open(failed.state)
        if push is not None:
            in_place = push.state.record.in_place
            if in_place and not in_place.may_come_from(who, request.idempotency_key):
                raise _unsettled(push.state.record.version, _IN_PLACE, "committed")
            await self._refuse_other(push, request)
            push.state.writers.come(request.writer)
            self._trace(push)
            await resume(push, deadline_s)
        return push

    async def _refuse_other(self, push: Push, request: pb.BeginPushRequest) -> None:
        try:
            check_same_push(push, request)
        except WeightSyncError as error:
            if error.reason in FATAL and push.state.writers.several:
                push.lifecycle.fail(error)
                await push.lifecycle.closed()
            raise

    async def _take_run(self, push: Push, request: pb.BeginPushRequest) -> None:
        """Take note of the run of a caller that joins; the first of several writers has a say."""
        if push.state.writers.several and not request.writer:
            try:
                self._model.runs.check(request.client_run, request.epoch)
            except WeightSyncError as error:
                push.lifecycle.fail(error)
                await push.lifecycle.closed()
                raise
        self._model.runs.take(push.state.record, request)

    async def _settled(self, version: int) -> None:
        for push in list(self._open.values()):
            if push.state.record.version == version and push.state.error:
                await push.lifecycle.closed()

    def _create(
        self, request: pb.BeginPushRequest, epoch: int, who: str, *, backfill: bool
    ) -> Push:
        self._shares.check(who, sum(push.state.caller == who for push in self._open.values()))
        if len(self._open) >= self.limits.max_pushes:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"{len(self._open)} pushes are open, the most there may be; commit or abort one, "
                "or raise max_pushes",
                retry_after_s=1.0,
            )
        table = self._model.table
        version = request.version or table.next_version()
        live = self._in_place(version, who, request.idempotency_key)
        existing = None if live is not None else self._existing(version, backfill=backfill)
        base = base_of(self._model, request)
        record = live or VersionRecord(request.model, version)
        record.begin_push(epoch, request.metadata, backfill=backfill)
        self._model.runs.take(record, request)
        push = self._factory.make(record, request, who, existing=existing, base=base)
        if request.fallback_reason:
            # The next push of this trainer will be a delta.
            self.meters.count_fallback(request.fallback_reason)
            self._model.fetch.warm()
        self._open[push.state.id] = push
        self._trace(push)
        if existing is None:
            record.wait_for(partial(missing, push.state))
            table.add(record)
        return push

    def _trace(self, push: Push) -> None:
        """Have a push be traced from now on, and the call that has asked for it in its trace."""
        if self._spans is None or push.lifecycle.ended:
            return
        state = push.state
        if state.work is None:
            state.work = traces.Work(self._spans, "push", traces.caller())
            # What an earlier life of the server had traced of it goes on.
            state.record.name_trace(state.work.concern(state.record.traceparent))
        state.work.join()

    def _in_place(self, version: int, who: str, key: str) -> VersionRecord | None:
        """Return what a trainer has written into an engine's memory, if it is this one's push."""
        record = self._model.table.find(version)
        if record is None or record.durability != pb.DURABILITY_RECEIVING:
            return None
        return record if record.in_place and record.in_place.may_come_from(who, key) else None

    def _existing(self, version: int, *, backfill: bool) -> VersionRecord | None:
        """Return the version that a push would repeat, if it may be opened at all."""
        for push in self._open.values():
            if push.state.record.version == version:
                raise WeightSyncError(
                    Reason.PUSH_ABORTED,
                    f"version {version} is being pushed already; join that push by its idempotency "
                    "key or its id, abort it, or push another version",
                    metadata={"push_id": push.state.id},
                    retry_after_s=1.0,
                )
        table = self._model.table
        highest, existing = table.highest, table.find(version)
        if existing is not None and existing.commit is None and not existing.orphaned:
            dropped = existing.durability == pb.DURABILITY_FAILED
            if dropped and not backfill and version <= highest:
                # No number is used twice; one that nothing has used comes free.
                raise table.not_above(version)
            # No push brings it, or it had been found above.
            state, end = "becoming the engine's checkpoint", "committed"
            if dropped:
                state, end = "being dropped, for its push failed", "gone"
            elif existing.in_place:
                state = _IN_PLACE
            raise _unsettled(version, state, end)
        if version > highest:
            if version - highest > self.limits.max_version_jump:
                raise WeightSyncError(
                    Reason.VERSION_JUMP,
                    f"version {version} is over {self.limits.max_version_jump} above {highest}; "
                    "choose a lower one, or raise max_version_jump",
                    metadata={"newest_version": str(highest)},
                )
            return existing
        if backfill or (existing is not None and existing.commit is not None):
            return existing
        raise table.not_above(version)

    def _refuse_used(self, push: Push) -> None:
        record = push.state.record
        use = "" if push.lifecycle.ended else self._model.orphans.use(record)
        if use:
            raise WeightSyncError(
                Reason.VERSION_IN_USE,
                f"version {record.version} was applied before it was durable and is {use}",
                metadata={"version": str(record.version)},
            )

    def _check_same(self, response: pb.CommitPushResponse, request: pb.CommitPushRequest) -> None:
        if request.content_digest not in ("", response.content_digest):
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"version {response.version} is committed with content {response.content_digest}, "
                f"not {request.content_digest}; push it as a higher version",
            )

    def _refuse_stale(self) -> None:
        epochs = self._model.epochs
        for push in list(self._open.values()):
            if push.state.record.epoch != epochs.newest:
                push.lifecycle.fail(epochs.stale(push.state.record.epoch))

    def _end(self, push: Push) -> None:
        self._index.end(push)


_IN_PLACE = "becoming what a trainer writes in place"


def _unsettled(version: int, state: str, end: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.PUSH_ABORTED,
        f"version {version} is {state}; push another version, or retry when that is {end}",
        metadata={"version": str(version)},
        retry_after_s=1.0,
    )


def _layout_known(push: Push, request: pb.BeginPushRequest) -> bool:
    known = push.state.known
    if not push.state.writers.several or known is None:
        return known is not None
    # One whose layout is another sends it, and is told what differs.
    return known.layout.digest == request.layout_digest
