"""What an apply does with one engine: prepare a version, make it live, put things back."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from weightsync import failpoints
from weightsync.engine import BETWEEN_STEPS, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.layout_compatibility import add_suggestion
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine import idempotency, replies
from weightsync_server.engine.cutover import Cutover
from weightsync_server.engine.gate import (
    GatedEngine,
    plan_gates,
    refuses,
    score_target,
    scored,
    settle,
    with_baseline,
)
from weightsync_server.engine.outcome import (
    ApplyCause,
    CutoverPlan,
    CutoverResult,
    PreparedVersion,
    reject,
)
from weightsync_server.engine.refusals import OUT_OF_REACH, ContentRefusedError, duration, of_change
from weightsync_server.engine.session import EngineSession
from weightsync_server.engine.supervisor import EngineSupervisor
from weightsync_server.engine.version_loads import LoadFailedError
from weightsync_server.ops import traces
from weightsync_server.ops.os_errors import translate_os_errors


class EngineApplier:
    """Makes versions live on one engine, for who has its session."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self.supervisor = supervisor
        self._model, self._context = supervisor.context.model, supervisor.context
        self._model.engine_layouts.engines[self.name] = supervisor
        # Bytes per second of pause in the last apply, by strategy and whether it paused at all.
        self._rates: dict[tuple[int, bool], float] = {}

    @property
    def name(self) -> str:
        return self.supervisor.name

    async def verify(self, session: EngineSession, version: int) -> pb.VerifyVersionResponse:
        """Compare what every rank serves with a version; 0: with what it serves."""
        live = live_version(session)
        timeout_s, owed_times = (
            self._context.limits.prepare_timeout_s,
            self.supervisor.checks.owed_times,
        )
        if version in (0, live.record.version):
            seen = await session.ranks.verify(live.apply_id, timeout_s)
            found = dataclasses.replace(live, reports=tuple(seen))
        else:
            _check_loaded(session, self._model.table.get(version))
            with await self._model.stager.stage(version, timeout_s) as lease:
                found = await session.prepare(lease, compare_live=True, timeout_s=timeout_s)
            await session.hold(live)
        answer = replies.proof(found)
        if found.record is live.record:
            self.supervisor.checks.judge(live, found.reports, owed_times)
        return answer

    async def ready(
        self,
        session: EngineSession,
        live: PreparedVersion,
        record: VersionRecord,
        timeout_s: float | None,
        *,
        durable: bool = True,
        apply_id: str = "",
        to_write: bool = True,
        spec: PauseSpec | None = None,
    ) -> PreparedVersion:
        """Have every rank prepare a version; what they read of it is proved.

        `timeout_s` None means the configured time, and an empty `apply_id` the id of the apply that
        has the engine. With `durable` the version must be committed. Without `to_write` the version
        is only compared with what is live, and is sent to no device. `spec` None: by a pause that
        was allowed before. If this raises, nothing is changed.
        """
        progress = self.supervisor.progress
        progress.prepare(record.version, live.record.version)
        with translate_os_errors("the apply"):
            await failpoints.reach("apply.begin")
        seconds = timeout_s or self._context.limits.prepare_timeout_s
        stager = self._model.stager
        with traces.phase("apply.stage", engine=self.name):
            lease = await stager.stage(record.version, seconds, durable=durable)
        try:
            # Each shard is digested after every rank has read it: so what they read is proved.
            async with stager.digesting(lease) as digests:
                try:
                    with traces.phase("apply.prepare", engine=self.name) as phase:
                        target = await session.prepare(
                            lease,
                            compare_live=False,
                            timeout_s=seconds,
                            patch=to_write,
                            prefetched=self.supervisor.prefetcher.name_of(lease.record),
                            apply_id=apply_id or progress.apply_id,
                            digests=digests,
                        )
                        if phase is not None:
                            for report in target.reports:
                                phase.add_rank(report.rank, report.seconds)
                except WeightSyncError as error:
                    raise await self._refused(lease.record, error) from None
                try:
                    await stager.verify(lease, digests)
                    target.check()
                    if spec is not None:
                        target.check_cache(spec)
                    await self._model.accepted.learn(lease.record)
                    await self._model.table.refused.take(self.name, target.digest)
                except BaseException:
                    await session.hold(live)
                    raise
        except BaseException:
            lease.release()
            raise
        self._context.metrics.observe_phase("prepare", target.seconds)
        progress.enter(pb.RUNNING_PHASE_WAIT)
        return target

    async def _refused(self, record: VersionRecord, error: WeightSyncError) -> WeightSyncError:
        """Return what is said of a version that was not prepared, and remember what would recur."""
        tensors = record.manifest.layout.tensors if record.manifest else ()
        answer = await add_suggestion(error, tensors, self._model.accepted)
        loaded = isinstance(error, LoadFailedError) and error.reason is Reason.ENGINE_REFUSED
        if loaded or isinstance(error, ContentRefusedError):
            if record.base is not None:
                answer = of_change(answer, record.version, record.base.version)
            if record.commit is not None:
                digest = record.commit.content_digest
                await self._model.table.refused.refuse(self.name, digest, answer.message)
        return answer

    async def drop(self, session: EngineSession, plan: CutoverPlan) -> None:
        plan.target.lease.release()
        await session.hold(plan.base)

    async def make_live(
        self,
        session: EngineSession,
        plan: CutoverPlan,
        steps: Callable[[Cutover], Awaitable[CutoverResult]] | None = None,
    ) -> pb.ApplyReport:
        """Return when the engine generates on the target, proved on every rank.

        `steps` has a cutover go in step with others; None: the engine waits for nobody. Raises as
        `Cutover.run`. A target that failed here is rejected; without `steps`, that it was restored
        is in the journal.
        """
        target = plan.target
        cutover = self.supervisor.cutover(session)
        try:
            with translate_os_errors("the apply"):
                await failpoints.reach("apply.prepared")
                result = await (steps(cutover) if steps is not None else cutover.run(plan))
        except BaseException as error:
            await cutover.abandon()
            self.supervisor.quarantine.release(target.lease, session.ranks, error)
            if isinstance(error, WeightSyncError):
                await self._failed(session, cutover, plan, error, alone=steps is None)
            raise
        self.supervisor.served.set_live(target.record.version)
        if cutover.gate is not None:
            self.supervisor.note_gate(cutover.gate)
        await session.hold(target)
        self.supervisor.show(target, whole=result.compared_all)
        if result.paused_s:
            done = replies.strategy(target, patched=result.patched)
            self._rates[done, plan.spec.mode == BETWEEN_STEPS] = (
                result.written_bytes / result.paused_s
            )
        return replies.applied(plan, result)

    async def _failed(
        self,
        session: EngineSession,
        cutover: Cutover,
        plan: CutoverPlan,
        error: WeightSyncError,
        *,
        alone: bool,
    ) -> None:
        error.metadata["apply_id"] = plan.target.apply_id
        if cutover.gate is not None:
            self.supervisor.note_gate(cutover.gate)
            # An engine that is lost while it scores says nothing about the version.
            known = scored(cutover.gate) or error.reason is Reason.APPLY_RESTORED
            if known and refuses(cutover.gate):
                await settle(self._model.serving, cutover.gate)
        if error.reason is Reason.APPLY_RESTORED:
            self.supervisor.show(plan.base, whole=cutover.compared_all)
            if cutover.at_fault:
                await reject(self._model.serving, plan.target.record.version, error.message)
            if alone:
                answer = idempotency.pack_refusal(error)
                await self.supervisor.journal.restored(plan, answer)
        if error.reason not in {*OUT_OF_REACH, Reason.ENGINE_FENCED}:
            await session.hold(plan.base)

    async def with_baseline(self, session: EngineSession, plan: CutoverPlan) -> CutoverPlan:
        """Return a plan with what the engine says of its probes with what is live."""
        if plan.gate is not None and plan.gate.when != pb.GATE_WHEN_OFF:
            self.supervisor.progress.enter(pb.RUNNING_PHASE_SCORE)
            plan = await with_baseline(session, plan)
            self.supervisor.progress.enter(pb.RUNNING_PHASE_WAIT)
        return plan

    async def score_live(self, session: EngineSession, plan: CutoverPlan) -> pb.GateReport:
        """Score the target, which the engine generates on."""
        self.supervisor.progress.enter(pb.RUNNING_PHASE_SCORE)
        await failpoints.reach("gate.score_live")
        report = await score_target(session, plan, self.name)
        self.supervisor.note_gate(report)
        return report

    async def settle(self, report: pb.GateReport) -> None:
        """Reject or hold what a gate has not let go."""
        await settle(self._model.serving, report)

    async def score(self, session: EngineSession) -> pb.GateReport:
        """Score the probes of what is live, by the limits of an apply that names none.

        Whatever they show, nothing is done. Of a version without probes REQUEST_INVALID.
        """
        live, history = live_version(session), self._context.history
        options = pb.GateOptions(when=pb.GATE_WHEN_AFTER, on_fail=pb.GATE_ACTION_REPORT)
        engine = GatedEngine(self.name, session.info.capabilities)
        gates = plan_gates(options, live.record, [engine], PauseSpec(), history)
        plan = CutoverPlan(live, live, PauseSpec(), ApplyCause(), gate=gates[self.name])
        report = await score_target(session, plan, self.name)
        self.supervisor.note_gate(report)
        return report

    def predict(self, plan: CutoverPlan, *, read_from_store: bool) -> pb.ApplyPlan:
        target = plan.target
        strategy = replies.strategy(target, patched=target.patched)
        rate = self._rates.get((strategy, plan.spec.mode == BETWEEN_STEPS))
        return pb.ApplyPlan(
            bytes=target.bytes,
            # Not zero, which would be a prediction.
            predicted_pause=duration(target.bytes / rate) if rate else None,
            memory_bytes=sum(segment.capacity for segment in target.lease.segments),
            read_from_store=read_from_store,
            strategy=strategy,
            # What is left lies in a slot, and beside the live weights where it was loaded.
            rollback_resident=plan.base.record.residency == pb.RESIDENCY_STAGED,
        )


def _check_loaded(session: EngineSession, record: VersionRecord) -> None:
    """Refuse to compare with what nobody has made: a load would take the way back for it."""
    loads = session.loads
    if loads is not None and not loads.resident(record.content_digest):
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            f"version {record.version} is not loaded beside the live weights, so its result there "
            "cannot be checked; apply it, or verify the live version",
        )


def live_version(session: EngineSession) -> PreparedVersion:
    if session.live is None:
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            "the engine is being reconciled; try again in a moment",
            retry_after_s=1.0,
        )
    return session.live
