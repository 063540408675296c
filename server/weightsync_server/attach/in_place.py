"""Transactions: a trainer writes the live parameters of an engine that stands still for it.

    nobody can write, by the ranks' word -> INTENT of the version before -> pause
    -> every rank unproved -> the trainer, and nobody else, can write, and writes
    -> nobody can write -> every rank digests, replicas agree
    -> resume: live, in the engine's memory alone
    -> pushed, INTENT, every rank compared with that and its digests -> a version like any other

Whatever goes wrong on the way: pause, nobody can write, the version before on every rank, verify,
resume; else fence.
The engine has one owner to the end of it, so that nothing else is applied meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Never

from weightsync import failpoints
from weightsync.engine import BETWEEN_STEPS, OpenApply
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import attach_pb2 as pb
from weightsync_server.attach.attachable import check_attachable, hand_out
from weightsync_server.attach.replicas import check_agreed
from weightsync_server.attach.trainer_line import abandoned
from weightsync_server.engine import idempotency, replies
from weightsync_server.engine.block_writers import still_writing, wait_let_go
from weightsync_server.engine.engine_applier import live_version
from weightsync_server.engine.outcome import Cause, CutoverPlan, CutoverResult
from weightsync_server.engine.pause_options import duration
from weightsync_server.engine.ranks import QUICK_S
from weightsync_server.engine.unfinished import write_down
from weightsync_server.ops.os_errors import translate_os_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from weightsync.engine import PauseSpec
    from weightsync.v1 import weightsync_pb2
    from weightsync_server.attach.attachments import Attachment
    from weightsync_server.attach.in_place_versions import InPlaceVersions
    from weightsync_server.attach.open_blocks import OpenBlocks
    from weightsync_server.attach.trainer_line import TrainerLine
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine import EngineApplier, HostParts, ModelParts
    from weightsync_server.engine.outcome import Pause, PreparedVersion
    from weightsync_server.engine.session import EngineSession
    from weightsync_server.engine.worker_reports import RankCommit, Report

__all__ = ["InPlace", "InPlaceOrder"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InPlaceOrder:
    """What a trainer begins with.

    Attributes:
        base: The version that it has computed on.
        spec: How to pause.
        lease_s: How long it may be silent.
    """

    base: int
    spec: PauseSpec
    lease_s: float


class InPlace:
    """One transaction on one engine.

    Args:
        applier: Of the engine.
        model: What it serves.
        host: What engines share.
        blocks: What is written with.
        order: What the trainer begins with.
        trainer: Who writes.
        attachment: By which that has the memory.
        versions: Drops what does not count.

    Attributes:
        id: Names it.
    """

    def __init__(
        self,
        applier: EngineApplier,
        model: ModelParts,
        host: HostParts,
        blocks: OpenBlocks,
        order: InPlaceOrder,
        trainer: TrainerLine,
        attachment: Attachment,
        versions: InPlaceVersions,
    ) -> None:
        self.id = secrets.token_hex(8)
        self._applier, self._supervisor = applier, applier.supervisor
        self._model, self._host, self._order = model, host, order
        self._trainer, self._versions = trainer, versions
        self._blocks, self._attachment = blocks, attachment
        self._unguarded = False

    async def run(self) -> weightsync_pb2.ApplyReport:
        """Return when the engine generates on what was written, pushed and proved on every rank.

        Raises:
            WeightSyncError: VERSION_CONFLICT, ENGINE_REFUSED and why nothing can be done with the
                engine now: nothing was paused. APPLY_RESTORED: it generates on the version before.
                ENGINE_FENCED, ENGINE_AWAY: it stands still until its ranks have been asked.
        """
        async with self._supervisor.exclusive(self.id, proof_s=0.0) as session:
            if self._attachment.engine_id == session.info.engine_id:
                return await self._run(session)
        # Said in there, it would be this engine that is away.
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            "attach again, for the engine was started anew: what this has is memory of before",
        )

    async def _run(self, session: EngineSession) -> weightsync_pb2.ApplyReport:
        base = live_version(session)
        self._check(session, base)
        await self._check_writers(session)
        with translate_os_errors("the transaction"):
            # Whatever the ranks hold after a crash, it is this that is placed.
            await self._supervisor.journal.intent_to_place(base)
        await failpoints.reach("in_place.begin")
        async with self._block(session, base), self._paused(session, base) as pause:
            record, result = await self._written(session, base, pause)
        try:
            plan = await self._copied(session, base, record)
        except (WeightSyncError, OSError) as error:
            await self._go_back(session, base, record, error)
        return await self._served(session, plan, result)

    def _check(self, session: EngineSession, base: PreparedVersion) -> None:
        if self._host.fleet:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                f"this host is a member of fleet {self._host.fleet}, which decides what it serves; "
                "train beside an engine that is in none, and push what comes of it",
            )
        check_attachable(session)
        session.check_fences()
        if self._order.spec.mode == BETWEEN_STEPS:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                "an engine stands still while it is written; use pause mode KEEP, WAIT or ABORT",
            )
        live = base.record.version
        if live != self._order.base:
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"version {live} is live, and what was computed on version {self._order.base} does "
                "not follow it; attach again and begin with what is live",
            )

    async def _check_writers(self, session: EngineSession) -> None:
        """Accept an engine that nobody can write."""
        states = await session.states()
        if still_writing(states) and (why := await wait_let_go(session)):
            raise WeightSyncError(Reason.ENGINE_REFUSED, why)
        # A rank of an older release, which knows nobody, guards nothing.
        self._unguarded = any(state.unguarded or state.holders is None for state in states)

    @contextlib.asynccontextmanager
    async def _block(self, session: EngineSession, base: PreparedVersion) -> AsyncIterator[None]:
        """Have what the trainer writes with ready, which is to be had while it may write."""
        if not self._attachment.guarded:
            yield
            return
        found = await hand_out(session, base, self._host.segments, "write")
        self._blocks.open(self.id, found)
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
            record = await self._model.table.add_in_place(self.id)
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
            reports = await session.ranks.verify(base.apply_id, self._host.limits.commit_timeout_s)
            if any(report.proved is False for report in reports):
                self._host.metrics.violate("never_mixed")
            _check_proved(base.record.version, reports)

    async def _let_write(self) -> None:
        """Return when the trainer has written, and nobody is given anything to write with."""
        line, limits = self._trainer, self._host.limits
        checks = self._supervisor.checks
        checks.break_off = self._attachment.on_leave = line.break_off
        try:
            begun = pb.InPlaceBegun(transaction_id=self.id)
            line.send(pb.WriteInPlaceResponse(begun=begun))
            await line.step("commit", self._order.lease_s, limits.in_place_pause_s)
        finally:
            checks.break_off = self._attachment.on_leave = None
            self._blocks.close(self.id)

    async def _let_go(self, session: EngineSession, why: str) -> None:
        """Return when nobody can write what is about to be put back.

        Raises:
            WeightSyncError: ENGINE_FENCED: somebody can, as long as the engine stands still.
        """
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
        timeout_s = self._host.limits.commit_timeout_s
        ranks = await session.ranks.digest(base.apply_id, self._name, timeout_s)
        if self._attachment.guarded and any(one.writing for one in ranks):
            # A child that was forked in the block closes what it has got a moment later.
            await wait_let_go(session)
            ranks = await session.ranks.digest(base.apply_id, self._name, timeout_s)
        if self._attachment.guarded and (late := [one.rank for one in ranks if one.writing]):
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"the memory of rank {', '.join(late)} can still be written by a mapping or a "
                "descriptor that was made of it in the block; make none, and write nothing beside "
                "the block",
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
                f"the resume on what was written was not confirmed ({error.message}); every rank "
                "is asked what it holds, and GetStatus tells what the engine serves",
                retry_after_s=1.0,
            ) from error

    async def _show(
        self, session: EngineSession, record: VersionRecord, result: CutoverResult
    ) -> None:
        version = record.version
        for phase in ("pause", "verify", "resume", "paused"):
            self._host.metrics.observe_phase(phase, getattr(result, f"{phase}_s"))
        self._supervisor.show_in_place(version, session.ranks.names)
        logger.info("transaction %s: version %d is live, and not pushed", self.id, version)
        await failpoints.reach("in_place.live")
        live = pb.InPlaceLive(version=version, paused=duration(result.paused_s))
        self._trainer.send(pb.WriteInPlaceResponse(live=live))

    # A version like any other.

    async def _copied(
        self, session: EngineSession, base: PreparedVersion, record: VersionRecord
    ) -> CutoverPlan:
        """Return when every rank is proved to hold what was pushed."""
        await self._trainer.step("copied", self._order.lease_s)
        if record.commit is None:
            raise abandoned(f"version {record.version} was not pushed")
        target = await self._applier.ready(
            session, base, record, None, apply_id=self.id, to_write=False
        )
        plan = CutoverPlan(target, base, self._order.spec, Cause())
        try:
            await self._supervisor.journal.intent(plan)
            await failpoints.reach("in_place.copied")
            reports = await session.ranks.verify(self.id, self._host.limits.prepare_timeout_s)
            _check_proved(record.version, reports)
            await failpoints.reach("in_place.proved")
            # It generates with it, and knows it by another name.
            await self._supervisor.cutover(session).resume(target)
        except BaseException as error:
            self._supervisor.quarantine.release(target.lease, session.ranks, error)
            raise
        return plan

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
        await self._versions.give_up(record, error)
        self._supervisor.served.set_live(base.record.version)
        await self._versions.delete(record)

    async def _put_back(
        self,
        session: EngineSession,
        base: PreparedVersion,
        record: VersionRecord | None,
        error: WeightSyncError | OSError,
    ) -> Never:
        version, why = base.record.version, str(error) or type(error).__name__
        logger.error("transaction %s: version %d is put back: %s", self.id, version, why)
        restored = WeightSyncError(
            Reason.APPLY_RESTORED,
            f"the transaction did not count, and version {version} was put back and verified on "
            f"every rank ({why}); compute on it again",
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
        await write_down(self._supervisor.journal, base)
        self._supervisor.show(base, whole=True)
        await session.hold(base)
        raise restored

    async def _served(
        self, session: EngineSession, plan: CutoverPlan, result: CutoverResult
    ) -> weightsync_pb2.ApplyReport:
        target, base = plan.target, plan.base
        target.record.in_place = ""
        self._supervisor.served.set_live(target.record.version)
        await session.hold(target)
        self._supervisor.show(target, whole=True)
        logger.info(
            "transaction %s: version %d is pushed and proved", self.id, target.record.version
        )
        result.ranks = [replace(rank, content_digest=target.digest) for rank in result.ranks]
        report = replies.applied(target, base.record.version, plan.spec, result)
        await self._supervisor.journal.done(plan, idempotency.Answer())
        return report


def _check_proved(version: int, reports: Sequence[Report]) -> None:
    wrong = [report for report in reports if not report.proved]
    if wrong:
        names = sorted({name for report in wrong for name in report.mismatched})
        ranks = ", ".join(report.rank for report in wrong)
        raise WeightSyncError(
            Reason.DATA_CORRUPT,
            f"rank {ranks} holds something else of {', '.join(names[:10])} than version {version}, "
            "or than when that became live; write nothing outside a transaction",
        )
