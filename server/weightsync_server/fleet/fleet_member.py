"""A member: reads what the fleet has decided, and has its host follow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync import clock, failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.decision import create_until_answered, decide
from weightsync_server.fleet.fleet_keys import rejected_key, report_key
from weightsync_server.fleet.fleet_plan import Verdict
from weightsync_server.fleet.fleet_records import (
    check_member,
    decode_member,
    encode_member,
    encode_report,
)
from weightsync_server.fleet.member_steps import (
    Abort,
    Accept,
    Commit,
    Fence,
    MemberState,
    Mode,
    PauseHost,
    Prepare,
    Reject,
    Resume,
    Say,
    Wait,
    next_step,
)
from weightsync_server.fleet.member_view import MemberView

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from weightsync_server.fleet.fleet_limits import FleetLimits
    from weightsync_server.fleet.fleet_plan import FleetVersion
    from weightsync_server.fleet.host_apply import HostApply
    from weightsync_server.fleet.member_journal import MemberJournal
    from weightsync_server.fleet.member_steps import Step
    from weightsync_server.register.register import Register

__all__ = ["FleetMember"]

logger = logging.getLogger(__name__)

#: The longest wait until the host is looked at again, and for an answer of the register; seconds.
_LOOK_S, _ANSWER_S = 1.0, 5.0


class FleetMember:
    """Drives one host; nothing else makes versions live there while it runs.

    Args:
        register: The fleet's.
        name: Of the member, one in its fleet.
        host: What it drives.
        journal: What it knows after a crash.
        limits: How long to wait.
        address: Where the host's server is, for people.

    Raises:
        WeightSyncError: REQUEST_INVALID; the name.
    """

    def __init__(
        self,
        register: Register,
        name: str,
        host: HostApply,
        journal: MemberJournal,
        limits: FleetLimits,
        address: str = "",
    ) -> None:
        self._register, self.host, self._journal = register, host, journal
        self._limits, self._address = limits, address
        self._state = MemberState(check_member(name), host.live())
        if journal.stopped_in or self._state.live is None:
            self._state = replace(self._state, mode=Mode.FENCED, unasked=True)
        self.view = MemberView(register, name, journal, limits)
        self._preparing: tuple[Prepare, asyncio.Task[None]] | None = None
        self._paused_at = 0.0
        self._failed_in = (0, 0.0)
        self._announced = b""
        self._why_not = "this host asks its fleet what to serve"

    @property
    def state(self) -> MemberState:
        """What it is now."""
        view, now, state = self.view, clock.boottime(), self._state
        max_age_s = self._limits.max_age_s
        number, failed_at = self._failed_in
        # A new apply is a new chance, whatever was before.
        recent = number == view.number and now < failed_at + self._limits.retry_s
        return replace(
            state,
            live=self.host.live(),
            failed=state.failed if recent else None,
            said=view.said,
            alone=view.alone,
            displaced=view.displaced,
            ill=view.ill,
            undecided=now >= self._paused_at + self._limits.undecided_s,
            stale=max_age_s > 0 and now >= view.read_at + self._most_age_s,
        )

    @property
    def _most_age_s(self) -> float:
        """How old what was read may be; a new process does not know for how long nobody had."""
        max_age_s = self._limits.max_age_s
        return max_age_s if self.view.history is not None else min(max_age_s, _ANSWER_S)

    @property
    def announced_live(self) -> FleetVersion | None:
        """What the register says that its host holds."""
        return decode_member(self._announced)[0] if self._announced else None

    async def run(self) -> None:
        """Follow the fleet until cancelled; the host stays as it is then."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(), name="fleet reader")
                await self._follow()
        finally:
            # Who runs it anew is seen again.
            self._announced = b""
            await self._drop_preparing()
            with contextlib.suppress(WeightSyncError):
                await self.view.presence.close()

    async def _follow(self) -> None:
        if self._state.mode is Mode.FENCED and self._state.live is not None:
            await self._until_done(Fence("this host asks its fleet what to serve"))
        while True:
            self.view.changed.clear()
            step = next_step(self.state, self.view.history, self._limits.max_skew)
            if isinstance(step, Wait) or await self._is_preparing(step):
                await self._wait()
            else:
                await self._try(step)

    async def _read(self) -> None:
        while not await self._announce():  # noqa: ASYNC110 - a register is asked
            await asyncio.sleep(_LOOK_S)
        reading = asyncio.create_task(self.view.run(), name="fleet view")
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=min(_LOOK_S, self._limits.poll_s))
                await self._announce()
        finally:
            reading.cancel()
            await asyncio.wait({reading})
        reading.result()

    async def _announce(self) -> bool:
        live, mode = self.host.live(), self._state.mode
        why = self._why_not if mode is Mode.FENCED else ""
        value = encode_member(live, mode, self._address, self.view.presence.boot, why)
        if value == self._announced or self.view.displaced:
            return True
        try:
            await self.view.presence.announce(value)
        except WeightSyncError as error:
            logger.warning("this member cannot be seen in its fleet: %s", error)
            return False
        self._announced = value
        return True

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._until_due()):
                await self.view.changed.wait()

    def _until_due(self) -> float:
        """Return the seconds until time alone may change what is next."""
        return min(_LOOK_S, self._limits.poll_s, self._until_limit())

    def _until_limit(self) -> float:
        """Return the seconds until this member may have to fence its host."""
        limits, due = self._limits, math.inf
        if self._state.mode is Mode.PAUSED:
            due = self._paused_at + limits.undecided_s
        elif limits.max_age_s and (self._state.unasked or self._state.mode is Mode.SERVING):
            due = self.view.read_at + self._most_age_s
        return max(0.01, due - clock.boottime())

    async def _try(self, step: Step) -> None:
        try:
            await self._do(step)
        except (WeightSyncError, OSError) as error:
            logger.warning("%s failed: %s", type(step).__name__, error)
            await asyncio.sleep(min(_ANSWER_S, self._limits.retry_s) / 10)

    async def _until_done(self, step: Step) -> None:
        while True:
            try:
                return await self._do(step)
            except (WeightSyncError, OSError) as error:
                logger.warning("%s failed: %s", type(step).__name__, error)
            await asyncio.sleep(_LOOK_S)

    async def _do(self, step: Step) -> None:
        match step:
            case Prepare():
                task = asyncio.create_task(self._prepare(step))
                self._preparing = step, task
            case Say(number, phase, report):
                key = report_key(number, phase, self._state.name)
                await self._create(key, encode_report(report))
                self.view.said |= {(number, phase)}
            case Abort(number, at, reason):
                name = self._state.name
                await self._bounded(decide(self._register, number, at, Verdict.ABORT, name, reason))
                self.view.look()
                await self._wait()
            case PauseHost(number):
                await self._pause(number)
            case Commit(target):
                await self._commit(target)
            case Resume():
                await self._resume()
            case Fence(reason):
                await self._fence(reason)
            case Reject(digest, reason):
                await self._create(rejected_key(digest), b"{}")
                await self.host.reject(digest, reason)
                self._mark(digest, rejected=True)
            case Accept(digest):
                await self.host.accept(digest)
                self._mark(digest, rejected=False)
            case Wait():
                pass

    async def _create(self, key: str, value: bytes) -> None:
        await self._bounded(create_until_answered(self._register, key, value))

    async def _bounded(self, call: Coroutine[object, object, object]) -> None:
        """Give up a call of the register before it could keep this member from fencing.

        Raises:
            WeightSyncError: DEADLINE_EXCEEDED and what the call raises.
        """
        try:
            async with asyncio.timeout(min(_ANSWER_S, self._until_limit())):
                await call
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED, "the fleet's register did not answer; it is asked again"
            ) from None

    async def _is_preparing(self, step: Step) -> bool:
        if self._preparing is None:
            return False
        if step == self._preparing[0]:
            return True
        if not isinstance(step, (Say, Abort)):
            # What it prepares is not wanted any more.
            await self._drop_preparing()
        return False

    async def _drop_preparing(self) -> None:
        """Return when the host prepares nothing: it is asked for one thing at a time."""
        if self._preparing is not None:
            self._preparing[1].cancel()
            await asyncio.wait({self._preparing[1]})
            # One that was cancelled before it began has not said so.
            self._preparing = None

    async def _prepare(self, step: Prepare) -> None:
        try:
            await failpoints.reach("fleet.prepare")
            await self.host.prepare(step.target, step.pause)
        except (WeightSyncError, OSError) as error:
            self._fail(step.target, error)
        else:
            self._state = replace(self._state, prepared=step, failed=None)
        finally:
            self._preparing = None
            self.view.changed.set()

    async def _pause(self, number: int) -> None:
        history = self.view.history
        running = history.running if history is not None else None
        target = running.plan.target if running is not None else None
        if not await self._stops(number, target):
            return
        await failpoints.reach("fleet.pause")
        # From before it is asked: generation may stand still from then on.
        self._paused_at = clock.boottime()
        try:
            await self.host.pause()
        except (WeightSyncError, OSError) as error:
            if target is not None:
                self._fail(target, error)
            await self._journal.serve()
            return
        self._state = replace(self._state, mode=Mode.PAUSED)
        await failpoints.reach("fleet.paused")

    async def _stops(self, number: int, target: FleetVersion | None) -> bool:
        """Write down that the host is about to stop; what cannot be is a failure of the apply."""
        try:
            await self._journal.stop(number)
        except WeightSyncError as error:
            if target is not None:
                self._fail(target, error)
            return False
        return True

    async def _commit(self, target: FleetVersion) -> None:
        if not await self._stops(0, target):
            return
        await failpoints.reach("fleet.commit")
        if not await self._is_still_next(Commit(target)):
            return
        try:
            await self.host.commit(target)
        except (WeightSyncError, OSError) as error:
            self._fail(target, error)
            self._state = replace(self._state, mode=Mode.FENCED, unasked=False, prepared=None)
            return
        self._state = replace(
            self._state, mode=Mode.SERVING, unasked=False, prepared=None, failed=None
        )
        await failpoints.reach("fleet.committed")
        await self._journal.serve()

    async def _resume(self) -> None:
        if not await self._is_still_next(Resume()):
            return
        try:
            await self.host.resume()
        except (WeightSyncError, OSError) as error:
            live = self.host.live()
            if live is not None:
                self._fail(live, error)
            return
        self._state = replace(self._state, mode=Mode.SERVING, unasked=False, prepared=None)
        await self._journal.serve()

    async def _is_still_next(self, step: Step) -> bool:
        """Return whether a step is what is next by what counts now, also after a standstill.

        Raises:
            WeightSyncError: The register does not answer, and nobody can know.
        """
        await self._bounded(self.view.confirm())
        return next_step(self.state, self.view.history, self._limits.max_skew) == step

    def permitted_s(self, live: FleetVersion | None) -> float:
        """Return for how many seconds the host may begin to serve a version, by what was read.

        Also an engine that comes back by itself asks this: what it goes on with may be left.

        Args:
            live: The version; None: one that nobody knows.

        Raises:
            WeightSyncError: ENGINE_AWAY; it may not.
        """
        state = replace(self.state, live=live, mode=Mode.SERVING, unasked=False)
        step = next_step(state, self.view.history, self._limits.max_skew)
        if isinstance(step, Fence):
            raise WeightSyncError(Reason.ENGINE_AWAY, step.reason, retry_after_s=1.0)
        if not self.view.presence.counts:
            self.view.look()
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                "this host stood still, or without its fleet's register, for so long that the "
                "fleet may have decided without it; it asks before it serves",
                retry_after_s=1.0,
            )
        return self.view.presence.left_s

    async def _fence(self, reason: str) -> None:
        logger.error("this host is fenced: %s", reason)
        self._why_not = reason
        try:
            await self._journal.stop(0)
        except WeightSyncError as error:
            # A barrier has written it down before: what is lost is why it served nothing.
            logger.warning("that is not written down: %s", error)
        await self.host.fence(reason)
        self._state = replace(self._state, mode=Mode.FENCED, unasked=False)

    def _mark(self, digest: str, *, rejected: bool) -> None:
        state, one = self._state, {digest}
        if rejected:
            state = replace(state, rejected=state.rejected | one, accepted=state.accepted - one)
        else:
            state = replace(state, rejected=state.rejected - one, accepted=state.accepted | one)
        self._state = state

    def _fail(self, target: FleetVersion, error: Exception) -> None:
        logger.warning("version %d cannot be taken: %s", target.number, error)
        self._failed_in = self.view.number, clock.boottime()
        why = error.message if isinstance(error, WeightSyncError) else str(error)
        self._state = replace(self._state, failed=target, why=why)
        # Also of what was fenced before: that is what it waits for now.
        self._why_not = why
