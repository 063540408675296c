"""Applies, rollbacks and proofs of one model, one at a time.

An apply runs in a task that no RPC owns: a caller that goes away changes nothing, and a second call
with the same key joins it.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.engine import BETWEEN_STEPS
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import idempotency, replies
from weightsync_server.engine.nearest_names import add_suggestion
from weightsync_server.engine.outcome import CutoverPlan
from weightsync_server.engine.pause_options import duration, pause_spec
from weightsync_server.engine.reconcile import reject
from weightsync_server.ops.os_errors import translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from weightsync.engine import PauseSpec
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine.apply_limits import ApplyLimits
    from weightsync_server.engine.cutover import Cutover
    from weightsync_server.engine.idempotency import Reply, Request
    from weightsync_server.engine.journal import Journal
    from weightsync_server.engine.model_parts import ModelParts
    from weightsync_server.engine.outcome import PreparedVersion
    from weightsync_server.engine.session import EngineSession
    from weightsync_server.engine.supervisor import EngineSupervisor
    from weightsync_server.ops.metrics import Metrics
    from weightsync_server.residency.digests import StagedDigests
    from weightsync_server.residency.leases import SlotLease

__all__ = ["Applier"]

logger = logging.getLogger(__name__)

_MAX_REASON_BYTES = 1024
_MAX_PREPARE_S = 3600

_OUTCOMES = {
    pb.APPLY_OUTCOME_APPLIED: "applied",
    pb.APPLY_OUTCOME_ALREADY_LIVE: "already_live",
    pb.APPLY_OUTCOME_PLANNED: "planned",
}
_FAILURES = {Reason.APPLY_RESTORED: "restored", Reason.ENGINE_FENCED: "fenced"}


class Applier:
    """Makes versions live on the engine that a supervisor watches.

    Args:
        supervisor: Keeps the engine connected and reconciled.
        model: What is made live.
        journal: Where applies are written down.
        metrics: Where they are counted.
        limits: Timeouts.
    """

    def __init__(
        self,
        supervisor: EngineSupervisor,
        model: ModelParts,
        journal: Journal,
        metrics: Metrics,
        limits: ApplyLimits,
    ) -> None:
        self._supervisor = supervisor
        self._model = model
        self._journal = journal
        self._metrics = metrics
        self._limits = limits
        self._calls = idempotency.Calls()
        # Bytes per second of pause in the last apply, by strategy and whether it paused at all.
        self._rates: dict[tuple[int, bool], float] = {}

    async def apply(self, request: pb.ApplyVersionRequest) -> pb.ApplyVersionResponse:
        """Make a version live on every rank, or change nothing.

        Raises:
            WeightSyncError: With the reason; the engine then serves what it served before, unless
                the reason is ENGINE_FENCED or ENGINE_AWAY.
        """
        spec = pause_spec(request.pause)
        _check_prepare_timeout(request)
        return await self._calls.run(
            request.idempotency_key,
            request,
            lambda: self._once(
                request, pb.ApplyVersionResponse, lambda: self._apply(request, spec)
            ),
        )

    async def rollback(self, request: pb.RollbackRequest) -> pb.RollbackResponse:
        """Go back to the previous verified version and reject the one that was left."""
        spec = pause_spec(request.pause)
        if len(request.reason.encode()) > _MAX_REASON_BYTES:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"reason is over {_MAX_REASON_BYTES} bytes; shorten it"
            )
        return await self._calls.run(
            request.idempotency_key,
            request,
            lambda: self._once(request, pb.RollbackResponse, lambda: self._rollback(request, spec)),
        )

    async def verify(self, request: pb.VerifyVersionRequest) -> pb.VerifyVersionResponse:
        """Compare what every rank serves with the digests of a version."""
        return await self._calls.run("", request, lambda: self._verify(request))

    async def _verify(self, request: pb.VerifyVersionRequest) -> pb.VerifyVersionResponse:
        async with self._supervisor.exclusive() as session:
            live = _live(session)
            if request.version in (0, live.record.version):
                seen = await session.ranks.verify(live.apply_id, self._limits.prepare_timeout_s)
                found = dataclasses.replace(live, reports=tuple(seen))
            else:
                timeout_s = self._limits.prepare_timeout_s
                _check_loaded(session, self._model.table.get(request.version))
                with await self._model.stager.stage(request.version, timeout_s) as lease:
                    found = await session.prepare(lease, compare_live=True, timeout_s=timeout_s)
                await session.hold(live)
            answer = replies.proof(found)
            if found.record is live.record:
                self._supervisor.checks.judge(live, found.reports)
            return answer

    async def drain(self) -> None:
        """Wait for applies that are running."""
        await self._calls.drain()

    async def _once(
        self, request: Request, kind: type[Reply], start: Callable[[], Coroutine[None, None, Reply]]
    ) -> Reply:
        # Nothing is awaited from here until the supervisor is asked: what it finds of a call that
        # was lost is in the journal before it lets the next one in.
        earlier = idempotency.earlier_reply(self._journal, request, kind)
        return earlier if earlier is not None else await self._count(start())

    async def _count(self, work: Coroutine[None, None, Reply]) -> Reply:
        try:
            reply = await work
        except WeightSyncError as error:
            # Only an apply that was begun can have fenced the engine.
            begun = "apply_id" in error.metadata
            self._metrics.count_apply(
                _FAILURES.get(error.reason, "refused") if begun else "refused"
            )
            raise
        self._metrics.count_apply(_OUTCOMES[reply.report.outcome])
        return reply

    async def _apply(
        self, request: pb.ApplyVersionRequest, spec: PauseSpec
    ) -> pb.ApplyVersionResponse:
        timeout = request.prepare_timeout.ToNanoseconds() / 1e9
        async with self._supervisor.exclusive(secrets.token_hex(8), timeout) as session:
            live = _live(session)
            _check_capable(session, spec)
            record = self._choose(request, live)
            if record.version == live.record.version:
                return pb.ApplyVersionResponse(report=replies.nothing_done(live, spec))
            absent = record.residency != pb.RESIDENCY_STAGED
            durable = request.require_durable or not request.HasField("require_durable")
            target = await self._ready(session, live, record, timeout, durable=durable)
            if request.dry_run:
                predicted = self._plan(target, live, spec, read_from_store=absent)
                await self._drop(session, live, target)
                report = replies.planned(target, live.record.version, spec, predicted)
                return pb.ApplyVersionResponse(report=report)
            if request.clear_rejected:
                await self._accept(session, live, target)
            plan = CutoverPlan(target, live, spec, idempotency.cause(request))
            cutover = self._supervisor.cutover(session)
            reply = pb.ApplyVersionResponse(report=await self._make_live(session, cutover, plan))
            await self._journal.done(plan, idempotency.pack(reply))
            return reply

    async def _rollback(self, request: pb.RollbackRequest, spec: PauseSpec) -> pb.RollbackResponse:
        async with self._supervisor.exclusive(secrets.token_hex(8)) as session:
            live = _live(session)
            _check_capable(session, spec)
            version = self._model.serving.rollback_to
            if not version:
                raise WeightSyncError(
                    Reason.NO_ROLLBACK,
                    f"there is no version before {live.record.version} to go back to; "
                    "push the weights that you want as a new version",
                )
            left = live.record.version
            target = await self._ready(session, live, self._model.table.get(version), None)
            reason = request.reason or f"rolled back to version {version}"
            cause = idempotency.cause(request, rejects=left, reason=reason)
            plan, cutover = (
                CutoverPlan(target, live, spec, cause),
                self._supervisor.cutover(session),
            )
            report = await self._make_live(session, cutover, plan)
            rejected = await reject(self._model.serving, left, reason)
            reply = pb.RollbackResponse(report=report, rejected_version=left * rejected)
            await self._journal.done(plan, idempotency.pack(reply))
            return reply

    def _choose(self, request: pb.ApplyVersionRequest, live: PreparedVersion) -> VersionRecord:
        if not request.version:
            record = self._model.table.newest_applicable()
            return record if record.version > live.record.version else live.record
        record = self._model.table.get(request.version)
        if record.serving == pb.SERVING_REJECTED and not request.clear_rejected:
            raise WeightSyncError(
                Reason.VERSION_REJECTED,
                f"version {record.version} is rejected ({record.rejected_reason}); "
                "set clear_rejected to apply it all the same",
            )
        if record.version < live.record.version:
            back = self._model.serving.rollback_to
            rollback = f"use Rollback, which goes to version {back}, or " if back else ""
            raise WeightSyncError(
                Reason.VERSION_BELOW_LIVE,
                f"version {record.version} is below the live version {live.record.version}; "
                f"{rollback}push its weights as a new version",
            )
        return record

    async def _ready(
        self,
        session: EngineSession,
        live: PreparedVersion,
        record: VersionRecord,
        timeout_s: float | None,
        *,
        durable: bool = True,
    ) -> PreparedVersion:
        with translate_os_errors("the apply"):
            await failpoints.reach("apply.begin")
        seconds = timeout_s or self._limits.prepare_timeout_s
        lease = await self._model.stager.stage(record.version, seconds, durable=durable)
        try:
            target = await self._proved(session, live, lease, seconds)
        except BaseException:
            lease.release()
            raise
        self._metrics.observe_phase("prepare", target.seconds)
        return target

    async def _proved(
        self,
        session: EngineSession,
        live: PreparedVersion,
        lease: SlotLease,
        timeout_s: float,
    ) -> PreparedVersion:
        # Each shard is digested after every rank has read it: so what they read is proved.
        async with self._model.stager.digesting(lease) as digests:
            target = await self._prepared(session, lease, digests, timeout_s)
            try:
                await self._model.stager.verify(lease, digests)
                target.check()
                await self._model.accepted.learn(lease.record)
            except BaseException:
                await session.hold(live)
                raise
        return target

    async def _prepared(
        self,
        session: EngineSession,
        lease: SlotLease,
        digests: StagedDigests,
        timeout_s: float,
    ) -> PreparedVersion:
        try:
            return await session.prepare(
                lease,
                compare_live=False,
                timeout_s=timeout_s,
                patch=True,
                prefetched=self._supervisor.prefetcher.name_of(lease.record),
                apply_id=self._supervisor.apply_id,
                digests=digests,
            )
        except WeightSyncError as error:
            manifest = lease.record.manifest
            tensors = manifest.layout.tensors if manifest else ()
            raise await add_suggestion(error, tensors, self._model.accepted) from None

    async def _accept(
        self, session: EngineSession, live: PreparedVersion, target: PreparedVersion
    ) -> None:
        try:
            await self._model.serving.accept(target.record.version)
        except BaseException:
            await self._drop(session, live, target)
            raise

    async def _drop(
        self, session: EngineSession, live: PreparedVersion, target: PreparedVersion
    ) -> None:
        target.lease.release()
        await session.hold(live)

    async def _make_live(
        self, session: EngineSession, cutover: Cutover, plan: CutoverPlan
    ) -> pb.ApplyReport:
        target, base = plan.target, plan.base
        try:
            with translate_os_errors("the apply"):
                await failpoints.reach("apply.prepared")
                result = await cutover.run(plan)
        except BaseException as error:
            self._supervisor.quarantine.release(target.lease, session.ranks, error)
            if isinstance(error, WeightSyncError):
                await self._failed(session, cutover, plan, error)
            raise
        self._model.serving.set_live(target.record.version)
        await session.hold(target)
        self._supervisor.show(target, whole=result.compared_all)
        if result.paused_s:
            done = replies.strategy(target, patched=result.patched)
            self._rates[done, plan.spec.mode == BETWEEN_STEPS] = (
                result.written_bytes / result.paused_s
            )
        logger.info(
            "version %d is live, %d bytes written, paused for %.1f ms",
            target.record.version,
            result.written_bytes,
            result.paused_s * 1e3,
        )
        return replies.applied(target, base.record.version, plan.spec, result)

    async def _failed(
        self, session: EngineSession, cutover: Cutover, plan: CutoverPlan, error: WeightSyncError
    ) -> None:
        error.metadata["apply_id"] = plan.target.apply_id
        if error.reason is Reason.APPLY_RESTORED:
            self._supervisor.show(plan.base, whole=cutover.compared_all)
            await reject(self._model.serving, plan.target.record.version, error.message)
            await self._journal.restored(plan, idempotency.pack_refusal(error.message))
        if error.reason not in (Reason.ENGINE_FENCED, Reason.ENGINE_AWAY):
            await session.hold(plan.base)

    def _plan(
        self,
        target: PreparedVersion,
        live: PreparedVersion,
        spec: PauseSpec,
        *,
        read_from_store: bool,
    ) -> pb.ApplyPlan:
        strategy = replies.strategy(target, patched=target.patched)
        rate = self._rates.get((strategy, spec.mode == BETWEEN_STEPS))
        return pb.ApplyPlan(
            bytes=target.bytes,
            # Not zero, which would be a prediction.
            predicted_pause=duration(target.bytes / rate) if rate else None,
            memory_bytes=sum(segment.capacity for segment in target.lease.segments),
            read_from_store=read_from_store,
            strategy=strategy,
            # What is left lies in a slot, and beside the live weights where it was loaded.
            rollback_resident=live.record.residency == pb.RESIDENCY_STAGED,
        )


def _check_loaded(session: EngineSession, record: VersionRecord) -> None:
    """Refuse to compare with what nobody has made: a load would take the way back for it."""
    loads = session.loads
    if loads is not None and not loads.resident(record.content_digest):
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            f"version {record.version} is not loaded beside the live weights, so that nothing "
            "tells what it would be there; apply it, or verify the live version",
        )


def _check_prepare_timeout(request: pb.ApplyVersionRequest) -> None:
    seconds = request.prepare_timeout.ToNanoseconds() / 1e9
    if not 0 <= seconds <= _MAX_PREPARE_S:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"prepare_timeout must be 0 to {_MAX_PREPARE_S} s"
        )


def _check_capable(session: EngineSession, spec: PauseSpec) -> None:
    if spec.mode == BETWEEN_STEPS and BETWEEN_STEPS not in session.info.capabilities:
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            "this engine cannot change weights between two steps: it has pipeline stages or data "
            "parallel ranks, or an older weightsync release in vLLM; use another pause mode",
        )


def _live(session: EngineSession) -> PreparedVersion:
    if session.live is None:
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            "the engine is being reconciled; try again in a moment",
            retry_after_s=1.0,
        )
    return session.live
