"""Transactions: a trainer writes the live parameters of an engine that stands still for it.

Every rank is unproved before the first write, and the engine generates again only on a version that
every rank is proved to hold: the one that was written and pushed, or the one before.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Never

from weightsync import failpoints
from weightsync.engine import BETWEEN_STEPS, OpenApply
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import attach_pb2 as pb
from weightsync_server.attach.attachable import check_attachable
from weightsync_server.engine import idempotency, replies
from weightsync_server.engine.engine_applier import live_version
from weightsync_server.engine.outcome import Cause, CutoverPlan, CutoverResult
from weightsync_server.engine.ranks import QUICK_S
from weightsync_server.engine.unfinished import write_down
from weightsync_server.engine.worker_reports import RankCommit
from weightsync_server.ops.os_errors import translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from weightsync.engine import PauseSpec
    from weightsync.v1 import weightsync_pb2
    from weightsync_server.engine import EngineApplier, HostParts, ModelParts
    from weightsync_server.engine.outcome import Pause, PreparedVersion
    from weightsync_server.engine.session import EngineSession
    from weightsync_server.engine.worker_reports import Report

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
        order: What the trainer begins with.
        begun: Awaited when it may write.
        next_step: Returns the trainer's next message; None: it has gone.

    Attributes:
        id: Names it.
    """

    def __init__(
        self,
        applier: EngineApplier,
        model: ModelParts,
        host: HostParts,
        order: InPlaceOrder,
        begun: Callable[[str], Awaitable[None]],
        next_step: Callable[[], Awaitable[pb.WriteInPlaceRequest | None]],
    ) -> None:
        self.id = secrets.token_hex(8)
        self._applier, self._supervisor = applier, applier.supervisor
        self._model, self._host, self._order = model, host, order
        self._begun, self._next_step = begun, next_step

    async def run(self) -> weightsync_pb2.ApplyReport:
        """Return when the engine generates on what was written and pushed, proved on every rank.

        Raises:
            WeightSyncError: VERSION_CONFLICT, ENGINE_REFUSED and why nothing can be done with the
                engine now: nothing was paused. APPLY_RESTORED: it generates on the version before.
                ENGINE_FENCED, ENGINE_AWAY: it stands still until its ranks have been asked.
        """
        async with self._supervisor.exclusive(self.id, proof_s=0.0) as session:
            base = live_version(session)
            self._check(session, base)
            with translate_os_errors("the transaction"):
                # Whatever the ranks hold after a crash, it is this that is placed.
                await self._supervisor.journal.intent_to_place(base)
            await failpoints.reach("in_place.begin")
            version = base.record.version
            async with session.paused(self._order.spec, OpenApply(self.id, version, version)) as at:
                plan, result = await self._written(session, base, at)
                await self._resume(session, plan)
                result.resume_s = time.perf_counter() - at.began - result.paused_s
            result.paused_s = time.perf_counter() - at.began
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

    async def _written(
        self, session: EngineSession, base: PreparedVersion, at: Pause
    ) -> tuple[CutoverPlan, CutoverResult]:
        """Return what every rank is proved to hold after the trainer has written."""
        try:
            await session.ranks.unprove(QUICK_S)
            await failpoints.reach("in_place.begun")
            await self._begun(self.id)
            version = await self._committed()
            began = time.perf_counter()
            plan, ranks = await self._proved(session, base, version)
        except (WeightSyncError, OSError) as error:
            await self._put_back(session, base, str(error) or type(error).__name__)
        verify_s = time.perf_counter() - began
        result = CutoverResult(at.mode, at.seconds, 0.0, verify_s, ranks=ranks)
        result.paused_s = time.perf_counter() - at.began
        return plan, result

    async def _committed(self) -> int:
        """Return which version the trainer says that it has written."""
        while True:
            try:
                async with asyncio.timeout(self._order.lease_s):
                    step = await self._next_step()
            except TimeoutError:
                raise _abandoned(
                    f"the trainer was silent for {self._order.lease_s:g} s; raise its lease"
                ) from None
            match step.WhichOneof("step") if step is not None else "":
                case "renew":
                    continue
                case "commit":
                    return step.commit.version if step is not None else 0
                case "abort":
                    raise _abandoned("the trainer has taken it back")
                case "":
                    raise _abandoned("the trainer has gone")
                case other:
                    raise _abandoned(f"{other} was sent while it was open; begin once")

    async def _proved(
        self, session: EngineSession, base: PreparedVersion, version: int
    ) -> tuple[CutoverPlan, list[RankCommit]]:
        record = self._model.table.get(version)
        target = await self._applier.ready(session, base, record, None, apply_id=self.id)
        plan = CutoverPlan(target, base, self._order.spec, Cause())
        try:
            await self._supervisor.journal.intent(plan)
            await failpoints.reach("in_place.commit")
            reports = await session.ranks.verify(self.id, self._host.limits.prepare_timeout_s)
            _check_proved(version, reports)
        except BaseException as error:
            self._supervisor.quarantine.release(target.lease, session.ranks, error)
            raise
        await failpoints.reach("in_place.proved")
        return plan, [_proof(report, target.digest) for report in reports]

    async def _resume(self, session: EngineSession, plan: CutoverPlan) -> None:
        try:
            with translate_os_errors("the transaction"):
                await failpoints.reach("in_place.resume")
            await self._supervisor.cutover(session).resume(plan.target)
        except BaseException as error:
            self._supervisor.quarantine.release(plan.target.lease, session.ranks, error)
            raise

    async def _put_back(self, session: EngineSession, base: PreparedVersion, why: str) -> Never:
        version = base.record.version
        logger.error("transaction %s: version %d is put back: %s", self.id, version, why)
        await failpoints.reach("in_place.restore")
        cutover = self._supervisor.cutover(session)
        await cutover.place(base)
        await cutover.resume(base)
        await write_down(self._supervisor.journal, base)
        self._supervisor.show(base, whole=True)
        await session.hold(base)
        raise WeightSyncError(
            Reason.APPLY_RESTORED,
            f"the transaction did not count, and version {version} was put back and verified on "
            f"every rank ({why}); compute on it again",
        )

    async def _served(
        self, session: EngineSession, plan: CutoverPlan, result: CutoverResult
    ) -> weightsync_pb2.ApplyReport:
        target, base = plan.target, plan.base
        self._supervisor.served.set_live(target.record.version)
        await session.hold(target)
        self._supervisor.show(target, whole=True)
        logger.info("transaction %s: version %d is live", self.id, target.record.version)
        report = replies.applied(target, base.record.version, plan.spec, result)
        await self._supervisor.journal.done(plan, idempotency.Answer())
        return report


def _abandoned(why: str) -> WeightSyncError:
    return WeightSyncError(Reason.APPLY_RESTORED, why)


def _check_proved(version: int, reports: Sequence[Report]) -> None:
    wrong = [report for report in reports if not report.proved]
    if wrong:
        names = sorted({name for report in wrong for name in report.mismatched})
        ranks = ", ".join(report.rank for report in wrong)
        raise WeightSyncError(
            Reason.DATA_CORRUPT,
            f"rank {ranks} holds something else of {', '.join(names[:10])} than version {version}; "
            "write nothing after it was pushed, and every place of a tensor",
        )


def _proof(report: Report, digest: str) -> RankCommit:
    return RankCommit(report.rank, digest, 0, False, 0.0, report.seconds, "")
