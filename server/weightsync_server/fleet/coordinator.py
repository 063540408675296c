"""A coordinator: writes a plan and brings it to its decision. Any process may, and keeps nothing.

One that dies leaves all it has done in the register: members abort what is not decided, and follow
what is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync import clock, failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.content_marks import keep_marks
from weightsync_server.fleet.coordinator_patience import Patience
from weightsync_server.fleet.coordinator_steps import Decide, next_order, parse_reports
from weightsync_server.fleet.decision import UNKNOWN_OUTCOMES, create_until_answered, decide
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_keys import (
    MEMBERS,
    coordinator_key,
    pause_key,
    plan_key,
    reports_prefix,
    rollback_key,
    roster_key,
)
from weightsync_server.fleet.fleet_plan import (
    ApplyPhase,
    FleetPlan,
    FleetVersion,
    Kind,
    Verdict,
    divide,
)
from weightsync_server.fleet.fleet_records import (
    decode_member,
    decode_rollback,
    encode_plan,
    encode_roster,
)
from weightsync_server.fleet.history_compaction import compact
from weightsync_server.fleet.plan_checks import (
    check_new,
    check_pause,
    planned_with,
    previous_of,
    rollback_target,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from weightsync.engine import PauseSpec
    from weightsync_server.fleet.coordinator_steps import Reports
    from weightsync_server.fleet.fleet_history import Apply, History
    from weightsync_server.fleet.fleet_limits import FleetLimits
    from weightsync_server.register.register import Register

__all__ = ["Coordinator", "FleetProgress", "Outcome"]

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


@dataclass(frozen=True)
class FleetProgress:
    """How far an apply is.

    Attributes:
        number: Of the apply.
        decided: How many decisions were made.
        decisions: How many it takes.
        prepared: Members that have said so.
        ready: Members of a barrier that stand still.
        done: Members on which it is live.
    """

    number: int
    decided: int
    decisions: int
    prepared: int
    ready: int
    done: int


@dataclass(frozen=True)
class Outcome:
    """What became of an apply.

    Attributes:
        number: Of the apply.
        verdict: What was decided.
        target: What it was about.
        reason: Why it was aborted.
        lagging: Members that are not known to be on what was decided yet; they go on trying.
    """

    number: int
    verdict: Verdict
    target: FleetVersion
    reason: str = ""
    lagging: tuple[str, ...] = ()


class Coordinator:
    """Brings versions live on a fleet.

    Args:
        register: The fleet's.
        name: Who decides, for people.
        limits: How long to wait.
        on_progress: Called whenever something was read.
    """

    def __init__(
        self,
        register: Register,
        name: str,
        limits: FleetLimits,
        on_progress: Callable[[FleetProgress], None] = lambda _: None,
    ) -> None:
        self._register, self._name = register, name
        self._limits, self._on_progress = limits, on_progress
        self._reader = HistoryReader(register)
        self._warned: frozenset[str] = frozenset()

    async def apply(
        self,
        target: FleetVersion,
        kind: Kind,
        max_unavailable: int = 1,
        key: str = "",
        pause: PauseSpec | None = None,
        *,
        clears: bool = False,
    ) -> Outcome:
        """Have every member serve a version, or none; returns when that is decided and done.

        Args:
            target: The version, with a content that no other version of that number has.
            kind: Barrier or rolling.
            max_unavailable: How many members a wave of a rolling apply has.
            key: Idempotency key: an apply that was planned with it is joined; "": none.
            pause: How members pause; None: nobody chooses.
            clears: Whether the content is accepted again, if it was rejected.

        Raises:
            WeightSyncError: APPLY_BUSY: another one runs. VERSION_REJECTED, VERSION_CONFLICT,
                VERSION_BELOW_LIVE, NO_ROLLBACK, REQUEST_INVALID. SERVER_AWAY: nobody is there.
                DEADLINE_EXCEEDED: the register does not answer, and nothing was planned.
        """
        if earlier := planned_with(await self._reader.read(), key, target):
            return await self.drive(earlier)
        check_pause(kind, pause, self._limits.undecided_s)
        history = await self._free()
        check_new(history, target, clears=clears)
        return await self._plan_and_drive(
            history, target, kind, max_unavailable, key=key, pause=pause, clears=clears
        )

    async def rollback(
        self,
        kind: Kind,
        max_unavailable: int = 1,
        key: str = "",
        pause: PauseSpec | None = None,
        reason: str = "",
    ) -> Outcome:
        """Go back to the version of the COMMIT before, and reject the content that is left.

        Raises:
            WeightSyncError: NO_ROLLBACK, and as `apply`.
        """
        if earlier := planned_with(await self._reader.read(), key, None):
            return await self.drive(earlier)
        # After the history: what that has forgotten is there.
        if key and (kept := await self._register.get(rollback_key(key))) is not None:
            number, target, verdict, why = decode_rollback(kept)
            return Outcome(number, verdict, target, why)
        check_pause(kind, pause, self._limits.undecided_s)
        history = await self._free()
        target, left = rollback_target(history)
        return await self._plan_and_drive(
            history,
            target,
            kind,
            max_unavailable,
            rejects=left.digest,
            key=key,
            pause=pause,
            reason=reason,
        )

    async def abort(self, reason: str = "") -> Outcome | None:
        """Try to decide against the apply that runs; None: none does.

        Whoever decides first has decided: an apply may be committed meanwhile, and stays so. The
        members go back by themselves.

        Args:
            reason: Why, for people.

        Raises:
            WeightSyncError: NOT_SUPPORTED: this release cannot read the newest one. As `decide` and
                `Register.list`.
        """
        why = f"it was ended by a call: {reason}" if reason else "it was ended by a call"
        history = await self._reader.read()
        if history.unreadable:
            return await self._abort_unread(history, why)
        apply = history.running
        if apply is None:
            return None
        plan = apply.plan
        while (verdict := apply.outcome) is None:
            # Each wave of a rolling apply has a decision: one may come before this.
            await decide(self._register, plan.number, apply.step, Verdict.ABORT, self._name, why)
            apply = await self._find(plan.number)
        return Outcome(plan.number, verdict, plan.target, apply.reason)

    async def _abort_unread(self, history: History, why: str) -> Outcome:
        """Decide against an apply of which nothing but its number can be read."""
        number, verdict = history.unreadable_number, None
        if not history.unreadable_commits:
            verdict = await decide(self._register, number, 1, Verdict.ABORT, self._name, why)
        if verdict is not Verdict.ABORT:
            raise WeightSyncError(Reason.NOT_SUPPORTED, history.unreadable)
        return Outcome(number, verdict, FleetVersion(0, ""), why)

    async def drive(self, number: int) -> Outcome:
        """Bring a plan to its decision, whoever wrote it, and wait for its members.

        Goes on for as long as the register does not answer.

        Raises:
            WeightSyncError: APPLY_BUSY: it was overtaken by others, long ago. PERMISSION_DENIED,
                UNAUTHENTICATED, NOT_SUPPORTED.
        """
        patience = Patience(self._limits)
        async with self._hints() as hinted:
            while True:
                hinted.clear()
                try:
                    apply = await self._find(number)
                    if apply.outcome is not None:
                        return await self._settled(apply, hinted)
                    if await self._advance(apply, patience):
                        continue
                except WeightSyncError as error:
                    if error.reason not in UNKNOWN_OUTCOMES:
                        raise
                    logger.warning("the fleet's register does not answer: %s", error)
                    patience.forget()
                await self._pause(hinted)

    async def _advance(self, apply: Apply, patience: Patience) -> bool:
        """Do what is next, if anything is."""
        plan = apply.plan
        reports = await self._reports(apply)
        present = await self._present()
        gone = patience.gone(plan.members, present)
        late = patience.is_over(apply)
        order = next_order(apply, reports, frozenset(present), gone, late=late)
        if order is None:
            return False
        if isinstance(order, Decide):
            await failpoints.reach("fleet.coordinate")
            # Of those that come in this very moment a barrier's COMMIT would know nothing.
            whole = plan.kind is Kind.BARRIER and order.verdict is Verdict.COMMIT
            who = plan.members if whole else ()
            given = (plan.number, order.step, order.verdict, self._name, order.reason)
            await decide(self._register, *given, among=who)
            await failpoints.reach("fleet.coordinated")
        else:
            await create_until_answered(self._register, pause_key(plan.number), b"{}")
        return True

    async def _plan_and_drive(
        self,
        history: History,
        target: FleetVersion,
        kind: Kind,
        size: int,
        *,
        rejects: str = "",
        key: str = "",
        pause: PauseSpec | None = None,
        reason: str = "",
        clears: bool = False,
    ) -> Outcome:
        present = await self._present()
        waves = divide(present, kind, size)
        if not waves:
            raise WeightSyncError(
                Reason.SERVER_AWAY,
                "no member is in the fleet's register; start them with --fleet and this register",
            )
        plan = FleetPlan(
            number=history.number + 1,
            nonce=secrets.token_hex(8),
            kind=kind,
            target=target,
            previous=previous_of(history, present, kind),
            waves=waves,
            decisions=len(waves) + (kind is Kind.ROLLING),
            rejects=rejects,
            key=key,
            pause=pause,
            reason=reason,
            clears=clears,
        )
        lease, ttl_s = coordinator_key(plan.nonce), self._limits.member_ttl_s
        membership = await self._register.member(lease, self._name.encode(), ttl_s)
        try:
            await self._write(plan)
            await failpoints.reach("fleet.planned")
            return await self.drive(plan.number)
        finally:
            await membership.close()

    async def _write(self, plan: FleetPlan) -> None:
        parts = encode_roster(plan.waves)
        for number, part in enumerate(parts):
            await create_until_answered(self._register, roster_key(plan.nonce, number), part)
        body = encode_plan(plan, len(parts))
        if await create_until_answered(self._register, plan_key(plan.number), body) != body:
            # Nobody will ask for it.
            mine = [roster_key(plan.nonce, number) for number in range(len(parts))]
            await self._register.delete(mine)
            raise _busy(plan.number)

    async def _readable(self) -> History:
        history = await self._reader.read()
        if history.unreadable:
            raise WeightSyncError(Reason.NOT_SUPPORTED, history.unreadable)
        return history

    async def _free(self) -> History:
        """Return the history once no apply runs; one that has lost its coordinator is aborted."""
        while True:
            history = await self._readable()
            running = history.running
            if running is None:
                return history
            plan = running.plan
            if await self._register.get(coordinator_key(plan.nonce)) is not None:
                far = f"{len(running.decisions)} of {plan.decisions} decisions"
                raise _busy(plan.number, f" (to version {plan.target.number}, {far})")
            reason = "its coordinator is gone, and another apply waits"
            await decide(
                self._register, plan.number, running.step, Verdict.ABORT, self._name, reason
            )

    async def _find(self, number: int) -> Apply:
        history = await self._reader.read()
        found = [one for one in history.applies if one.plan.number == number]
        if not found:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                f"apply {number} was overtaken by many others and is not known any more; see "
                "`weightsync fleet status`",
            )
        return found[0]

    async def _settled(self, apply: Apply, hinted: asyncio.Event) -> Outcome:
        plan, verdict = apply.plan, apply.outcome or Verdict.ABORT
        lagging: list[str] = []
        if verdict is Verdict.COMMIT:
            await keep_marks(self._register, [plan])
            end = clock.monotonic() + self._limits.settle_s
            while lagging := (await self._reports(apply)).lacking(ApplyPhase.DONE, plan.members):
                if clock.monotonic() >= end:
                    break
                await self._pause(hinted)
                hinted.clear()
        try:
            await compact(self._register, await self._reader.read())
        except WeightSyncError as error:
            logger.warning("old applies stay in the register for now: %s", error)
        return Outcome(plan.number, verdict, plan.target, apply.reason, tuple(lagging))

    async def _reports(self, apply: Apply) -> Reports:
        number = apply.plan.number
        reports = parse_reports(number, await self._register.list(reports_prefix(number)))
        prepared, ready, done = (len(reports.of(phase)) for phase in ApplyPhase)
        made, needed = len(apply.decisions), apply.plan.decisions
        self._on_progress(FleetProgress(number, made, needed, prepared, ready, done))
        return reports

    async def _present(self) -> dict[str, FleetVersion | None]:
        alive, permanent = await self._register.members(MEMBERS)
        if permanent and permanent != self._warned:
            self._warned = permanent
            logger.warning(
                "%s: no member's, for nobody renews it, and waited for by nobody; remove it from "
                "%s",
                ", ".join(sorted(permanent)),
                self._register.url,
            )
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
                async with contextlib.aclosing(self._register.watch("")) as hints:
                    async for _ in hints:
                        hinted.set()
            except WeightSyncError as error:
                logger.warning("the fleet's register cannot be watched, only read: %s", error)

        task = asyncio.create_task(watch(), name="coordinator watch")
        try:
            yield hinted
        finally:
            task.cancel()
            await asyncio.wait({task})


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
