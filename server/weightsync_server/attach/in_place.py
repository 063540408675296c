"""Transactions: a trainer writes the live parameters of an engine that stands still for it.

    nobody can write, by the ranks' word -> INTENT of the version before -> pause
    -> every rank unproved -> the trainer, and nobody else, can write, and writes
    -> nobody can write -> every rank digests, replicas agree
    -> resume: live, in the engine's memory alone
    -> pushed, INTENT, every rank compared with that and its digests
    -> the push is committed, and the trainer knows it -> a version like any other

Whatever goes wrong on the way: pause, nobody can write, the version before on every rank, verify,
resume; else fence.
The engine has one owner to the end of it, so that nothing else is applied meanwhile.

One file: each step of a transaction is followed by what undoes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Never

from weightsync import failpoints
from weightsync.engine import BETWEEN_STEPS, OpenApply, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import about, event
from weightsync.v1 import attach_pb2 as pb
from weightsync.v1 import weightsync_pb2
from weightsync_server.attach.attachments import (
    Attachment,
    OpenBlocks,
    check_attachable,
    hand_out,
)
from weightsync_server.auth.caller import for_people
from weightsync_server.catalog.in_place_push import InPlacePush
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine import EngineApplier, EngineContext, replies
from weightsync_server.engine.apply_history import note_reports
from weightsync_server.engine.block_writers import still_writing, wait_let_go
from weightsync_server.engine.engine_participant import live_version
from weightsync_server.engine.journal import Answer
from weightsync_server.engine.outcome import (
    ApplyCause,
    CutoverPlan,
    CutoverResult,
    Pause,
    PreparedVersion,
)
from weightsync_server.engine.ranks import QUICK_S
from weightsync_server.engine.reconcile import write_down
from weightsync_server.engine.refusals import duration, pause_spec
from weightsync_server.engine.session import EngineSession
from weightsync_server.engine.worker_reports import RankCommit, Report
from weightsync_server.model import Model
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import cancel_tasks

logger = logging.getLogger(__name__)


#: Lets nothing become of a version that is not committed, nor of its push.
GiveUp = Callable[[VersionRecord, WeightSyncError], Awaitable[None]]


async def delete_uncounted(model: Model, record: VersionRecord) -> None:
    """Have nobody take for the newest what was pushed and did not count; repeatable."""
    if record.commit is None:
        return
    try:
        await model.collector.delete(record.version, force=True)
    except WeightSyncError as error:
        if error.reason is Reason.VERSION_UNKNOWN:
            return
        logger.warning(
            "version %d was undone but could not be removed: %s", record.version, error.message
        )
        await model.serving.reject(record.version, "a transaction that was undone")


def check_agreed(ranks: Sequence[RankCommit], name: str) -> None:
    """Accept what ranks have digested, each of which must call its content `name` now.

    DATA_CORRUPT: a rank did not do it, or two hold other bytes of one part.
    """
    first: dict[str, RankCommit] = {}
    for rank in ranks:
        if rank.error or rank.content_digest != name:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"rank {rank.rank} did not digest what was written ({rank.error or 'no answer'})",
            )
        for part, digest in rank.parts.items():
            other = first.setdefault(part, rank)
            if other.parts[part] != digest:
                raise WeightSyncError(
                    Reason.DATA_CORRUPT,
                    f"ranks {other.rank} and {rank.rank} hold different bytes of the same part of "
                    f"{part.split(' ')[0]}; write every place of a tensor, as `write` does",
                )


class TransactionStream:
    """Both directions of one WriteInPlace; `steps` come from the trainer once it has begun.

    Of what the trainer says one message at most is kept until `step` has heard it. `over` says why
    the transaction comes to nothing; "": nothing is known against it.
    """

    def __init__(self, steps: AsyncIterator[pb.WriteInPlaceRequest]) -> None:
        # The last one is the error for which nothing more is heard.
        self._received: asyncio.Queue[pb.WriteInPlaceRequest | WeightSyncError | str] = (
            asyncio.Queue()
        )
        self._heard = asyncio.Semaphore(1)
        self.over = ""
        self._answers: asyncio.Queue[pb.WriteInPlaceResponse | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(steps))

    def send(self, answer: pb.WriteInPlaceResponse) -> None:
        self._answers.put_nowait(answer)

    def end(self) -> None:
        self._answers.put_nowait(None)

    async def answers(self) -> AsyncIterator[pb.WriteInPlaceResponse]:
        while (answer := await self._answers.get()) is not None:
            yield answer

    def break_off(self, why: str) -> None:
        """Have `step` raise with a reason, after the message that it has not heard yet.

        This is kept for the next step where none is awaited now.
        """
        if not self.over:
            self.over = why
            self._received.put_nowait(abandoned(why))

    def note_pushed(self) -> None:
        """Have `step` return for "pushed", once: its push is here, and asks for its commit."""
        self._received.put_nowait("pushed")

    async def step(self, wanted: str, lease_s: float, longest_s: float, late: str) -> None:
        """Return when the trainer has done something; APPLY_RESTORED: it has not, and will not.

        `wanted` is what the trainer is to do, as the messages of the proto call it, or "pushed".
        It may be silent for `lease_s`, and take `longest_s` in all, however often it says that it
        is at work; `late` is said after that.
        """
        try:
            async with asyncio.timeout(longest_s):
                while (said := await self._said(lease_s)) == "renew":
                    pass
        except TimeoutError:
            raise abandoned(late) from None
        if said != wanted:
            raise abandoned(_ENDS.get(said) or f"the trainer said {said!r}, not {wanted!r}")

    async def _said(self, lease_s: float) -> str:
        try:
            async with asyncio.timeout(lease_s):
                step = await self._received.get()
        except TimeoutError:
            raise abandoned(
                f"the trainer sent no heartbeat for {lease_s:g} s; raise its lease"
            ) from None
        if isinstance(step, WeightSyncError):
            raise step
        if isinstance(step, str):
            return step
        self._heard.release()
        return step.WhichOneof("step") or ""

    async def close(self) -> None:
        """Take note that the trainer says nothing more."""
        self.break_off(_GONE)
        # Nobody else may end the stream while it is read.
        await cancel_tasks(self._reading)

    async def _read(self, steps: AsyncIterator[pb.WriteInPlaceRequest]) -> None:
        # However it ends, the trainer says nothing more.
        with contextlib.suppress(Exception):
            async for step in steps:
                # A trainer that says more than is heard waits.
                await self._heard.acquire()
                self._received.put_nowait(step)
        self.break_off(_GONE)


def abandoned(why: str) -> WeightSyncError:
    """Return the error of a transaction that comes to nothing."""
    return WeightSyncError(Reason.APPLY_RESTORED, why)


_GONE = "the trainer has exited"
_ENDS = {
    "abort": "the trainer withdrew it",
    "begin": "begin was sent while it was open; begin once",
    "copied": "copied was sent before the push was committed; commit it first",
}


#: For the push of what is live, however often the trainer renews its lease, seconds. Applies wait
#: that long; 1 TB by a path of 300 MB/s takes less.
_PUSH_S = 3600.0


@dataclass(frozen=True)
class InPlaceOrder:
    """What a trainer begins with: its base version, and how long it may be silent.

    `who` is the caller. With `keyed` it is told a key for its push; an older release names the
    transaction's id, which others know, so that the push is taken from the same caller alone.
    """

    base: int
    spec: PauseSpec
    lease_s: float
    who: str = ""
    keyed: bool = True


class InPlace:
    """One transaction on one engine, by the `attachment` through which `trainer` has the memory."""

    def __init__(
        self,
        applier: EngineApplier,
        context: EngineContext,
        blocks: OpenBlocks,
        order: InPlaceOrder,
        trainer: TransactionStream,
        attachment: Attachment,
        give_up: GiveUp,
    ) -> None:
        self.id = secrets.token_hex(8)
        self._applier, self._supervisor = applier, applier.supervisor
        self._context, self._order = context, order
        self._trainer, self._give_up = trainer, give_up
        self._blocks, self._attachment = blocks, attachment
        self._unguarded = False

    @cached_property
    def _push(self) -> InPlacePush:
        order = self._order
        key, who = (secrets.token_hex(16), "") if order.keyed else (self.id, order.who)
        return InPlacePush(key, who, self._trainer.note_pushed)

    async def run(self) -> weightsync_pb2.ApplyReport:
        """Return when the engine generates on what was written, pushed and proved on every rank.

        Raises:
            WeightSyncError: VERSION_CONFLICT, ENGINE_REFUSED and why nothing can be done with the
                engine now: nothing was paused. APPLY_RESTORED: it generates on the version before.
                ENGINE_FENCED, ENGINE_AWAY: it stands still until its ranks have been asked.
        """
        with self._supervisor.checks.writing(self._attachment, self._trainer.break_off):
            async with self._supervisor.exclusive(self.id, proof_s=0.0) as session:
                if self._attachment.engine_id == session.info.engine_id:
                    return await self._run(session)
        # Said in there, it would be this engine that is away.
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            "attach again: the engine restarted, and this attachment has the memory of the "
            "old process",
        )

    async def _run(self, session: EngineSession) -> weightsync_pb2.ApplyReport:
        base = live_version(session)
        self._check(session, base)
        await self._check_writers(session)
        self._check_wanted()
        with translate_os_errors("the transaction"):
            # Whatever the ranks hold after a crash, it is this that is placed.
            await self._supervisor.journal.intent_to_place(base)
        try:
            return await self._begun(session, base)
        except WeightSyncError as error:
            # As of applies: who looks at how it ended knows that it was begun.
            error.metadata["apply_id"] = self.id
            raise

    async def _begun(
        self, session: EngineSession, base: PreparedVersion
    ) -> weightsync_pb2.ApplyReport:
        await failpoints.reach("in_place.begin")
        async with self._block(session, base), self._paused(session, base) as pause:
            record, result = await self._written(session, base, pause)
        try:
            plan = await self._copied(session, base, record)
        except (WeightSyncError, OSError) as error:
            await self._go_back(session, base, record, error)
        return await self._served(session, plan, result)

    def _check(self, session: EngineSession, base: PreparedVersion) -> None:
        if fleet := self._context.fleet:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                f"this host is a member of fleet {fleet}, which decides what it serves; train "
                "beside an engine that is in no fleet, and push the result",
            )
        check_attachable(session)
        session.check_fences()
        if self._order.spec.mode == BETWEEN_STEPS:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                "use pause mode KEEP, WAIT or ABORT: the engine is paused while it is written",
            )
        live = base.record.version
        if live != self._order.base:
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"version {live} is live, but the update was computed on version "
                f"{self._order.base}; attach again and begin with the live version",
            )

    def _check_wanted(self) -> None:
        """Refuse what came to nothing while it waited for the engine."""
        if why := self._trainer.over:
            raise WeightSyncError(
                Reason.APPLY_BUSY, f"begin again; nothing was started or paused: {why}"
            )

    async def _check_writers(self, session: EngineSession) -> None:
        states = await session.states()
        if still_writing(states) and (why := await wait_let_go(session)):
            raise WeightSyncError(Reason.ENGINE_REFUSED, why)
        # A rank of an older release, which knows nobody, guards nothing.
        self._unguarded = any(state.unguarded or state.holders is None for state in states)

    @contextlib.asynccontextmanager
    async def _block(self, session: EngineSession, base: PreparedVersion) -> AsyncIterator[None]:
        """Have what the trainer writes with ready before the pause; nobody is given it yet."""
        if not self._attachment.guarded:
            yield
            return
        found = await hand_out(session, base, "write")
        self._blocks.keep(self.id, self._attachment, found)
        try:
            yield
        finally:
            self._blocks.close(self.id)

    def _paused(
        self, session: EngineSession, base: PreparedVersion
    ) -> contextlib.AbstractAsyncContextManager[Pause]:
        version = base.record.version
        return session.paused(self._order.spec, OpenApply(self.id, version, version))

    # Live in the engine's memory.

    async def _written(
        self, session: EngineSession, base: PreparedVersion, pause: Pause
    ) -> tuple[VersionRecord, CutoverResult]:
        """Return what the engine generates with when the trainer has written."""
        record: VersionRecord | None = None
        try:
            await self._check_base(session, base)
            await session.ranks.unprove(QUICK_S)
            await failpoints.reach("in_place.begun")
            await self._let_write()
            began = time.perf_counter()
            record = await self._context.model.table.add_in_place(self._push)
            ranks = await self._digested(session, base)
            await failpoints.reach("in_place.resume")
        except (WeightSyncError, OSError) as error:
            await self._put_back(session, base, record, error)
        result = CutoverResult(pause.mode, pause.seconds, 0.0, 0.0, ranks=ranks)
        result.verify_s = time.perf_counter() - began
        await self._generate(session, base, record)
        result.paused_s = time.perf_counter() - pause.began
        result.resume_s = result.paused_s - (began + result.verify_s - pause.began)
        await self._show(session, record, result)
        return record, result

    async def _check_base(self, session: EngineSession, base: PreparedVersion) -> None:
        """Find what was written before the block, which must not count as written in it.

        Where nobody could write, by the kernel's word, nothing was.
        """
        if self._unguarded:
            timeout_s = self._context.limits.commit_timeout_s
            reports = await session.ranks.verify(base.apply_id, timeout_s, quick=True)
            if any(report.proved is False for report in reports):
                self._context.metrics.violate("never_mixed")
            _check_proved(base.record.version, reports)

    async def _let_write(self) -> None:
        """Return when the trainer has written, and nobody is given anything to write with."""
        line, longest_s = self._trainer, self._context.limits.in_place_pause_s
        if line.over:
            raise abandoned(line.over)
        late = (
            "compute before the block and only write in it: the engine has been paused for "
            f"{longest_s:g} s, the limit of --in-place-pause-s"
        )
        try:
            self._blocks.open(self.id)
            begun = pb.InPlaceBegun(transaction_id=self.id)
            line.send(pb.WriteInPlaceResponse(begun=begun))
            await line.step("commit", self._order.lease_s, longest_s, late)
        finally:
            self._blocks.close(self.id)

    async def _let_go(self, session: EngineSession, why: str) -> None:
        """Return when nobody can write what is put back; ENGINE_FENCED: somebody still can."""
        self._blocks.close(self.id)
        if self._attachment.guarded:
            revoked = pb.InPlaceRevoked(reason=why)
            self._trainer.send(pb.WriteInPlaceResponse(revoked=revoked))
        if left := await wait_let_go(session):
            await session.engine.fence(left)
            self._supervisor.suspect(left)
            raise WeightSyncError(Reason.ENGINE_FENCED, f"{left} ({why})")

    async def _digested(self, session: EngineSession, base: PreparedVersion) -> list[RankCommit]:
        await failpoints.reach("in_place.commit")
        timeout_s = self._context.limits.commit_timeout_s
        ranks = await session.ranks.digest(base.apply_id, self._name, timeout_s)
        if self._attachment.guarded and any(one.writing for one in ranks):
            # A child that was forked in the block closes what it has got a moment later.
            await wait_let_go(session)
            ranks = await session.ranks.digest(base.apply_id, self._name, timeout_s)
        if self._attachment.guarded and (late := [one.rank for one in ranks if one.writing]):
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"the memory of rank {', '.join(late)} can still be written through a mapping or "
                "descriptor that was opened in the block; open none, and write only inside the "
                "block",
            )
        check_agreed(ranks, self._name)
        return ranks

    @property
    def _name(self) -> str:
        """By which ranks know what has no content digest yet."""
        return f"in place {self.id}"

    async def _generate(
        self, session: EngineSession, base: PreparedVersion, record: VersionRecord
    ) -> None:
        session.in_place = record.version, self._name
        try:
            await session.resume_on(*session.in_place)
        except WeightSyncError as error:
            await self._drop(base, record, error)
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"the resume on what was written was not confirmed ({error.message}); the server "
                "asks every rank which version it holds; see GetStatus for what the engine serves",
                retry_after_s=1.0,
            ) from error

    async def _show(
        self, session: EngineSession, record: VersionRecord, result: CutoverResult
    ) -> None:
        version = record.version
        for phase in ("pause", "verify", "resume", "paused"):
            self._context.metrics.observe_phase(phase, getattr(result, f"{phase}_s"))
        self._supervisor.show_in_place(version, session.ranks.names)
        logger.info(
            "transaction %s: version %d is live, and not pushed",
            self.id,
            version,
            extra=event("in_place.live", version=version),
        )
        await failpoints.reach("in_place.live")
        key, paused = self._push.key, duration(result.paused_s)
        live = pb.InPlaceLive(version=version, paused=paused, push_key=key)
        self._trainer.send(pb.WriteInPlaceResponse(live=live))

    # A version like any other.

    async def _copied(
        self, session: EngineSession, base: PreparedVersion, record: VersionRecord
    ) -> CutoverPlan:
        """Return when every rank is proved to hold what was pushed, which is committed then."""
        late = f"what was written was not pushed within {_PUSH_S:g} s; see why that push hangs"
        await self._trainer.step("pushed", self._order.lease_s, _PUSH_S, late)
        target = await self._applier.ready(
            session, base, record, None, durable=False, apply_id=self.id, to_write=False
        )
        plan = CutoverPlan(target, base, self._order.spec, ApplyCause())
        try:
            await self._supervisor.journal.intent(plan)
            await failpoints.reach("in_place.copied")
            await self._compared(session, record)
            await failpoints.reach("in_place.proved")
            # It generates with it, and knows it by another name.
            await self._supervisor.cutover(session).resume(target)
            self._push.decide()
            await self._trainer.step("copied", self._order.lease_s, _PUSH_S, late)
            if record.commit is None:
                raise abandoned(f"version {record.version} was not pushed")
            if not self._attachment.guarded:
                # It could be written since.
                await self._compared(session, record)
        except BaseException as error:
            self._supervisor.quarantine.release(target.lease, session.ranks, error)
            raise
        return plan

    async def _compared(self, session: EngineSession, record: VersionRecord) -> None:
        reports = await session.ranks.verify(self.id, self._context.limits.prepare_timeout_s)
        _check_proved(record.version, reports)

    async def _go_back(
        self,
        session: EngineSession,
        base: PreparedVersion,
        record: VersionRecord,
        error: WeightSyncError | OSError,
    ) -> Never:
        """Put the version before back into an engine that generates."""
        try:
            async with self._paused(session, base):
                await self._put_back(session, base, record, error)
        except WeightSyncError as failure:
            if failure.reason is not Reason.APPLY_RESTORED:
                # Whoever asks the ranks now is to place this, and not what they may hold.
                await self._drop(base, record, failure)
                self._supervisor.suspect(failure.message)
            raise

    async def _drop(
        self, base: PreparedVersion, record: VersionRecord, error: WeightSyncError
    ) -> None:
        """Have nobody serve, or apply, what did not count."""
        # Before a rank is written: the trainer may be reading what it pushes.
        await self._give_up(record, error)
        self._supervisor.served.set_live(base.record.version)
        await delete_uncounted(self._context.model, record)

    async def _put_back(
        self,
        session: EngineSession,
        base: PreparedVersion,
        record: VersionRecord | None,
        error: WeightSyncError | OSError,
    ) -> Never:
        version, why = base.record.version, str(error) or type(error).__name__
        logger.error(
            "transaction %s: version %d is being restored: %s",
            self.id,
            version,
            why,
            extra=event("in_place.restoring", version=version),
        )
        restored = WeightSyncError(
            Reason.APPLY_RESTORED,
            f"the transaction was undone, and version {version} was restored and verified on "
            f"every rank ({why}); compute the update again from it",
        )
        if record is not None:
            await self._drop(base, record, restored)
        await failpoints.reach("in_place.restore")
        await self._let_go(session, why)
        cutover = self._supervisor.cutover(session)
        await cutover.place(base)
        # No rank reads what was to be proved any more.
        self._supervisor.quarantine.answered()
        await cutover.resume(base)
        await write_down(self._supervisor.journal, self._context.model.serving, base)
        self._supervisor.show(base, whole=True)
        await session.hold(base)
        raise restored

    async def _served(
        self, session: EngineSession, plan: CutoverPlan, result: CutoverResult
    ) -> weightsync_pb2.ApplyReport:
        target = plan.target
        target.record.end_in_place()
        self._supervisor.served.set_live(target.record.version)
        await session.hold(target)
        self._supervisor.show(target, whole=True)
        version = target.record.version
        logger.info(
            "transaction %s: version %d is pushed and proved",
            self.id,
            version,
            extra=event("in_place.committed", version=version),
        )
        result.ranks = [replace(rank, content_digest=target.digest) for rank in result.ranks]
        report = replies.applied(plan, result)
        await self._supervisor.journal.done(plan, Answer())
        return report


def _check_proved(version: int, reports: Sequence[Report]) -> None:
    wrong = [report for report in reports if not report.proved]
    if wrong:
        names = sorted({name for report in wrong for name in report.mismatched})
        ranks = ", ".join(report.rank for report in wrong)
        raise WeightSyncError(
            Reason.DATA_CORRUPT,
            f"rank {ranks} holds something else of {', '.join(names[:10])} than version "
            f"{version}, or than when that version became live; write only inside a transaction",
        )


_LEASE_S = 60.0
_SHORTEST_S, _LONGEST_S = 0.1, 600.0


class InPlaceCalls:
    """Runs transactions to their end, whatever becomes of their callers."""

    def __init__(
        self,
        context: EngineContext,
        give_up: GiveUp,
        blocks: OpenBlocks,
    ) -> None:
        self._context, self._give_up, self._blocks = context, give_up, blocks
        self._transactions = context.metrics.counters(
            "weightsync_in_place_total",
            "Transactions in place by how they ended: committed, restored (the previous version "
            "was restored) or failed (the engine was fenced, or nothing was started).",
            "outcome",
            ("committed", "restored", "failed"),
        )
        self._running: set[asyncio.Task[weightsync_pb2.ApplyReport]] = set()

    async def run(
        self,
        applier: EngineApplier,
        order: InPlaceOrder,
        steps: AsyncIterator[pb.WriteInPlaceRequest],
        attachment: Attachment,
    ) -> AsyncGenerator[pb.WriteInPlaceResponse]:
        """Yield what becomes of a transaction; a caller that leaves has taken it back."""
        line = TransactionStream(steps)
        context, blocks = self._context, self._blocks
        work = InPlace(applier, context, blocks, order, line, attachment, self._give_up)
        with about(engine=applier.name, apply_id=work.id):
            recorded = self._recorded(work, applier.name, order)
            task = asyncio.create_task(recorded, name=f"in place {work.id}")
        self._running.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: line.end())
        try:
            async for answer in line.answers():
                yield answer
            committed = pb.InPlaceCommitted(report=await asyncio.shield(task))
            yield pb.WriteInPlaceResponse(committed=committed)
        finally:
            await line.close()

    async def _recorded(
        self, work: InPlace, engine: str, order: InPlaceOrder
    ) -> weightsync_pb2.ApplyReport:
        entry = weightsync_pb2.ApplyRecord(
            kind=weightsync_pb2.APPLY_KIND_IN_PLACE,
            requested_by=for_people(order.who),
            previous_version=order.base,
            engine=engine,
        )
        with self._context.history.recorded(entry):
            report = await work.run()
            note_reports(entry, {engine: report}, {})
        return report

    async def drain(self) -> None:
        """Wait for those that are open: their callers are gone by now."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[weightsync_pb2.ApplyReport]) -> None:
        self._running.discard(task)
        # Whoever still waits is told; it is no fault that nobody does.
        error = None if task.cancelled() else task.exception()
        restored = isinstance(error, WeightSyncError) and error.reason is Reason.APPLY_RESTORED
        done = "committed" if error is None and not task.cancelled() else "failed"
        self._transactions["restored" if restored else done].inc()


def read_order(begin: pb.BeginInPlace, who: str) -> InPlaceOrder:
    lease_s = begin.lease.ToNanoseconds() / 1e9 if begin.HasField("lease") else _LEASE_S
    if not _SHORTEST_S <= lease_s <= _LONGEST_S:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"lease must be {_SHORTEST_S:g} to {_LONGEST_S:g} s"
        )
    spec = pause_spec(begin.pause)
    return InPlaceOrder(begin.base_version, spec, lease_s, who, keyed=begin.keyed)
