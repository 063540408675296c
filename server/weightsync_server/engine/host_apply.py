"""One version prepared and made live on several engines of this host: together, or one by one.

One file: who takes part, what each has prepared and what becomes of it are the steps of one apply.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weightsync import failpoints
from weightsync.engine import BETWEEN_STEPS, CACHE_LINEAGE, CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import about, event
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.decide import (
    ApplyOrder,
    ApplyPhase,
    Decide,
    DecisionPlan,
    DecisionState,
    FleetVersion,
    OrderPause,
    ParticipantReport,
    Reports,
    Verdict,
    next_step,
)
from weightsync_server.engine import idempotency, replies
from weightsync_server.engine.cutover import Cutover
from weightsync_server.engine.engine_participant import EngineApplier, live_version
from weightsync_server.engine.gate import GatedEngine, refusal, refuses
from weightsync_server.engine.idempotency import Request
from weightsync_server.engine.journal import Answer, HostJournal, disk_errors_logged
from weightsync_server.engine.outcome import (
    ApplyCause,
    CutoverPlan,
    CutoverResult,
    GatePlan,
    PreparedVersion,
)
from weightsync_server.engine.refusals import OUT_OF_REACH, GateRefusedError, of_engine
from weightsync_server.engine.session import EngineSession
from weightsync_server.ops.os_errors import translate_os_errors

logger = logging.getLogger(__name__)


#: Of what is worst for an engine, first.
_WORST = (Reason.ENGINE_FENCED, Reason.ENGINE_AWAY, Reason.ENGINE_OWNED)


#: How long until a decision that the disk refused is written again, seconds.
_WRITE_AGAIN_S = 0.5


@dataclass(frozen=True)
class EnginePlan:
    member: LocalEngine
    plan: CutoverPlan

    async def drop(self) -> None:
        await self.member.applier.drop(self.member.session, self.plan)

    async def make_live(self, ledger: JournalLedger | None = None) -> pb.ApplyReport:
        """Return when the engine generates on its target; what fails is told to the others."""
        member, name, target = self.member, self.member.name, self.plan.target
        steps = functools.partial(ledger.take_part, name, self.plan) if ledger is not None else None
        facts = {"apply_id": target.apply_id, "version": target.record.version, "engine": name}
        try:
            with about(**facts):
                return await member.applier.make_live(member.session, self.plan, steps)
        except BaseException as error:
            member.error = error
            if ledger is not None:
                ledger.report(name, ApplyPhase.READY, [str(error) or "it was interrupted"])
            raise


class JournalLedger:
    """Engines of this host that go together; a record in the journal is their one decision.

    No engine is written before all stand still, and none generates on the target before all are
    proved and the journal has the COMMIT. There is at least one plan, and all have the same target.
    A fleet that decides for this host may take `fleet_s`; None: it decides alone, and what the disk
    refuses is not decided. One that scores probes does so while all stand still.
    """

    def __init__(
        self, plans: Sequence[EnginePlan], journal: HostJournal, fleet_s: float | None = None
    ) -> None:
        self._plans, self._journal, self._fleet_s = plans, journal, fleet_s
        self._named = {one.member.name: one.plan for one in plans}
        gates = [one.plan.gate for one in plans if one.plan.gate is not None]
        self._score_s = max((2 * gate.limit_s for gate in gates), default=0.0)
        target = plans[0].plan.target
        self._plan = DecisionPlan(
            number=0,
            nonce=target.apply_id,
            order=ApplyOrder.BARRIER,
            target=FleetVersion(target.record.version, target.digest),
            previous=None,
            waves=(tuple(self._named),),
            decisions=1,
        )
        self._tasks: list[asyncio.Task[pb.ApplyReport]] = []
        # They are prepared before: here PREPARED says that one stands still, and READY that it is
        # proved as well.
        self._reports: dict[ApplyPhase, dict[str, ParticipantReport]] = {
            ApplyPhase.PREPARED: {},
            ApplyPhase.READY: {},
        }
        self._failures: list[str] = []
        self._changed = asyncio.Event()
        # Why engines go back that stand still, or that are proved; empty: they go on.
        loop = asyncio.get_running_loop()
        self._to_write: asyncio.Future[list[str]] = loop.create_future()
        self._decided: asyncio.Future[list[str]] = loop.create_future()
        self._deciding: asyncio.Task[list[str]] | None = None

    async def begin(self) -> None:
        """Write the one INTENT and let the engines pause; `close` must follow.

        If this raises, nothing was done, and nothing is kept of what was prepared.
        """
        try:
            with translate_os_errors("the apply"):
                await failpoints.reach("host.intent")
                await self._journal.intent(self._named)
        except BaseException:
            await drop(self._plans)
            raise
        self._tasks = [asyncio.create_task(one.make_live(self)) for one in self._plans]

    async def take_part(self, engine: str, plan: CutoverPlan, cutover: Cutover) -> CutoverResult:
        """Do as `Cutover.run` does, in step with the others."""
        patience_s = self._score_s + (self._fleet_s or 0.0)
        await cutover.pause(plan, alone=False, patience_s=patience_s)
        self.report(engine, ApplyPhase.PREPARED, [])
        # Shielded: one that is cancelled must not take the word from the others.
        if failures := await asyncio.shield(self._to_write):
            await cutover.go_back(plan, failures)
        failures = await cutover.write(plan)
        self.report(engine, ApplyPhase.READY, failures)
        if failures := failures or await asyncio.shield(self._decided):
            await cutover.go_back(plan, failures)
        return await cutover.release(plan)

    def report(self, engine: str, phase: ApplyPhase, failures: Sequence[str]) -> None:
        """Take note that an engine has come to the end of a phase, or why it does not, once."""
        if engine in self._reports[phase]:
            return
        if failures and not self._failures:
            self._failures = [f"engine {engine}: {failure}" for failure in failures]
        self._reports[phase][engine] = ParticipantReport(not failures)
        self._changed.set()

    async def decidable(self) -> Verdict:
        """Return what is to be decided: all engines are proved, or one is not."""
        while not isinstance(order := next_step(self._plan, self._state), Decide):
            if isinstance(order, OrderPause):
                self._to_write.set_result(await _caught(failpoints.reach("host.still")))
            else:
                await self._changed.wait()
                self._changed.clear()
        return order.verdict

    @property
    def _state(self) -> DecisionState:
        there = frozenset(self._named)
        return DecisionState(Reports(self._reports), there, paused=self._to_write.done())

    async def decide(self, verdict: Verdict, reason: str = "") -> None:
        """Decide, for ever; what is begun is done, whoever is cancelled."""
        failures = self._failures or [reason]
        if verdict is Verdict.COMMIT:
            self._deciding = asyncio.create_task(_caught(self._write()))
            failures = await asyncio.shield(self._deciding)
        for word in (self._to_write, self._decided):
            if not word.done():
                word.set_result(failures)

    async def _write(self) -> None:
        while True:
            try:
                with translate_os_errors("the apply"):
                    await failpoints.reach("host.decide")
                    await self._journal.commit(self._named)
                    return await failpoints.reach("host.decided")
            except WeightSyncError as error:
                if self._fleet_s is None:
                    raise
                # Others have decided: nothing goes on, or back, before the disk has it.
                logger.critical(
                    "the engines stay paused until a decision can be written: %s", error
                )
            await asyncio.sleep(_WRITE_AGAIN_S)

    async def ended(self) -> dict[str, pb.ApplyReport]:
        """Return when all engines generate on the target; DONE must follow.

        APPLY_RESTORED: every engine generates on what it served. Any other: one does not, and is
        brought to what the journal says was decided.
        """
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        if errors := _errors(self._named, outcomes):
            failure = _failure(errors)
            if all(error.reason is Reason.APPLY_RESTORED for error in errors.values()):
                refusal = idempotency.pack_refusal(failure)
                await self._journal.restored(self._named, refusal)
            raise failure
        reports = dict(zip(self._named, _reports(outcomes), strict=True))
        log_live(reports)
        return reports

    async def close(self) -> None:
        """Leave engines that have not ended to their leases, and to who asks what they hold."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _caught(work: Awaitable[None]) -> list[str]:
    """Return why work failed for which engines stand still; empty: it did not."""
    try:
        await work
    except WeightSyncError as error:
        return [error.message]
    except Exception:
        logger.exception("the engines of this apply return to their previous version")
        return ["a fault in the server; see its log"]
    return []


async def switch_together(
    plans: Sequence[EnginePlan], journal: HostJournal
) -> dict[str, pb.ApplyReport]:
    """Return when all engines generate on the target, which none did before all were proved."""
    ledger = JournalLedger(plans, journal)
    await ledger.begin()
    try:
        await ledger.decide(await ledger.decidable())
        return await ledger.ended()
    finally:
        await ledger.close()


async def drop(plans: Sequence[EnginePlan]) -> None:
    for one in plans:
        await one.drop()


async def roll_out(
    plans: Sequence[EnginePlan], max_unavailable: int, journal: HostJournal
) -> dict[str, pb.ApplyReport]:
    """Return when all engines generate on the target, a few of them away at once.

    All plans have the same target and are in the order in which the engines take it.

    Raises:
        WeightSyncError: Of the first engines that failed; those that went before are back on what
            they served, or the sentence says which is not.
    """
    reports: dict[str, pb.ApplyReport] = {}
    for start, end in _waves(plans, max_unavailable):
        wave = plans[start:end]
        outcomes = await asyncio.gather(*map(_live_alone, wave), return_exceptions=True)
        named = [one.member.name for one in wave]
        failed = [one for one in wave if one.member.error is not None]
        if failed:
            await drop(plans[end:])
            went = [*plans[:start], *(one for one in wave if one not in failed)]
            failure = _first_failure(named, outcomes)
            if isinstance(failure, GateRefusedError):
                await _revoke(went)
            raise await _put_back(went, failed, failure, journal)
        reports |= zip(named, _reports(outcomes), strict=True)
        if (refused := await _scored_live(wave, reports, plans[:end])) is not None:
            await drop(plans[end:])
            raise await _put_back(plans[:end], [], refused, journal)
    log_live(reports)
    return reports


def _waves(plans: Sequence[EnginePlan], size: int) -> list[tuple[int, int]]:
    """Return where each wave begins and ends; the first is alone if it scores for the others."""
    gate = plans[0].plan.gate
    alone = gate is not None and gate.when != pb.GATE_WHEN_OFF
    first = min(1 if alone else size, len(plans))
    rest = range(first, len(plans), size)
    return [(0, first), *((start, min(start + size, len(plans))) for start in rest)]


async def with_baselines(plans: Sequence[EnginePlan]) -> list[EnginePlan]:
    """Have engines that have a gate score what they generate on, while all generate.

    What takes time here is in no pause. If it is interrupted nothing is kept of what was prepared.
    """
    try:
        return [
            replace(one, plan=await one.member.applier.with_baseline(one.member.session, one.plan))
            for one in plans
        ]
    except BaseException:
        await drop(plans)
        raise


@contextlib.contextmanager
def ways_back_kept(plans: Sequence[EnginePlan]) -> Iterator[None]:
    """Keep in the body what engines served before, if a gate may have them go back to it."""
    with contextlib.ExitStack() as stack:
        for one in plans:
            if any(_late(other) for other in plans):
                stack.enter_context(one.plan.base.record.wanted())
        yield


def _late(one: EnginePlan) -> bool:
    return one.plan.gate is not None and one.plan.gate.when == pb.GATE_WHEN_AFTER


async def score_live(
    plans: Sequence[EnginePlan],
    reports: Mapping[str, pb.ApplyReport],
    journal: HostJournal,
    *,
    together: bool = False,
) -> None:
    """Score what engines generate on by now, where their gate is behind the resume.

    A gate that does not let the target go raises APPLY_RESTORED, when all are back. `together`: it
    was decided for all engines of this host, also for those that are away.
    """
    decided = journal if together else None
    if (failure := await _scored_live(plans, reports, plans, decided)) is not None:
        answer = idempotency.pack_refusal(failure)
        raise await _put_back(plans, [], failure, journal, answer)


async def _scored_live(
    plans: Sequence[EnginePlan],
    reports: Mapping[str, pb.ApplyReport],
    went: Sequence[EnginePlan],
    decided: HostJournal | None = None,
) -> GateRefusedError | None:
    """Put into reports what gates behind the resume show; return the first refusal.

    That those that `went` leave the target is written down first, so that the next server has them
    leave it too; in `decided` for engines that are away.
    """
    for one in filter(_late, plans):
        report = await one.member.applier.score_live(one.member.session, one.plan)
        reports[one.member.name].gate.CopyFrom(report)
        if refuses(report):
            with disk_errors_logged():
                if decided is not None:
                    await decided.place(one.plan.base.record.version)
            await _revoke(went)
            await failpoints.reach("gate.refused")
            await one.member.applier.settle(report)
            return refusal(report, one.plan.base.record.version)
    return None


async def _revoke(went: Sequence[EnginePlan]) -> None:
    """Write down that engines leave what they serve; they do it now, whatever the disk says."""
    with disk_errors_logged():
        for one in went:
            await one.member.applier.supervisor.journal.revoke(one.plan)


async def _live_alone(one: EnginePlan) -> pb.ApplyReport:
    report = await one.make_live()
    await one.member.applier.supervisor.journal.done(one.plan, Answer())
    return report


async def _put_back(
    went: Sequence[EnginePlan],
    failed: Sequence[EnginePlan],
    failure: WeightSyncError,
    journal: HostJournal,
    answer: Answer | None = None,
) -> WeightSyncError:
    """Return the failure when the engines that went before serve again what they did.

    What those hold that failed may not be known: what they shall hold is written down.
    """
    back, left = {one.member.name: one.plan for one in failed}, ""
    for one in reversed(went):
        try:
            await _live_again(one)
        except Exception as error:
            why = error.message if isinstance(error, WeightSyncError) else "a fault in the server"
            logger.critical("engine %s could not be restored", one.member.name, exc_info=True)
            left += (
                f"; engine {one.member.name} stays on version {one.plan.target.record.version}, "
                f"because it could not be rolled back ({why})"
            )
        else:
            back[one.member.name] = one.plan
    if back:
        await journal.restored(back, answer or Answer())
    if isinstance(failure, GateRefusedError):
        left += "; the server tries that again" if left else ""
        return GateRefusedError(failure.message + left, failure.report)
    return WeightSyncError(
        failure.reason,
        failure.message + left,
        metadata=failure.metadata,
        retry_after_s=failure.retry_after_s,
    )


async def _live_again(one: EnginePlan) -> None:
    member, plan = one.member, one.plan
    # Not the name of what is live: the ranks tell the two apart by it.
    target = await member.applier.ready(
        member.session,
        plan.target,
        plan.base.record,
        None,
        durable=False,
        apply_id=secrets.token_hex(8),
    )
    back = EnginePlan(member, CutoverPlan(target, plan.target, plan.spec, ApplyCause()))
    log_live({member.name: await _live_alone(back)})


def log_live(reports: Mapping[str, pb.ApplyReport]) -> None:
    """Log in one line, however many engines there are, what they generate on from now on."""
    report, names = replies.combined(reports), ", ".join(reports)
    paused_ms = report.phases.paused_total.ToNanoseconds() / 1e6
    logger.info(
        "%s %s: version %d is live, %s before; %d bytes written, paused for %.1f ms",
        "engine" if len(reports) == 1 else "engines",
        names,
        report.version,
        report.previous_version or "others",
        report.written_bytes,
        paused_ms,
        extra=event(
            "apply.done",
            engine=names,
            version=report.version,
            previous_version=report.previous_version or None,
            apply_id=report.apply_id,
            written_bytes=report.written_bytes,
            paused_ms=round(paused_ms, 3),
        ),
    )


def _first_failure(
    names: Sequence[str], outcomes: Sequence[pb.ApplyReport | BaseException]
) -> WeightSyncError:
    """Return one error for all; what nobody foresaw is one of the server."""
    try:
        return _failure(_errors(names, outcomes))
    except Exception:
        logger.exception("the engines that were already updated are rolled back")
        return WeightSyncError(Reason.FAULT, "a fault in the server; see its log")


def _errors(
    names: Sequence[str] | dict[str, CutoverPlan],
    outcomes: Sequence[pb.ApplyReport | BaseException],
) -> dict[str, WeightSyncError]:
    """Return what engines have failed with, by name; what nobody foresaw is raised."""
    errors = {}
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, WeightSyncError):
            errors[name] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
    return errors


def _reports(outcomes: Sequence[pb.ApplyReport | BaseException]) -> list[pb.ApplyReport]:
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _failure(errors: dict[str, WeightSyncError]) -> WeightSyncError:
    """Return one error for all: that of the engine that is worst off, with what others say."""
    reasons = [error.reason for error in errors.values()]
    gate = next((one for one in errors.values() if isinstance(one, GateRefusedError)), None)
    if gate is not None and set(reasons) == {Reason.APPLY_RESTORED}:
        # The others went back because of it.
        return gate
    reason = next((worst for worst in _WORST if worst in reasons), reasons[0])
    first = next(error for error in errors.values() if error.reason is reason)
    return WeightSyncError(
        reason,
        "; ".join(f"engine {name}: {error.message}" for name, error in errors.items()),
        retry_after_s=first.retry_after_s,
        metadata=dict(first.metadata),
    )


async def prepare_all(
    members: Sequence[LocalEngine],
    record: VersionRecord,
    timeout_s: float | None,
    spec: PauseSpec,
    cause: ApplyCause,
    *,
    durable: bool,
    gates: Mapping[str, GatePlan] | None = None,
) -> list[EnginePlan]:
    """Prepare a version on all engines; when one cannot, none keeps what it has prepared.

    `timeout_s` None means the configured time. With `durable` the version must be committed.
    `gates` by the name of the engine that scores.
    """

    async def ready(one: LocalEngine) -> EnginePlan:
        with about(engine=one.name, version=record.version):
            target = await one.applier.ready(
                one.session, one.live, record, timeout_s, durable=durable, spec=spec
            )
        gate = (gates or {}).get(one.name)
        return EnginePlan(one, CutoverPlan(target, one.live, spec, cause, gate=gate))

    if len(members) == 1:
        return [await ready(members[0])]
    tasks = [asyncio.create_task(ready(one)) for one in members]
    try:
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.wait(tasks)
        done = [one for one in tasks if not one.cancelled() and one.exception() is None]
        await drop([one.result() for one in done])
        raise
    plans: list[EnginePlan] = []
    failure: BaseException | None = None
    for one, outcome in zip(members, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            plans.append(outcome)
            continue
        one.error = outcome
        if isinstance(outcome, WeightSyncError):
            failure = failure or of_engine(one.name, outcome)
        failure = failure or outcome
    if failure is not None:
        await drop(plans)
        raise failure
    return plans


#: How often it is looked whether an engine that generates can be asked what, seconds.
_LOOK_S = 0.1
#: What keeps an engine away that may stand still: it joins later.
_ABSENT = OUT_OF_REACH | {Reason.ENGINE_FENCED}


@dataclass
class LocalEngine:
    """One engine that nobody else does anything with, and what its part failed with."""

    applier: EngineApplier
    session: EngineSession
    live: PreparedVersion
    error: BaseException | None = None

    @property
    def name(self) -> str:
        return self.applier.name

    @property
    def gated(self) -> GatedEngine:
        return GatedEngine(self.name, self.session.info.capabilities)


@dataclass
class TakenEngines:
    """Who takes part in an apply, in the order of their names.

    `whole`: every engine of this host was asked for, and there may be several. `absent` says by
    name why others take no part: they stand still, and join later.
    """

    apply_id: str
    whole: bool
    members: list[LocalEngine] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def take_engines(
    appliers: Sequence[EngineApplier], group: TakenEngines, proof_s: float | None, patience_s: float
) -> AsyncIterator[TakenEngines]:
    """Take engines one after the other, always in the same order, and give all back at the end.

    `appliers` are in the order of the engines' names; `group` is filled. `patience_s` is the
    longest wait for an engine that generates and cannot be asked yet. Of several engines this
    raises, as `EngineSupervisor.exclusive` does, only if none can be had, or one that cannot
    generates.
    """
    first: WeightSyncError | None = None
    async with contextlib.AsyncExitStack() as stack:
        for applier in appliers:
            try:
                if group.whole:
                    await _answering(applier, patience_s)
                member = await stack.enter_async_context(_taken(applier, group, proof_s))
            except WeightSyncError as error:
                alone = len(appliers) == 1
                if alone or error.reason not in _ABSENT or await applier.supervisor.generates():
                    raise
                group.absent[applier.name] = error.message
                first = first or error
            else:
                group.members.append(member)
        if first is not None and not group.members:
            raise first
        yield group


@contextlib.asynccontextmanager
async def _taken(
    applier: EngineApplier, group: TakenEngines, proof_s: float | None
) -> AsyncIterator[LocalEngine]:
    """Take an engine, and give it back with its own failure.

    So what one engine does not survive is no reason to ask the ranks of the others.
    """
    failure: BaseException | None = None
    own: BaseException | None = None
    try:
        async with applier.supervisor.exclusive(group.apply_id, proof_s) as session:
            member = LocalEngine(applier, session, live_version(session))
            # For the other engines, until the version is known.
            applier.supervisor.progress.enter(pb.RUNNING_PHASE_WAIT)
            try:
                yield member
            except BaseException as error:  # noqa: BLE001 - it is raised below
                failure = error
                explained = any(one.error is not None for one in group.members)
                own = member.error if explained else error
                if own is not None:
                    raise own from None
    except BaseException:
        if failure is None or own is failure:
            raise
    if failure is not None:
        raise failure


async def _answering(applier: EngineApplier, patience_s: float) -> None:
    """Wait while an engine generates and nobody knows yet with what."""
    supervisor = applier.supervisor

    async def unknown() -> bool:
        return not supervisor.serving and await supervisor.generates()

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while await unknown():  # noqa: ASYNC110 - there is no event in another process
                await asyncio.sleep(_LOOK_S)


_MAX_PREPARE_S = 3600
#: Slots that a rolling apply needs: what is left stays staged for those that must go back.
_ROLLING_SLOTS = 3


def check_base(base: VersionRecord, members: Sequence[LocalEngine]) -> None:
    """Refuse to replace anything but `base` by a version that kept tensors of it."""
    for one in members:
        live = one.live.record
        if live.content_digest != base.content_digest:
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"send the update again: version {live.version} is live on engine {one.name}, so "
                f"the tensors that this update leaves out would be those of version {base.version}",
            )


def check_order(request: Request, slots: int) -> None:
    """Refuse an order that is none, or that this server cannot keep."""
    rolling = request.order == pb.ENGINE_ORDER_ROLLING
    if request.order not in pb.EngineOrder.values():
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "order must be TOGETHER or ROLLING; leave it out for TOGETHER",
        )
    if request.max_unavailable and not rolling:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "max_unavailable goes with order ROLLING; leave it out, or set the order",
        )
    if rolling:
        check_rolling_slots(slots)


def check_rolling_slots(slots: int) -> None:
    """Refuse to go from engine to engine where memory does not hold the way back."""
    if slots < _ROLLING_SLOTS:
        raise WeightSyncError(
            Reason.NO_SLOT,
            f"a rolling apply needs {_ROLLING_SLOTS} slots, for what is left stays staged, and "
            f"this server has {slots}; start it with --slots {_ROLLING_SLOTS}, or use TOGETHER",
        )


def check_ways(
    request: Request,
    group: TakenEngines,
    members: Sequence[LocalEngine],
    spec: PauseSpec,
) -> None:
    rolling = request.order == pb.ENGINE_ORDER_ROLLING
    fences = group.whole and not rolling and spec.mode != BETWEEN_STEPS
    check_members(members, spec, fences=fences)
    if spec.mode == BETWEEN_STEPS and len(members) > 1 and not rolling:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "use order ROLLING, or another pause mode: engines that change weights between two "
            "steps cannot wait for each other",
        )


def _check_keys(one: LocalEngine, spec: PauseSpec) -> None:
    recomputes = spec.mode == BETWEEN_STEPS and spec.cache is CacheUse.RECOMPUTE
    if recomputes and CACHE_LINEAGE not in one.session.info.capabilities:
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            "this engine cannot recompute keys between two steps, because it does not keep keys "
            "apart by version (WEIGHTSYNC_CACHE_LINEAGE, or an older weightsync release in vLLM); "
            "use pause.cache KEEP, or pause mode KEEP",
        )


def check_members(members: Sequence[LocalEngine], spec: PauseSpec, *, fences: bool) -> None:
    """Refuse an engine that cannot pause so.

    With `fences` refuse also one that would resume when its pause runs out undecided.
    """
    for one in members:
        if spec.mode == BETWEEN_STEPS and BETWEEN_STEPS not in one.session.info.capabilities:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "this engine cannot change weights between two steps: it has pipeline stages or "
                "data parallel ranks, or an older weightsync release in vLLM; use another pause "
                "mode",
            )
        _check_keys(one, spec)
        try:
            if fences:
                one.session.check_fences()
        except WeightSyncError as error:
            raise of_engine(one.name, error) from None


def check_prepare_timeout(request: pb.ApplyVersionRequest) -> None:
    seconds = request.prepare_timeout.ToNanoseconds() / 1e9
    if not 0 <= seconds <= _MAX_PREPARE_S:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"prepare_timeout must be 0 to {_MAX_PREPARE_S} s"
        )
