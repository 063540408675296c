"""Applies, rollbacks and proofs of one model on the engines of this host, one at a time.

An apply runs in a task that no RPC owns: a caller that goes away changes nothing, and a second call
with the same key joins it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace

from weightsync.engine import BETWEEN_STEPS, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event, note
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine import idempotency, replies
from weightsync_server.engine.apply_history import SERVER, concern, note_reply
from weightsync_server.engine.engine_parts import EngineContext
from weightsync_server.engine.engine_set import EngineSet
from weightsync_server.engine.gate import check_gate, plan_gates
from weightsync_server.engine.host_apply import (
    EnginePlan,
    LocalEngine,
    TakenEngines,
    check_base,
    check_order,
    check_prepare_timeout,
    check_ways,
    drop,
    log_live,
    prepare_all,
    roll_out,
    score_live,
    switch_together,
    take_engines,
    ways_back_kept,
    with_baselines,
)
from weightsync_server.engine.idempotency import Reply, Request
from weightsync_server.engine.journal import Answer
from weightsync_server.engine.outcome import CutoverPlan, reject
from weightsync_server.engine.refusals import pause_spec

logger = logging.getLogger(__name__)

_MAX_REASON_BYTES = 1024
#: How often engines are taken anew when others begin to serve meanwhile.
_TRIES = 5

#: What an apply is counted as, by how it ended; the rest counts as refused.
_OUTCOMES = {
    pb.APPLY_RESULT_APPLIED: "applied",
    pb.APPLY_RESULT_ALREADY_LIVE: "already_live",
    pb.APPLY_RESULT_PLANNED: "planned",
    pb.APPLY_RESULT_RESTORED: "restored",
    pb.APPLY_RESULT_FENCED: "fenced",
}
#: How lines about these ends are logged.
_FAILED_LINES = {
    "refused": (logging.INFO, event("apply.refused")),
    "restored": (logging.ERROR, event("apply.restored")),
    "fenced": (logging.CRITICAL, event("apply.fenced")),
}


class Applier:
    def __init__(self, engines: EngineSet, context: EngineContext) -> None:
        self._engines = engines
        self._model, self._context = context.model, context
        self._calls = idempotency.Calls()

    async def apply(
        self,
        request: pb.ApplyVersionRequest,
        base: VersionRecord | None = None,
        *,
        who: str = SERVER,
        cause: str = "",
    ) -> pb.ApplyVersionResponse:
        """Make a version live on every rank of every engine that is asked for, or change nothing.

        `base` is the version that must be live until then; None allows any. `who` asked, and the
        `cause` is why, for the history. After an error the engines serve what they served before,
        unless the reason is ENGINE_FENCED or ENGINE_AWAY, or the sentence says otherwise.
        """
        if not request.dry_run:
            self.refuse_in_fleet("apply")
        spec = pause_spec(request.pause)
        check_prepare_timeout(request)
        check_order(request, self._context.slots)
        check_gate(request.gate, spec)
        return await self._calls.run(
            request.idempotency_key,
            request,
            lambda: self._once(
                request,
                pb.ApplyVersionResponse,
                lambda entry: self._apply(request, spec, base, entry),
                pb.ApplyRecord(kind=pb.APPLY_KIND_APPLY, requested_by=who, cause=cause),
            ),
        )

    def refuse_in_fleet(self, command: str) -> None:
        """Refuse with NOT_SUPPORTED what a host does alone, if its fleet decides what it serves."""
        refuse_member(self._context.fleet, command)

    async def rollback(
        self, request: pb.RollbackRequest, *, who: str = SERVER
    ) -> pb.RollbackResponse:
        """Go back to the previous verified version and reject the one that was left."""
        self.refuse_in_fleet("rollback")
        spec = pause_spec(request.pause)
        if len(request.reason.encode()) > _MAX_REASON_BYTES:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"reason is over {_MAX_REASON_BYTES} bytes; shorten it"
            )
        check_order(request, self._context.slots)
        return await self._calls.run(
            request.idempotency_key,
            request,
            lambda: self._once(
                request,
                pb.RollbackResponse,
                lambda entry: self._rollback(request, spec, entry),
                pb.ApplyRecord(kind=pb.APPLY_KIND_ROLLBACK, requested_by=who, cause=request.reason),
            ),
        )

    async def verify(self, request: pb.VerifyVersionRequest) -> pb.VerifyVersionResponse:
        return await self._calls.run("", request, lambda: self._verify(request))

    async def drain(self) -> None:
        await self._calls.drain()

    async def _verify(self, request: pb.VerifyVersionRequest) -> pb.VerifyVersionResponse:
        async with self._taken(request.engine, None, apply_id="") as group:
            proofs, gates = {}, {}
            for member in group.members:
                try:
                    proof = await member.applier.verify(member.session, request.version)
                    if request.score:
                        gates[member.name] = await member.applier.score(member.session)
                except BaseException as error:
                    member.error = error
                    raise
                proofs[member.name] = proof
            return replies.proofs(proofs, group.absent, gates)

    async def _once(
        self,
        request: Request,
        kind: type[Reply],
        start: Callable[[pb.ApplyRecord], Coroutine[None, None, Reply]],
        entry: pb.ApplyRecord,
    ) -> Reply:
        note(version=getattr(request, "version", None) or None, engine=request.engine)
        # Nothing is awaited from here until the supervisor is asked: what it finds of a call that
        # was lost is in the journal before it lets the next one in.
        earlier = idempotency.earlier_reply(self._engines.journal, request, kind)
        if earlier is not None:
            return earlier
        entry.order, entry.engine = request.order, request.engine
        try:
            with self._context.history.recorded(entry):
                reply = await start(entry)
                note_reply(entry, reply.report, list(reply.engines))
        except WeightSyncError as error:
            outcome = self._count(entry)
            level, extra = _FAILED_LINES[outcome]
            what = "rollback" if isinstance(request, pb.RollbackRequest) else "apply"
            logger.log(level, "%s %s: %s", what, outcome, error.message, extra=extra)
            raise
        self._count(entry)
        return reply

    def _count(self, entry: pb.ApplyRecord) -> str:
        outcome = _OUTCOMES.get(entry.result, "refused")
        self._context.metrics.count_apply(outcome)
        return outcome

    @contextlib.asynccontextmanager
    async def _taken(
        self, engine: str, timeout_s: float | None, *, apply_id: str
    ) -> AsyncIterator[TakenEngines]:
        patience_s = timeout_s or self._context.limits.prepare_timeout_s
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(_TRIES):
                appliers = self._engines.named(engine)
                group = TakenEngines(apply_id, whole=not engine and self._engines.several)
                taken = take_engines(appliers, group, timeout_s, patience_s)
                await stack.enter_async_context(taken)
                if not group.whole:
                    break
                # Who is found to serve meanwhile waits, and serves what is live afterwards.
                await stack.enter_async_context(self._context.joining)
                if not await self._late(group):
                    break
                await stack.aclose()
            else:
                raise WeightSyncError(
                    Reason.ENGINE_AWAY,
                    "apply again: engines of this host kept starting to serve",
                    retry_after_s=1.0,
                )
            yield group

    async def _late(self, group: TakenEngines) -> bool:
        """Tell whether an engine serves that was away, or not there, when the others were taken."""
        names = {member.name for member in group.members}
        others = [one.supervisor for one in self._engines.appliers if one.name not in names]
        return any([one.serving or await one.generates() for one in others])

    async def _apply(
        self,
        request: pb.ApplyVersionRequest,
        spec: PauseSpec,
        base: VersionRecord | None,
        entry: pb.ApplyRecord,
    ) -> pb.ApplyVersionResponse:
        entry.version = request.version
        timeout = request.prepare_timeout.ToNanoseconds() / 1e9
        async with self._taken(request.engine, timeout, apply_id=_new_apply()) as group:
            # What a server before this one had begun was found done while the engines were taken.
            kind = pb.ApplyVersionResponse
            earlier = idempotency.earlier_reply(self._engines.journal, request, kind)
            if earlier is not None:
                return earlier
            entry.previous_version = _common_live(group.members)
            record = self._choose(request, group.members)
            entry.version = record.version
            note(version=record.version)
            concern(record)
            logger.debug("apply of version %d begins", record.version, extra=event("apply.begun"))
            going = [one for one in group.members if one.live.record.version != record.version]
            reports = {
                one.name: replies.nothing_done(one.live, spec)
                for one in group.members
                if one not in going
            }
            if not going:
                if group.absent and not request.dry_run:
                    await self._engines.host_journal.found(record, group.members[0].name)
                return _response(group, reports)
            if base is not None:
                check_base(base, group.members)
            if not request.clear_rejected:
                # Some may serve it, for which it was not rejected.
                self._refuse_marked(record)
            check_ways(request, group, going, spec)
            absent = record.residency != pb.RESIDENCY_STAGED
            durable = request.require_durable or not request.HasField("require_durable")
            cause, history = idempotency.cause(request), self._context.history
            gated = [one.gated for one in going]
            gates = plan_gates(request.gate, record, gated, spec, history)
            plans = await prepare_all(
                going, record, timeout, spec, cause, durable=durable, gates=gates
            )
            if request.dry_run:
                for each in plans:
                    predicted = each.member.applier.predict(each.plan, read_from_store=absent)
                    reports[each.member.name] = replies.planned(each.plan, predicted)
                await drop(plans)
                return _response(group, reports)
            plans = await with_baselines(plans)
            if request.clear_rejected:
                await self._accept(record, plans)
            with ways_back_kept(plans):
                reports |= await self._carry_out(request, group, plans)
            reply = _response(group, reports)
            await self._done(group, plans, idempotency.pack(reply))
            return reply

    async def _rollback(
        self, request: pb.RollbackRequest, spec: PauseSpec, entry: pb.ApplyRecord
    ) -> pb.RollbackResponse:
        written: dict[str, VersionRecord] = {}
        for applier in self._engines.named(request.engine):
            record = self._model.table.find(applier.supervisor.served.live)
            if record is not None and record.in_place:
                written[applier.name] = record
            why = "a rollback was asked for, which does not wait for this apply"
            applier.supervisor.checks.break_off(why)
        async with self._taken(request.engine, None, apply_id=_new_apply()) as group:
            kind = pb.RollbackResponse
            earlier = idempotency.earlier_reply(self._engines.journal, request, kind)
            if earlier is not None:
                return earlier
            undone = {
                one.name: written[one.name]
                for one in group.members
                if one.name in written and one.live.record.order < written[one.name].order
            }
            entry.previous_version = _common_live(group.members)
            record, left = self._way_back(group.members, undone)
            entry.version = record.version
            note(version=record.version)
            concern(record)
            going = [one for one in group.members if one.live.record.version != record.version]
            reports = {
                one.name: replies.nothing_done(one.live, spec)
                for one in group.members
                if one not in going
            }
            if not going:
                # What a trainer had written was all that was to be left.
                return await self._undone(request, spec, group, reports)
            check_ways(request, group, going, spec)
            reason = request.reason or f"rolled back to version {record.version}"
            cause = idempotency.cause(request, rejects=left, reason=reason)
            plans = await prepare_all(going, record, None, spec, cause, durable=True)
            reports |= await self._carry_out(request, group, plans)
            rejected = await reject(self._model.serving, left, reason)
            logger.info(
                "rolled back from version %d to %d: %s",
                left,
                record.version,
                request.reason or "no reason was given",
                extra=event("rollback.done", rejected_version=left),
            )
            reply = pb.RollbackResponse(
                report=replies.combined(reports),
                rejected_version=left * rejected,
                engines=replies.engine_reports(reports, group.absent),
            )
            await self._done(group, plans, idempotency.pack(reply))
            return reply

    async def _undone(
        self,
        request: pb.RollbackRequest,
        spec: PauseSpec,
        group: TakenEngines,
        reports: dict[str, pb.ApplyReport],
    ) -> pb.RollbackResponse:
        reply = pb.RollbackResponse(
            report=replies.combined(reports),
            engines=replies.engine_reports(reports, group.absent),
        )
        cause, answer = idempotency.cause(request), idempotency.pack(reply)
        plans = {one.name: CutoverPlan(one.live, one.live, spec, cause) for one in group.members}
        if group.whole:
            await self._engines.host_journal.restored(plans, answer)
            return reply
        for one in group.members:
            await one.applier.supervisor.journal.restored(plans[one.name], answer)
        return reply

    def _choose(
        self, request: pb.ApplyVersionRequest, members: Sequence[LocalEngine]
    ) -> VersionRecord:
        newest = max((one.live.record for one in members), key=lambda record: record.order)
        if not request.version:
            record = self._model.table.newest_applicable([one.name for one in members])
            return record if record.order > newest.order else newest
        record = self._model.table.get(request.version)
        if record.serving != pb.SERVING_LIVE and not request.clear_rejected:
            self._refuse_marked(record)
        if record.order < newest.order:
            back = next(
                (b for one in members if (b := one.applier.supervisor.served.rollback_to)), 0
            )
            rollback = f"use Rollback, which goes to version {back}, or " if back else ""
            raise WeightSyncError(
                Reason.VERSION_BELOW_LIVE,
                f"version {record.version} is below the live version {newest.version}; "
                f"{rollback}push its weights as a new version",
            )
        return record

    def _refuse_marked(self, record: VersionRecord) -> None:
        """Refuse a version whose content is rejected or held, under whatever number."""
        if why := self._model.table.rejection(record):
            raise WeightSyncError(
                Reason.VERSION_REJECTED,
                f"version {record.version} is rejected ({why}); set clear_rejected to apply it "
                "anyway",
            )
        if why := self._model.table.hold(record):
            raise WeightSyncError(
                Reason.GATE_HELD,
                f"apply version {record.version} with --accept (clear_rejected), or push another "
                f"one: its gate held it ({why})",
            )

    def _way_back(
        self, members: Sequence[LocalEngine], undone: Mapping[str, VersionRecord]
    ) -> tuple[VersionRecord, int]:
        """Return the version that was live before on these engines, and the one that is left.

        `undone` has what engines have left by now that served it when the rollback was asked for.
        """
        each: dict[str, tuple[int, int]] = {}
        for one in members:
            live, gone = one.live.record.version, undone.get(one.name)
            further = live, one.applier.supervisor.served.rollback_to
            each[one.name] = further if gone is None else (gone.version, live)
        left = {leaves for leaves, _ in each.values()}
        back = {goes for _, goes in each.values()} - {0}
        if len(left) > 1 or len(back) > 1:
            ways = ", ".join(
                f"{name} from {leaves} to {goes or 'none'}" for name, (leaves, goes) in each.items()
            )
            raise WeightSyncError(
                Reason.NO_ROLLBACK,
                f"the engines of this host would not go back to one version ({ways}); name an "
                "engine, or apply a version to all first",
            )
        if not back:
            raise WeightSyncError(
                Reason.NO_ROLLBACK,
                f"there is no version before {left.pop()} to go back to; "
                "push the weights that you want as a new version",
            )
        return self._model.table.get(back.pop()), left.pop()

    async def _accept(self, record: VersionRecord, plans: Sequence[EnginePlan]) -> None:
        try:
            await self._model.serving.accept(record.version)
        except BaseException:
            await drop(plans)
            raise

    async def _carry_out(
        self, request: Request, group: TakenEngines, plans: Sequence[EnginePlan]
    ) -> dict[str, pb.ApplyReport]:
        if request.order == pb.ENGINE_ORDER_ROLLING and len(plans) > 1:
            # What an engine did alone is no answer to the call.
            parts = [EnginePlan(one.member, _without_key(one.plan)) for one in plans]
            waves_of = request.max_unavailable or 1
            return await roll_out(parts, waves_of, self._engines.host_journal)
        between = any(one.plan.spec.mode == BETWEEN_STEPS for one in plans)
        if group.whole and not between:
            reports = await switch_together(plans, self._engines.host_journal)
            await score_live(plans, reports, self._engines.host_journal, together=True)
            return reports
        # One engine at most, which others that are away are to follow.
        own = [EnginePlan(one.member, replace(one.plan, for_host=group.whole)) for one in plans]
        reports = {one.member.name: await one.make_live() for one in own}
        await score_live(own, reports, self._engines.host_journal)
        log_live(reports)
        return reports

    async def _done(self, group: TakenEngines, plans: Sequence[EnginePlan], answer: Answer) -> None:
        if group.whole:
            named = {one.member.name: one.plan for one in plans}
            await self._engines.host_journal.done(named, answer)
            return
        for one in plans:
            await one.member.applier.supervisor.journal.done(one.plan, answer)


def refuse_member(fleet: str, command: str) -> None:
    """Refuse with NOT_SUPPORTED what a host does alone, unless it is in no fleet."""
    if fleet:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"use `weightsync fleet {command}`: this host is a member of fleet {fleet}, which "
            "decides what it serves",
        )


def _new_apply() -> str:
    """Return the id of an apply, which this task's lines in the log have from now on."""
    apply_id = secrets.token_hex(8)
    note(apply_id=apply_id)
    return apply_id


def _common_live(members: Sequence[LocalEngine]) -> int:
    live = {one.live.record.version for one in members}
    return live.pop() if len(live) == 1 else 0


def _without_key(plan: CutoverPlan) -> CutoverPlan:
    cause = replace(plan.cause, key="", request="")
    return replace(plan, cause=cause)


def _response(group: TakenEngines, reports: dict[str, pb.ApplyReport]) -> pb.ApplyVersionResponse:
    return pb.ApplyVersionResponse(
        report=replies.combined(reports), engines=replies.engine_reports(reports, group.absent)
    )
