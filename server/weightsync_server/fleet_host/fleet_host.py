"""The engines behind one server as the host of a fleet's member.

One file: preparing, holding, releasing and going back share the engines that were taken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from weightsync import clock
from weightsync.backoff import until
from weightsync.engine import BETWEEN_STEPS, FENCES_ON_EXPIRY, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.decide import ApplyOrder, DecisionPlan, FleetVersion, Verdict
from weightsync_server.engine import EngineContext, EngineSet, EngineSupervisor
from weightsync_server.engine.apply_history import concern, note_reports
from weightsync_server.engine.gate import GatedEngine, plan_gates, unpack_options
from weightsync_server.engine.host_apply import (
    EnginePlan,
    JournalLedger,
    check_members,
    check_rolling_slots,
    drop,
    prepare_all,
    roll_out,
    score_live,
    ways_back_kept,
    with_baselines,
)
from weightsync_server.engine.journal import Answer
from weightsync_server.engine.outcome import ApplyCause, GatePlan, reject
from weightsync_server.engine.refusals import GateRefusedError
from weightsync_server.fleet_host.host_pause import HostPause, ServingGate, TakenHost
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import all_done
from weightsync_server.ops.traces import Work
from weightsync_server.residency.slot import SlotLease

#: The gates of engines that take a version, by their names.
Scoring = Callable[[VersionRecord, Sequence[GatedEngine], PauseSpec], Mapping[str, GatePlan]]


class HostCutover(TakenHost):
    """Brings a version to the engines, in steps between which the fleet decides.

    `patience_s` is the longest time that the decision may take. Between two steps the engines pause
    one after the other, when the fleet has decided. `slots` is how many versions memory holds.
    `scoring` returns which engines score the version, and how.
    """

    def __init__(
        self,
        record: VersionRecord,
        engines: EngineSet,
        gate: ServingGate,
        prepare_s: float,
        patience_s: float,
        spec: PauseSpec,
        slots: int,
        scoring: Scoring,
    ) -> None:
        super().__init__(record, engines, gate, prepare_s)
        self._patience_s, self._spec, self._slots = patience_s, spec, slots
        self._scoring = scoring
        self._plans: list[EnginePlan] = []
        self._ledger: JournalLedger | None = None
        #: What the engines have done when they serve the version, by name.
        self.reports: dict[str, pb.ApplyReport] = {}

    async def prepare(self) -> None:
        """Return when every rank has the version ready; `close` must follow what fails."""
        await self._carry_out(self._prepare)

    async def pause(self) -> None:
        """Return when all engines stand still, with the version in place and proved.

        Raises:
            WeightSyncError: APPLY_RESTORED: all serve what they served. Any other: an engine does
                not, and is brought there; or nothing would stand still.
        """
        if self._between:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "use another pause mode: engines that change weights between two steps are "
                "not paused",
            )
        self.stands_still = True
        await self._carry_out(self._pause)

    async def commit(self) -> None:
        """Return when all engines serve it; raises as `pause`."""
        self.stands_still = True
        await self._carry_out(self._commit)

    async def call_off(self) -> None:
        """Return when all engines serve what they served before."""
        try:
            await self._carry_out(self._call_off)
        except WeightSyncError as error:
            if error.reason is not Reason.APPLY_RESTORED:
                raise

    @property
    def _between(self) -> bool:
        return self._spec.mode == BETWEEN_STEPS

    async def _prepare(self) -> None:
        group = await self._take()
        differing = [
            one
            for one in group.members
            if one.live.record.content_digest != self.record.content_digest
        ]
        going = differing or group.members
        check_members(going, self._spec, fences=not self._between)
        if self._between and len(going) > 1:
            check_rolling_slots(self._slots)
        gates = self._scoring(self.record, [one.gated for one in going], self._spec)
        self._plans = await prepare_all(
            going, self.record, None, self._spec, ApplyCause(), durable=True, gates=gates
        )
        if gates:
            plans, self._plans = self._plans, []
            self._plans = await with_baselines(plans)

    async def _pause(self) -> None:
        if self._ledger is None:
            ledger = JournalLedger(self._plans, self._engines.host_journal, self._patience_s)
            await ledger.begin()
            self._ledger = ledger
        if await self._ledger.decidable() is Verdict.ABORT:
            await self._follow(Verdict.ABORT)

    async def _commit(self) -> None:
        if not self._plans:
            # It was done for a caller that was cancelled.
            return
        journal = self._engines.host_journal
        with ways_back_kept(self._plans):
            if self._between:
                self.reports = await roll_out(self._plans, 1, journal)
            else:
                await self._pause()
                await self._follow(Verdict.COMMIT)
                await score_live(self._plans, self.reports, journal, together=True)
        named = {one.member.name: one.plan for one in self._plans}
        await self._engines.host_journal.done(named, Answer())
        await self._give_back()

    async def _call_off(self) -> None:
        if self._ledger is None:
            # Its caller was cancelled before anything stood still.
            self.stands_still = False
            await self._give_back()
        else:
            await self._follow(Verdict.ABORT)

    async def _follow(self, verdict: Verdict) -> None:
        if self._ledger is not None:
            await self._ledger.decide(verdict, "the fleet has decided against it")
            self.reports = await self._ledger.ended()

    async def _give_back(self, error: BaseException | None = None) -> None:
        try:
            if self._ledger is not None:
                await self._ledger.close()
            elif not self.stands_still:
                # By itself, so that no engine counts as interrupted.
                await drop(self._plans)
        finally:
            self._plans = []
            await super()._give_back(error)


class MemberApplies:
    """Records what a host does for its fleet; `newest_plan` is as in `LocalHost`."""

    def __init__(
        self,
        context: EngineContext,
        newest_plan: Callable[[FleetVersion], DecisionPlan | None],
        member: str,
    ) -> None:
        self._history, self._who = context.history, f"fleet {context.fleet}"
        self._newest_plan, self._member = newest_plan, member

    def scoring(self, target: FleetVersion) -> Scoring:
        """Return how the engines of this host score what its fleet goes to, for itself or all."""
        plan = self._newest_plan(target)

        def gates(
            record: VersionRecord, engines: Sequence[GatedEngine], spec: PauseSpec
        ) -> Mapping[str, GatePlan]:
            options = unpack_options(plan.gate) if plan is not None else pb.GateOptions()
            scores = plan is not None and (options.each_engine or self._member in plan.canaries)
            return plan_gates(options, record, engines, spec, self._history) if scores else {}

        return gates

    def begin_work(self, target: FleetVersion) -> Work | None:
        """Return what is traced of an apply that begins, below that of its fleet; None: nothing."""
        work = self._history.begin_work(pb.APPLY_KIND_MEMBER)
        if work is not None and (plan := self._newest_plan(target)) is not None:
            work.concern(plan.traceparent)
        return work

    @contextlib.contextmanager
    def recorded(
        self, target: FleetVersion, live: FleetVersion | None, work: Work | None
    ) -> Iterator[pb.ApplyRecord]:
        """Record that the block makes a version live; after an error this host serves nothing.

        `work` is what was traced of it before.
        """
        entry = self._entry(target, live)
        with self._history.recorded(entry, work or self.begin_work(target)):
            try:
                yield entry
            except WeightSyncError:
                entry.result = pb.APPLY_RESULT_FENCED
                raise
            entry.result, entry.content_digest = pb.APPLY_RESULT_APPLIED, target.digest

    def add_failed(
        self,
        target: FleetVersion,
        live: FleetVersion | None,
        error: WeightSyncError,
        work: Work | None,
    ) -> None:
        """Record that a version did not become live, and this host serves what it served."""
        with (
            contextlib.suppress(WeightSyncError),
            self._history.recorded(self._entry(target, live), work),
        ):
            raise error

    def _entry(self, target: FleetVersion, live: FleetVersion | None) -> pb.ApplyRecord:
        entry = pb.ApplyRecord(
            kind=pb.APPLY_KIND_MEMBER, requested_by=self._who, version=target.number
        )
        if live is not None:
            entry.previous_version = live.number
        if (plan := self._newest_plan(target)) is not None:
            entry.fleet_apply, entry.order = plan.number, _ORDERS[plan.order]
        return entry


_ORDERS = {
    ApplyOrder.BARRIER: pb.ENGINE_ORDER_TOGETHER,
    ApplyOrder.ROLLING: pb.ENGINE_ORDER_ROLLING,
}


def _named(record: VersionRecord) -> FleetVersion:
    return FleetVersion(record.version, record.content_digest)


def _decided_against() -> WeightSyncError:
    return WeightSyncError(
        Reason.APPLY_RESTORED,
        "the fleet decided to abort it; see `weightsync fleet status` for the reason",
    )


#: How often it is looked whether a version has come, or an engine serves; seconds.
_LOOK_S = 0.05
#: How long engines that are slower than the first are waited for, seconds.
_OTHERS_S = 10.0


class FetchOnDemand(Protocol):
    """Brings the versions that are asked for; a follower does, from its origin at `url`."""

    url: str

    def wanting(self, version: int, content_digest: str = "") -> AbstractContextManager[None]:
        """Have a version brought, at once, until the block ends."""

    async def lacking(self, version: int, content_digest: str = "") -> WeightSyncError | None:
        """Return why a version will not come; None: it may."""


class LocalHost:
    """Implements `weightsync_server.fleet.member_steps.HostParticipant`.

    While it serves, a version goes to all engines in one cutover, of which the fleet's decision is
    the last step before they resume. A host that serves nothing has a gate shut in front of its
    engines: what it is let serve is written to the journal, the gate is opened, and each engine is
    reconciled to it.

    `source` returns what brings versions that are not here yet; None: nothing could. `newest_plan`
    returns that of the fleet's newest apply, if it goes to a version, for the history and the gate;
    `member` is the name in it of this host.
    """

    def __init__(
        self,
        engines: EngineSet,
        context: EngineContext,
        undecided_s: float,
        source: Callable[[], FetchOnDemand | None] = lambda: None,
        newest_plan: Callable[[FleetVersion], DecisionPlan | None] = lambda _: None,
        member: str = "",
    ) -> None:
        self._engines, self._model, self._limits = engines, context.model, context.limits
        self._undecided_s, self._fetch_s = undecided_s, context.limits.prepare_timeout_s
        self._source = source
        self._applies = MemberApplies(context, newest_plan, member)
        self._expected: FleetVersion | None = None
        self._fetching = contextlib.ExitStack()
        self._gate = ServingGate(context.joining)
        self._turn = asyncio.Lock()
        self._cutover: HostCutover | HostPause | None = None
        self._staged: SlotLease | None = None
        # Digest of what a gate of this host has refused last, and why.
        self._refused = ("", "")

    async def begin(self) -> None:
        """Let no engine begin to serve before the member says what; before engines are started."""
        await self._gate.shut()

    def expect(self, target: FleetVersion | None) -> None:
        """Have a version brought that will be asked for; nobody waits for it.

        `target` takes the place of the last one; None: none is expected.
        """
        if target == self._expected:
            return
        self._expected = target
        self._fetching.close()
        source = self._source()
        if target is not None and source is not None and self._known(target) is None:
            self._fetching.enter_context(source.wanting(target.number, target.digest))

    async def stop(self) -> None:
        """Leave everything as it is: engines that stand still are fenced when their lease ends."""
        self._fetching.close()
        async with self._turn:
            if self._cutover is not None:
                await self._cutover.close()
                self._cutover = None
            self._release()

    async def prepare(self, target: FleetVersion, pause: PauseSpec | None = None) -> None:
        """As `HostParticipant` says; a host that serves nothing has the version in memory."""
        async with self._turn:
            await self._let_go()
            if self._gate.is_shut:
                # Its member takes it for one that serves nothing; now it is so, before the version
                # is waited for.
                await self._fence_engines(f"this host applies version {target.number} first")
                await self._check_answered()
            record = await self._find(target)
            if self._gate.is_shut:
                timeout_s = self._limits.prepare_timeout_s
                self._staged = await self._model.stager.stage(record.version, timeout_s)
                return
            await self._until_settled()
            cutover = HostCutover(
                record,
                self._engines,
                self._gate,
                self._limits.prepare_timeout_s,
                2 * self._undecided_s,
                pause or PauseSpec(),
                len(self._model.slots.slots),
                self._applies.scoring(target),
            )
            cutover.work = self._applies.begin_work(target)
            try:
                await cutover.prepare()
            except BaseException as error:
                if cutover.work is not None:
                    cutover.work.end({"version": record.version}, str(error) or "it was cancelled")
                await cutover.close()
                self._gate.open()
                raise
            self._cutover = cutover

    async def pause(self) -> None:
        """As `HostParticipant` says; what was prepared is in place then."""
        async with self._turn:
            cutover = self._cutover or await self._pause_of_live()
            if cutover is None:
                await self._stop_serving("this host is paused with its fleet")
                return
            self._cutover = cutover
            try:
                await cutover.pause()
            except WeightSyncError as error:
                self._cutover = None
                self._note_gate(_named(cutover.record), error)
                await cutover.close()
                self._gate.open()
                self._applies.add_failed(_named(cutover.record), self.live(), error, cutover.work)
                raise

    async def commit(self, target: FleetVersion) -> None:
        async with self._turn:
            cutover = self._cutover
            work = cutover.work if cutover is not None else None
            try:
                with self._applies.recorded(target, self.live(), work) as entry:
                    if cutover is not None and cutover.record.content_digest == target.digest:
                        await cutover.commit()
                        self._cutover = None
                        self._gate.open()
                        if isinstance(cutover, HostCutover) and cutover.reports:
                            note_reports(entry, cutover.reports, {})
                    else:
                        self._check_let_go(target)
                        await self._place(await self._find(target))
            except WeightSyncError as error:
                self._note_gate(target, error)
                await self._stop_serving(error.message)
                raise
            finally:
                self._release()

    def _note_gate(self, target: FleetVersion, error: WeightSyncError) -> None:
        if isinstance(error, GateRefusedError):
            self._refused = target.digest, error.message

    def _check_let_go(self, target: FleetVersion) -> None:
        """Refuse to place, where nothing is scored, what a gate of this host has refused."""
        digest, why = self._refused
        if digest and digest == target.digest:
            raise WeightSyncError(
                Reason.VERSION_REJECTED,
                f"apply version {target.number} again, or another one: this host's gate refused it "
                f"({why})",
            )

    async def resume(self) -> None:
        async with self._turn:
            cutover = self._cutover
            try:
                if cutover is None:
                    await self._go_on()
                elif cutover.stands_still:
                    await cutover.call_off()
                    self._cutover = None
                    self._gate.open()
                    if isinstance(cutover, HostCutover):
                        self._applies.add_failed(
                            _named(cutover.record), self.live(), _decided_against(), cutover.work
                        )
                else:
                    await self._let_go()
            except WeightSyncError as error:
                await self._stop_serving(error.message)
                raise
            finally:
                self._release()

    async def fence(self, reason: str) -> None:
        async with self._turn:
            await self._stop_serving(reason)

    async def reject(self, digest: str, reason: str = "") -> None:
        for record in self._model.table.list():
            if record.content_digest == digest:
                why = reason or "the fleet rolled back from it"
                await reject(self._model.serving, record.version, why)

    async def accept(self, digest: str) -> None:
        if digest == self._refused[0]:
            self._refused = ("", "")
        same = [one for one in self._model.table.list() if one.content_digest == digest]
        if any(one.rejected_reason or one.hold_reason for one in same):
            # With it all that have this content.
            await self._model.serving.accept(same[0].version)

    def live(self) -> FleetVersion | None:
        """As `HostParticipant` says; engines that cannot be asked count for nothing."""
        versions = {
            FleetVersion(record.version, record.content_digest)
            for one in self._engines.supervisors
            if (record := one.proved) is not None
        }
        return versions.pop() if len(versions) == 1 else None

    async def find(self, version: int) -> FleetVersion:
        """Return a version of this server by its number; one that its origin has is fetched.

        Raises:
            WeightSyncError: VERSION_UNKNOWN, or VERSION_NOT_DURABLE while it is not committed.
        """
        record = await self._arrived(lambda: self._model.table.committed(version), version)
        if record is None:
            if self._source() is not None and self._model.table.find(version) is None:
                raise self._absent(version)
            self._model.table.get(version)
            raise WeightSyncError(
                Reason.VERSION_NOT_DURABLE,
                f"version {version} is not committed yet, and a fleet applies only durable "
                "versions; wait for its push to end",
            )
        concern(record)
        return FleetVersion(record.version, record.content_digest)

    async def _pause_of_live(self) -> HostPause | None:
        """Return a pause of what serves already what the fleet goes to; None: it must be fenced."""
        live = None if self._gate.is_shut else self.live()
        engines = [one for one in self._engines.supervisors if one.serving]
        able = all(FENCES_ON_EXPIRY in one.capabilities for one in engines)
        if live is None or not engines or not able:
            return None
        record = await self._find(live)
        return HostPause(record, self._engines, self._gate, self._limits.prepare_timeout_s)

    async def _let_go(self) -> None:
        self._release()
        cutover, self._cutover = self._cutover, None
        if cutover is None:
            return
        if cutover.stands_still:
            self._cutover = cutover
            await self._stop_serving("this host is applying another version")
            return
        await cutover.close()
        self._gate.open()

    def _release(self) -> None:
        if self._staged is not None:
            self._staged.release()
            self._staged = None

    async def _stop_serving(self, reason: str) -> None:
        await self._fence_engines(reason)
        if not self._gate.is_shut:
            # Who has it may be letting an engine serve.
            await self._gate.shut()
            await self._fence_engines(reason)
        cutover, self._cutover = self._cutover, None
        if cutover is not None:
            await cutover.close()

    async def _fence_engines(self, reason: str) -> None:
        await all_done(one.fence(reason) for one in self._engines.supervisors)

    async def _place(self, record: VersionRecord) -> None:
        """Let the engines serve a version that was not prepared on them."""
        await self._stop_serving(f"version {record.version} is being applied")
        with translate_os_errors("the apply"):
            await self._engines.host_journal.place(record.version)
        self._gate.open()
        await self._until_served(record)

    async def _go_on(self) -> None:
        live = self.live()
        if live is None:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                "it is not known which version the engines of this host hold; the server "
                "asks them again",
            )
        record = await self._find(live)
        decided = {one.journal.decided for one in self._engines.supervisors}
        if decided - {0, record.version}:
            with translate_os_errors("the apply"):
                await self._engines.host_journal.place(record.version)
        self._gate.open()
        await self._until_served(record)

    async def _until_served(self, record: VersionRecord) -> None:
        """Return when the engines serve a version, all or those that can soon, and nothing else."""
        begun = clock.monotonic()
        while clock.monotonic() < begun + self._limits.prepare_timeout_s:
            engines = self._engines.supervisors
            serving = [one for one in engines if one.serving and _holds(one, record)]
            others = [one for one in engines if one not in serving]
            late = clock.monotonic() >= begun + _OTHERS_S
            if serving and (not others or (late and not await _any_generates(others))):
                return
            if serving and not await _any_answers(others):
                return
            if not serving:
                await self._check_answered()
            await asyncio.sleep(_LOOK_S)
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            f"no engine of this host serves version {record.version} yet; see GetStatus",
        )

    async def _check_answered(self) -> None:
        """Refuse where no engine is there that could take a version: nobody waits for vLLM."""
        engines = self._engines.supervisors
        if engines and not await _any_answers(engines):
            names = ", ".join(sorted(one.name for one in engines))
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"no engine of this host answers ({names}); start vLLM, or stop this member's "
                "server so that its fleet continues without it",
                retry_after_s=1.0,
            )

    async def _until_settled(self) -> None:
        """Wait for engines whose ranks are being asked; those that are away are not waited for."""
        await until(
            lambda: all(one.serving or not one.proved for one in self._engines.supervisors),
            _LOOK_S,
            _OTHERS_S,
        )

    async def _find(self, target: FleetVersion) -> VersionRecord:
        """Return a version of this server; one that its origin has is fetched."""
        number, digest = target.number, target.digest
        record = await self._arrived(lambda: self._known(target), number, digest)
        if record is None:
            raise self._absent(number)
        return record

    def _absent(self, version: int) -> WeightSyncError:
        if (source := self._source()) is not None:
            lacks = (
                f"has not arrived from {source.url} in {self._fetch_s:g} s; check this server's "
                "log for the reason"
            )
        else:
            lacks = (
                "is not on this host; push it here, or start this server with --follow and the "
                "origin of the others"
            )
        return WeightSyncError(Reason.VERSION_UNKNOWN, f"version {version} of the fleet {lacks}")

    async def _arrived(
        self, find: Callable[[], VersionRecord | None], version: int, content_digest: str = ""
    ) -> VersionRecord | None:
        """Return what is here, or comes while it is waited for; None: it does not."""
        record, source = find(), self._source()
        if record is not None or source is None:
            return record
        with source.wanting(version, content_digest):
            refusal = await source.lacking(version, content_digest)
            if refusal is None:
                return await until(find, _LOOK_S, self._fetch_s)
            if (record := find()) is None:
                raise refusal
        return record

    def _known(self, target: FleetVersion) -> VersionRecord | None:
        same = [
            record
            for record in self._model.table.list()
            if record.content_digest == target.digest and record.commit is not None
        ]
        numbered = [record for record in same if record.version == target.number]
        return next(iter(numbered or same), None)


async def _any_answers(engines: list[EngineSupervisor]) -> bool:
    return any(await asyncio.gather(*(one.answers() for one in engines)))


async def _any_generates(engines: list[EngineSupervisor]) -> bool:
    return any(await asyncio.gather(*(one.generates() for one in engines)))


def _holds(engine: EngineSupervisor, record: VersionRecord) -> bool:
    proved = engine.proved
    return proved is not None and proved.content_digest == record.content_digest
