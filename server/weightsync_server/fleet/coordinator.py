"""A coordinator: writes a plan and brings it to its decision. Any process may, and keeps nothing.

One that dies leaves all in the register: members abort what is not decided, and follow what is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from weightsync import clock, failpoints
from weightsync.engine import PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync_server.coordination.coordination import CoordinationStore
from weightsync_server.decide import (
    ApplyOrder,
    ApplyPhase,
    Decide,
    DecisionPlan,
    DecisionState,
    FleetVersion,
    KeepWaiting,
    Reports,
    Verdict,
    divide,
    next_step,
)
from weightsync_server.fleet.fleet_history import (
    Apply,
    History,
    HistoryReader,
    Seen,
    compact,
    keep_marks,
)
from weightsync_server.fleet.fleet_records import (
    ANOTHER,
    MEMBERS,
    UNKNOWN_OUTCOMES,
    coordinator_key,
    create_until_answered,
    decide,
    decode_member,
    decode_rollback,
    encode_pause,
    encode_plan,
    encode_roster,
    is_pause_of,
    number_in,
    parse_reports,
    pause_key,
    plan_key,
    refusals,
    reports_prefix,
    rollback_key,
    roster_key,
    roster_prefix,
)
from weightsync_server.fleet.fleet_settings import FleetLimits
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet.plan_checks import (
    check_new,
    check_pause,
    planned_with,
    previous_of,
    rollback_target,
)
from weightsync_server.ops import traces
from weightsync_server.ops.tasks import cancel_tasks

logger = logging.getLogger(__name__)


class CoordinatorTimeouts:
    def __init__(self, limits: FleetLimits) -> None:
        self._limits = limits
        self._step, self._begun, self._paused_at = 1, clock.monotonic(), 0.0
        self._missed: dict[str, float] = {}

    def is_over(self, apply: Apply) -> bool:
        now = clock.monotonic()
        if apply.step != self._step:
            # Each wave has its time.
            self._step, self._begun = apply.step, now
        if apply.pause and not self._paused_at:
            self._paused_at = now
        # Before the members' own limit, which would fence them.
        paused_too_long = self._paused_at and now >= self._paused_at + self._limits.undecided_s / 2
        return bool(paused_too_long) or now >= self._begun + self._limits.prepare_s

    def gone(self, members: Iterable[str], present: Iterable[str]) -> frozenset[str]:
        """Return the members that were missed at each look for the time of grace."""
        now = clock.monotonic()
        missing = frozenset(members) - frozenset(present)
        self._missed = {name: self._missed.get(name, now) for name in missing}
        return frozenset(
            name for name, since in self._missed.items() if now >= since + self._limits.grace_s
        )

    def forget(self) -> None:
        """Miss nobody any more: a register that does not answer says nothing about members."""
        self._missed.clear()


#: The longest wait between two looks, and for the decision against an apply, seconds.
_LOOK_S, _ABORT_S = 1.0, 10.0
#: Between two decisions against one apply, seconds: what was decided is read meanwhile.
_RETRY_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """What became of an apply, and why it was aborted, or by which one it was overtaken.

    `lagging` members may not be on what was decided yet; they go on trying.
    """

    number: int
    verdict: Verdict
    target: FleetVersion
    reason: str = ""
    lagging: tuple[str, ...] = ()


class Coordinator:
    """Brings versions live on a fleet.

    Where the `journal` of this host's member knows that the register was put back, nothing is
    planned.
    """

    def __init__(
        self,
        coordination: CoordinationStore,
        name: str,
        limits: FleetLimits,
        journal: MemberJournal | None = None,
    ) -> None:
        self._coordination, self._name = coordination, name
        self._limits, self._journal = limits, journal
        #: How far an apply was when that was logged last.
        self._logged: tuple[int, ...] = ()
        self._reader = HistoryReader(coordination)
        self._warned: frozenset[str] = frozenset()
        #: Why members do not follow the register, by name.
        self._refusals: dict[str, str] = {}

    async def apply(
        self,
        target: FleetVersion,
        order: ApplyOrder,
        max_unavailable: int = 1,
        key: str = "",
        pause: PauseSpec | None = None,
        *,
        clears: bool = False,
        gate: str = "",
    ) -> Outcome:
        """Have every member serve a version, or none; returns when that is decided and done.

        The content of `target` is one that no other version of that number has. An apply that was
        planned with the idempotency key `key` is joined; "": none. With `clears`, a rejected
        content is accepted again. `gate` is as in `DecisionPlan`.

        Raises:
            WeightSyncError: APPLY_BUSY: another one runs. VERSION_REJECTED, VERSION_CONFLICT,
                VERSION_BELOW_LIVE, NO_ROLLBACK, REQUEST_INVALID. SERVER_AWAY: nobody is there.
                DEADLINE_EXCEEDED: the register does not answer, and nothing was planned.
        """
        history = await self._read()
        if earlier := planned_with(history, key, target):
            return await self._join(history, earlier)
        check_pause(order, pause, self._limits.undecided_s)
        history = await self._free(over_damage=order is ApplyOrder.BARRIER)
        check_new(history, target, clears=clears)
        make = partial(
            DecisionPlan,
            order=order,
            target=target,
            key=key,
            pause=pause,
            clears=clears,
            gate=gate,
        )
        return await self._plan_and_drive(history, order, max_unavailable, make)

    async def rollback(
        self,
        order: ApplyOrder,
        max_unavailable: int = 1,
        key: str = "",
        pause: PauseSpec | None = None,
        reason: str = "",
    ) -> Outcome:
        """Go back to the version of the COMMIT before, and reject the content that is left.

        Raises NO_ROLLBACK, and what `apply` raises.
        """
        history = await self._read()
        if earlier := planned_with(history, key, None):
            return await self._join(history, earlier)
        # After the history: what that has forgotten is there.
        if key and (kept := await self._coordination.get(rollback_key(key))) is not None:
            number, target, verdict, why = decode_rollback(kept)
            return Outcome(number, verdict, target, why)
        check_pause(order, pause, self._limits.undecided_s)
        history = await self._free()
        target, left = rollback_target(history)
        make = partial(
            DecisionPlan,
            order=order,
            target=target,
            rejects=left.digest,
            key=key,
            pause=pause,
            reason=reason,
        )
        return await self._plan_and_drive(history, order, max_unavailable, make)

    async def abort(self, reason: str = "") -> Outcome | None:
        """Try to decide against the running apply; return None if none runs.

        It may be committed meanwhile, and then stays so. The members go back by themselves. Raises
        NOT_SUPPORTED when this release cannot read the newest apply; DEADLINE_EXCEEDED: it is not
        known what is decided.
        """
        try:
            async with asyncio.timeout(_ABORT_S):
                return await self._abort(reason)
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                "call again once the register accepts writes: it has accepted none for "
                f"{_ABORT_S:g} s, and may still accept this one; check its log: it may be full or "
                "lack a majority",
            ) from None

    async def _abort(self, reason: str) -> Outcome | None:
        why = f"it was ended by a call: {reason}" if reason else "it was ended by a call"
        history = await self._read()
        apply = history.running
        if apply is None and not history.unreadable:
            return None
        await self._heed()
        if apply is None or history.unreadable:
            return await self._abort_unread(history, why)
        plan = apply.plan
        while (verdict := apply.outcome) is None:
            # Each wave of a rolling apply has a decision: one may come before this.
            given = (plan.number, apply.step, Verdict.ABORT, self._name, why, plan.nonce)
            await decide(self._coordination, *given)
            apply = await self._find(plan.number)
        return Outcome(plan.number, verdict, plan.target, apply.reason)

    async def _abort_unread(self, history: History, why: str) -> Outcome:
        """Decide against an apply of which nothing but its number can be read."""
        number, verdict = history.unreadable_number, None
        if not history.unreadable_commits and not history.unreadable_decided:
            verdict = await decide(self._coordination, number, 1, Verdict.ABORT, self._name, why)
        if verdict is not Verdict.ABORT:
            raise WeightSyncError(Reason.NOT_SUPPORTED, history.unreadable)
        return Outcome(number, verdict, FleetVersion(0, ""), why)

    async def _join(self, history: History, number: int) -> Outcome:
        """Drive an apply that was planned before; one that runs only if nobody has read more."""
        runs = {one.plan.number for one in history.applies if one.outcome is None}
        if number in runs:
            await self._heed()
        return await self.drive(number)

    async def drive(self, number: int) -> Outcome:
        """Bring a plan to its decision, whoever wrote it, and wait for its members.

        Goes on while the register does not answer. Raises APPLY_BUSY when other applies overtook it
        long ago.
        """
        patience, come = CoordinatorTimeouts(self._limits), (0, False)
        async with self._hints() as hinted:
            while True:
                hinted.clear()
                try:
                    apply = await self._find(number)
                    if apply.outcome is not None:
                        return await self._settled(apply, hinted)
                    far = apply.step, apply.pause
                    if await self._advance(apply, patience) and far != come:
                        come = far
                        continue
                except WeightSyncError as error:
                    if error.reason not in UNKNOWN_OUTCOMES:
                        raise
                    logger.warning("the fleet's register does not answer: %s", error)
                    patience.forget()
                await self._pause(hinted)

    async def _advance(self, apply: Apply, patience: CoordinatorTimeouts) -> bool:
        plan = apply.plan
        if not plan.waves:
            # Nobody to wait for is not all that there are. Another apply is the newest one.
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"restore {roster_prefix(plan.nonce)}, or call `weightsync fleet abort` for each "
                f"apply down to {plan.number}, the newest one first, and begin another: the "
                f"members of apply {plan.number} cannot be read",
            )
        reports = await self._reports(apply)
        present = frozenset(await self._present())
        gone, late = patience.gone(plan.members, present), patience.is_over(apply)
        state = DecisionState(
            reports, present, apply.step, paused=apply.pause, gone=gone, late=late
        )
        order = next_step(plan, state)
        if isinstance(order, KeepWaiting):
            return False
        if isinstance(order, Decide):
            await failpoints.reach("fleet.coordinate")
            # Of those that come in this very moment a barrier's COMMIT would know nothing.
            whole = plan.order is ApplyOrder.BARRIER and order.verdict is Verdict.COMMIT
            who = plan.members if whole else ()
            given = (
                plan.number,
                order.step,
                order.verdict,
                self._name,
                order.reason,
                plan.nonce,
            )
            await decide(self._coordination, *given, among=who)
            await failpoints.reach("fleet.coordinated")
        else:
            word, key = encode_pause(plan.nonce), pause_key(plan.number)
            found = await create_until_answered(self._coordination, key, word)
            if not is_pause_of(found, plan.nonce):
                # Nobody of this plan would ever pause.
                given = (plan.number, apply.step, Verdict.ABORT, self._name, ANOTHER, plan.nonce)
                await decide(self._coordination, *given)
        return True

    async def _plan_and_drive(
        self,
        history: History,
        order: ApplyOrder,
        size: int,
        make: Callable[..., DecisionPlan],
    ) -> Outcome:
        present = await self._present()
        self._check_refusals()
        waves = divide(present, order, size)
        if not waves:
            raise WeightSyncError(
                Reason.SERVER_AWAY,
                "start the members of the fleet with --fleet and this register: none is in "
                "the fleet's register",
            )
        number = await self._free_number(history)
        plan = make(
            number=number,
            nonce=secrets.token_hex(8),
            previous=previous_of(history, present, order),
            waves=waves,
            decisions=len(waves) + (order is ApplyOrder.ROLLING),
            traceparent=work.traceparent if (work := traces.current()) is not None else "",
        )
        lease, ttl_s = coordinator_key(plan.nonce), self._limits.member_ttl_s
        membership = await self._coordination.member(lease, self._name.encode(), ttl_s)
        try:
            await self._write(plan)
            await failpoints.reach("fleet.planned")
            return await self.drive(plan.number)
        finally:
            await membership.close()

    async def _heed(self) -> None:
        """Decide nothing where a member refuses what this register says: it has read more."""
        await self._present()
        self._check_refusals()

    async def _free_number(self, history: History) -> int:
        """Return the number of the next plan: nothing that nobody planned follows it.

        Such a stray plan would count from then on. It is decided against, and so is each number
        before it: who would still take one of those has no apply beside this one.
        """
        free = history.number + 1
        while stray := history.foreign.intersection([plan_key(free), plan_key(free + 1)]):
            last, reason = number_in(min(stray)), "no fleet has planned it"
            for number in range(free, last + 1):
                given = (number, 1, Verdict.ABORT, self._name, reason)
                if await decide(self._coordination, *given) is not Verdict.ABORT:
                    raise _busy(number)
            free = last + 1
        return free

    def _check_refusals(self) -> None:
        if self._refusals:
            name, why = min(self._refusals.items())
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"nothing is planned or ended, because {name} takes no part: {why}",
            )

    async def _write(self, plan: DecisionPlan) -> None:
        parts = encode_roster(plan.waves)
        for number, part in enumerate(parts):
            await create_until_answered(self._coordination, roster_key(plan.nonce, number), part)
        body = encode_plan(plan, len(parts))
        if await create_until_answered(self._coordination, plan_key(plan.number), body) != body:
            # Nobody will ask for it.
            mine = [roster_key(plan.nonce, number) for number in range(len(parts))]
            await self._coordination.delete(mine)
            raise _busy(plan.number)

    async def _read(self) -> History:
        # Others of this host read meanwhile, and may know more when this reading has ended.
        seen = self._journal.seen if self._journal is not None else Seen()
        history = await self._reader.read()
        if self._journal is not None and (why := history.lacks(seen)):
            raise WeightSyncError(Reason.DATA_CORRUPT, self._journal.refusal_of(why))
        return history

    async def _readable(self, *, over_damage: bool) -> History:
        history = await self._read()
        if history.unreadable and not (over_damage and history.unreadable_decided):
            raise WeightSyncError(Reason.NOT_SUPPORTED, history.unreadable)
        return history

    async def _free(self, *, over_damage: bool = False) -> History:
        """Return the history once no apply runs; one that has lost its coordinator is aborted.

        With `over_damage`, the newest one may be damaged that is decided.
        """
        while True:
            history = await self._readable(over_damage=over_damage)
            running = history.running
            if running is None:
                return history
            plan = running.plan
            if await self._coordination.get(coordinator_key(plan.nonce)) is not None:
                far = f"{len(running.decisions)} of {plan.decisions} decisions"
                raise _busy(plan.number, f" (to version {plan.target.number}, {far})")
            # What a register that was put back says of it may not be all that there was.
            await self._heed()
            reason = "its coordinator has exited, and another apply is waiting"
            given = (plan.number, running.step, Verdict.ABORT, self._name, reason, plan.nonce)
            await decide(self._coordination, *given)
            await asyncio.sleep(_RETRY_S)

    async def _find(self, number: int) -> Apply:
        history = await self._read()
        found = [one for one in history.applies if one.plan.number == number]
        if history.unreadable and history.unreadable_number == number:
            raise WeightSyncError(Reason.DATA_CORRUPT, history.unreadable)
        if not found:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                f"apply {number} is older than the applies that are still recorded; see "
                "`weightsync fleet status`",
            )
        (apply,) = found
        # Of one that another one has followed the waves are not read with it.
        return apply if apply.plan.waves else await self._reader.whole(apply)

    async def _settled(self, apply: Apply, hinted: asyncio.Event) -> Outcome:
        plan, verdict = apply.plan, apply.outcome or Verdict.ABORT
        lagging, reason = list[str](), apply.reason
        if verdict is Verdict.COMMIT:
            await keep_marks(self._coordination, [plan])
            end = clock.monotonic() + self._limits.settle_s
            while lagging := (await self._reports(apply)).lacking(ApplyPhase.DONE, plan.members):
                newest = (await self._read()).seen.number
                if newest > plan.number:
                    # Members say nothing more of this one.
                    reason = f"superseded by apply {newest} before all members were confirmed live"
                    break
                if clock.monotonic() >= end:
                    break
                await self._pause(hinted)
                hinted.clear()
        try:
            await compact(self._coordination, await self._reader.read())
        except WeightSyncError as error:
            logger.warning("old applies could not be removed from the register yet: %s", error)
        return Outcome(plan.number, verdict, plan.target, reason, tuple(lagging))

    async def _reports(self, apply: Apply) -> Reports:
        number = apply.plan.number
        listed = await self._coordination.list(reports_prefix(number))
        reports = parse_reports(number, listed, apply.plan.nonce)
        said = [len(reports.of(phase)) for phase in ApplyPhase]
        progress = (number, len(apply.decisions), apply.plan.decisions, *said)
        if progress != self._logged:
            level, named = self._importance(apply, progress)
            self._logged = progress
            logger.log(
                level,
                "apply %d of the fleet: %d of %d decisions; %d prepared, %d ready, %d done",
                *progress,
                extra=named,
            )
        return reports

    def _importance(self, apply: Apply, progress: tuple[int, ...]) -> tuple[int, dict[str, Any]]:
        """Return the level and the event of a line: of its last decision, its end, or a step."""
        number, made, all_, *_, done = progress
        facts = {"fleet_apply": number, "version": apply.plan.target.number}
        if made == all_ and done >= sum(map(len, apply.plan.waves)):
            return logging.INFO, event("fleet.done", **facts)
        if made == all_ and progress[:3] != self._logged[:3]:
            return logging.INFO, event("fleet.decided", **facts)
        return logging.DEBUG, event("fleet.progress", **facts)

    async def _present(self) -> dict[str, FleetVersion | None]:
        alive, permanent = await self._coordination.members(MEMBERS)
        if permanent and permanent != self._warned:
            self._warned = permanent
            logger.warning(
                "%s belongs to no running member and is ignored; remove it from %s",
                ", ".join(sorted(permanent)),
                self._coordination.url,
            )
        self._refusals = refusals(alive)
        return {key[len(MEMBERS) :]: _live_of(value) for key, value in alive.items()}

    async def _pause(self, hinted: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_LOOK_S, self._limits.poll_s)):
                await hinted.wait()

    @contextlib.asynccontextmanager
    async def _hints(self) -> AsyncIterator[asyncio.Event]:
        """Yield an event that is set when something of an apply may have changed."""
        hinted = asyncio.Event()

        async def watch() -> None:
            try:
                async with contextlib.aclosing(self._coordination.watch("")) as hints:
                    async for _ in hints:
                        hinted.set()
            except WeightSyncError as error:
                logger.warning("the fleet's register cannot be watched, only read: %s", error)

        task = asyncio.create_task(watch(), name="coordinator watch")
        try:
            yield hinted
        finally:
            await cancel_tasks(task)


def _live_of(value: bytes) -> FleetVersion | None:
    try:
        return decode_member(value)[0]
    except WeightSyncError:
        # Of another release: it takes part in what it understands.
        return None


def _busy(number: int, far: str = "") -> WeightSyncError:
    return WeightSyncError(
        Reason.APPLY_BUSY,
        f"apply {number} of the fleet runs{far}; wait for it, see `weightsync fleet status`, or "
        "end it with `weightsync fleet abort`",
    )
