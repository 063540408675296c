"""A member: reads what the fleet has decided, has its host follow, and knows it after a crash.

One file: what a member sees, keeps and does are one loop over one state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Coroutine
from dataclasses import replace

from weightsync import clock, failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync_server.coordination.coordination import CoordinationStore
from weightsync_server.decide import ApplyPhase, FleetVersion, Verdict
from weightsync_server.fleet.fleet_history import History, HistoryReader
from weightsync_server.fleet.fleet_records import (
    APPLIES,
    MemberPresence,
    check_member,
    coordinator_key,
    create_until_answered,
    decide,
    decode_member,
    encode_member,
    encode_report,
    rejected_key,
    report_key,
)
from weightsync_server.fleet.fleet_settings import FleetLimits
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet.member_steps import (
    Abort,
    Accept,
    Commit,
    Fence,
    HostMode,
    HostParticipant,
    MemberState,
    PauseHost,
    Prepare,
    Reject,
    ReportPhase,
    Resume,
    Step,
    Wait,
    next_step,
    to_accept,
)
from weightsync_server.ops.tasks import cancel_tasks

logger = logging.getLogger(__name__)


#: How often a running apply is read where no hint comes, and after a fault; seconds.
_RUNNING_S, _FAULT_S = 1.0, 0.5


class MemberView:
    """Reads the register at each hint and now and then.

    The `journal` remembers the newest apply, so that a register that was put back is noticed.

    Attributes:
        history: As last read; None: never.
        read_at: When that was asked for, by `clock.boottime`.
        said: Which reports of this member the register has.
        why: Why it could not be read the last time, or empty.
        ill: Why nothing can be written down, as on a full disk, or empty.
        displaced: Another process has this member's name.
    """

    def __init__(
        self,
        coordination: CoordinationStore,
        name: str,
        journal: MemberJournal,
        limits: FleetLimits,
    ) -> None:
        self._coordination, self._name, self._journal = coordination, name, journal
        self._limits = limits
        self._reader = HistoryReader(coordination)
        self._hint = asyncio.Event()
        self.presence = MemberPresence(coordination, name, limits.member_ttl_s)
        self._gone_since: float | None = None
        self._turn = asyncio.Lock()
        self.history: History | None = None
        self.read_at = clock.boottime()
        self.said: frozenset[tuple[int, ApplyPhase]] = frozenset()
        self.why = "it was not read yet"
        self.ill = ""
        self.changed = asyncio.Event()
        self.displaced = False

    @property
    def number(self) -> int:
        return self.history.number if self.history else 0

    @property
    def alone(self) -> bool:
        """Whether the coordinator of the running apply has been gone for the time of grace."""
        gone = self._gone_since
        return gone is not None and clock.monotonic() >= gone + self._limits.grace_s

    async def confirm(self) -> None:
        """Return when what was read counts: be seen and read again, where it may not."""
        if self.presence.counts:
            return
        await self.presence.renew()
        await self._read()
        self.changed.set()
        if not self.presence.counts:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                "the fleet's register answered too late; the server asks it again",
            )

    async def run(self) -> None:
        """Read until cancelled; it is announced first, so that no coordinator overlooks it."""
        watching = asyncio.create_task(self._watch(), name="fleet watch")
        try:
            while True:
                self._hint.clear()
                pause_s = await self._read_once()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._hint.wait()
        finally:
            await cancel_tasks(watching)

    def look(self) -> None:
        self._hint.set()

    async def _watch(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._coordination.watch(APPLIES)) as hints:
                    async for _ in hints:
                        self._hint.set()
            except Exception as error:  # noqa: BLE001 - it is logged, and tried again
                _log_failure("watching the fleet's register", error)
            await asyncio.sleep(self._limits.poll_s)

    async def _read_once(self) -> float:
        """Read, and return after how many seconds to read again."""
        try:
            await self._read()
        except Exception as error:  # noqa: BLE001 - it is logged, and tried again
            # Whatever it is, the host goes on by the rules for a register that is away.
            why = error.message if isinstance(error, WeightSyncError) else _fault(error)
            if why != self.why:
                _log_failure("reading the fleet's register", error)
            self.why = why
            # Nobody is taken to be gone by a register that does not answer.
            self._gone_since = None
            return _FAULT_S
        self.why = ""
        self.changed.set()
        # Beside what follows a decision. What cannot be written is told by the next reading.
        with contextlib.suppress(WeightSyncError):
            await self._journal.keep()
        running = self.history.running if self.history else None
        return min(_RUNNING_S, self._limits.poll_s) if running else self._limits.poll_s

    async def _read(self) -> None:
        async with self._turn:
            # One after the other, so that nothing older takes the place of what was read.
            await self._read_in_turn()

    async def _read_in_turn(self) -> None:
        asked = clock.boottime()
        history, found = await self._ask()
        if found is None:
            # Of a time without the register. Nobody has counted on this member meanwhile: it is
            # there again before it goes by what it reads.
            await self.presence.renew()
            asked = clock.boottime()
            history, found = await self._ask()
        # Also where what was read is refused.
        self.displaced = found is not None and self.presence.is_others(found)
        self._journal.check(history)
        if self._is_to_heed(history):
            await self.presence.heed_others()
        try:
            await self._journal.see(history.seen)
        except WeightSyncError as error:
            # What is decided is followed all the same.
            self.ill = error.message
        else:
            self.ill = ""
        number, before = history.number, self.history
        # What was said of one plan says nothing of another of that number.
        if before is None or (before.number, before.nonce) != (number, history.nonce):
            self.said = frozenset(
                [(number, phase) for phase in ApplyPhase if await self._has_said(number, phase)]
            )
        await self._look_for_coordinator(history)
        if strays := history.foreign.difference(before.foreign if before else ()):
            logger.warning(
                "%s is not a key of a fleet and is ignored; remove it from %s",
                ", ".join(sorted(map(repr, strays))[:5]),
                self._coordination.url,
            )
        self.history, self.read_at = history, asked
        self.presence.has_read(asked)

    def _is_to_heed(self, history: History) -> bool:
        """Return whether what was read is to be followed only if nobody else refuses it.

        A register that was put back was away before; who has read more may tell of it later.
        """
        before = self.history
        known = before is not None and (before.number, before.nonce) == (
            history.number,
            history.nonce,
        )
        # Not between the word to pause and what follows the decision.
        runs = before is not None and before.running is not None
        # On the way back there is time, and others may have read a COMMIT.
        ended = runs and history.newest is not None and history.newest.outcome is Verdict.ABORT
        due = not runs and clock.boottime() >= self.presence.heeded_at + self._limits.poll_s
        return not known or bool(self.why) or ended or due

    async def _has_said(self, number: int, phase: ApplyPhase) -> bool:
        return await self._coordination.get(report_key(number, phase, self._name)) is not None

    async def _ask(self) -> tuple[History, bytes | None]:
        # At once: between a decision and the last member that knows it this is most of the time.
        return await asyncio.gather(self._reader.read(), self.presence.found())

    async def _look_for_coordinator(self, history: History) -> None:
        running = history.running
        key = coordinator_key(running.plan.nonce) if running else ""
        if not key or await self._coordination.get(key) is not None:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = clock.monotonic()


def _fault(error: Exception) -> str:
    return f"this server failed ({error!r:.200}); report this fault with its log"


#: The longest wait until the host is looked at again, and for an answer of the register; seconds.
_LOOK_S, _ANSWER_S = 1.0, 5.0


class FleetMember:
    """Drives one host; nothing else makes versions live there while it runs.

    `name` is unique in the fleet; `address` is for people.
    """

    def __init__(
        self,
        coordination: CoordinationStore,
        name: str,
        host: HostParticipant,
        journal: MemberJournal,
        limits: FleetLimits,
        address: str = "",
    ) -> None:
        self._coordination, self.host, self._journal = coordination, host, journal
        self._limits, self._address = limits, address
        self._state = MemberState(check_member(name), host.live())
        if journal.stopped_in or self._state.live is None:
            self._state = replace(self._state, mode=HostMode.FENCED, unasked=True)
        self.view = MemberView(coordination, name, journal, limits)
        self._preparing: tuple[Prepare, asyncio.Task[None]] | None = None
        self._paused_at = 0.0
        self._failed_in = (0, 0.0)
        self._announced = b""
        self._why_not = "this host asks its fleet what to serve"

    @property
    def state(self) -> MemberState:
        view, now, state = self.view, clock.boottime(), self._state
        max_age_s = self._limits.max_age_s
        number, failed_at = self._failed_in
        # A new apply is a new chance, whatever was before.
        recent = number == view.number and now < failed_at + self._limits.retry_s
        return replace(
            state,
            live=self.host.live(),
            followed=self._journal.followed,
            failed=state.failed if recent else None,
            said=view.said,
            alone=view.alone,
            displaced=view.displaced,
            ill=view.ill,
            undecided=now >= self._paused_at + self._limits.undecided_s,
            stale=max_age_s > 0 and now >= view.read_at + self._most_age_s,
        )

    @property
    def why(self) -> str:
        """Why its host serves nothing, or the register is not followed; "": it does both."""
        refused = self._journal.refusal or self.view.presence.vetoed
        if refused or self._state.mode is not HostMode.FENCED:
            return refused
        history = self.view.history
        if history is None:
            return f"it asks: {self.view.why}"
        # Which holds up whatever it waited for.
        return history.unreadable or self._why_not

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
        """Follow the fleet until cancelled; the host stays as it is then.

        A fault that ends it fences the host first: nobody waits for one that is not there.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(), name="fleet reader")
                await self._follow()
        except Exception:
            await self._until_done(Fence("this server's part in its fleet failed; check its log"))
            raise
        finally:
            # Who runs it anew is seen again.
            self._announced = b""
            await self._drop_preparing()
            with contextlib.suppress(WeightSyncError):
                await self.view.presence.close()

    async def _follow(self) -> None:
        if self._state.mode is HostMode.FENCED and self._state.live is not None:
            await self._until_done(Fence("this host asks its fleet what to serve"))
        while True:
            self.view.changed.clear()
            state, history = self.state, self.view.history
            step = next_step(state, history, self._limits.max_skew)
            if history is not None and history.running is None and not to_accept(state, history):
                # While one runs, nothing more is written between its decision and what follows.
                self._journal.follow(history.settled - 1)
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
            await cancel_tasks(reading)
        reading.result()

    async def _announce(self) -> bool:
        boot, refuses = self.view.presence.boot, bool(self._journal.refusal)
        value = encode_member(
            self.host.live(), self._state.mode, self._address, boot, self.why, refuses=refuses
        )
        if value == self._announced or self.view.displaced:
            return True
        # Others may see any of the two if this fails.
        self._announced = b""
        try:
            await self.view.presence.announce(value)
        except Exception as error:  # noqa: BLE001 - it is logged, and tried again
            _log_failure("being seen in the fleet", error)
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
        if self._state.mode is HostMode.PAUSED:
            due = self._paused_at + limits.undecided_s
        elif limits.max_age_s and self._state.may_serve:
            due = self.view.read_at + self._most_age_s
        return max(0.01, due - clock.boottime())

    async def _try(self, step: Step) -> None:
        try:
            await self._do(step)
        except Exception as error:  # noqa: BLE001 - it is logged, and tried again
            _log_failure(type(step).__name__, error)
            await asyncio.sleep(min(_ANSWER_S, self._limits.retry_s) / 10)

    async def _until_done(self, step: Step) -> None:
        while True:
            try:
                return await self._do(step)
            except Exception as error:  # noqa: BLE001 - it is logged, and tried again
                _log_failure(type(step).__name__, error)
            await asyncio.sleep(_LOOK_S)

    async def _do(self, step: Step) -> None:
        match step:
            case Prepare():
                task = asyncio.create_task(self._prepare(step))
                self._preparing = step, task
            case ReportPhase(number, phase, report, nonce):
                if phase is ApplyPhase.DONE:
                    # Who is told of a COMMIT relies on that.
                    with contextlib.suppress(WeightSyncError):
                        await self._journal.keep()
                key = report_key(number, phase, self._state.name)
                await self._create(key, encode_report(report, nonce))
                self.view.said |= {(number, phase)}
            case Abort(number, at, reason, nonce):
                await self._bounded(self.view.presence.heed_others())
                given = (number, at, Verdict.ABORT, self._state.name, reason, nonce)
                await self._bounded(decide(self._coordination, *given))
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
                await self._mark(digest, self.host.reject(digest, reason), rejected=True)
            case Accept(digest):
                await self._mark(digest, self.host.accept(digest), rejected=False)
            case Wait():
                pass

    async def _create(self, key: str, value: bytes) -> None:
        await self._bounded(create_until_answered(self._coordination, key, value))

    async def _bounded(self, call: Coroutine[object, object, object]) -> None:
        """Give up a call of the register before it could keep this member from fencing."""
        try:
            async with asyncio.timeout(min(_ANSWER_S, self._until_limit())):
                await call
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                "the fleet's register did not answer; the server asks it again",
            ) from None

    async def _is_preparing(self, step: Step) -> bool:
        if self._preparing is None:
            return False
        if step == self._preparing[0]:
            return True
        if not isinstance(step, (ReportPhase, Abort)):
            # What it prepares is not wanted any more.
            await self._drop_preparing()
        return False

    async def _drop_preparing(self) -> None:
        """Return when the host prepares nothing: it is asked for one thing at a time."""
        if self._preparing is not None:
            await cancel_tasks(self._preparing[1])
            # One that was cancelled before it began has not said so.
            self._preparing = None

    async def _prepare(self, step: Prepare) -> None:
        try:
            await failpoints.reach("fleet.prepare")
            await self.host.prepare(step.target, step.pause)
        except Exception as error:  # noqa: BLE001 - it is logged, and tried again
            _log_failure(type(step).__name__, error)
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
        self._state = replace(self._state, mode=HostMode.PAUSED)
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
            self._state = replace(self._state, mode=HostMode.FENCED, unasked=False, prepared=None)
            return
        self._state = replace(
            self._state, mode=HostMode.SERVING, unasked=False, prepared=None, failed=None
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
        self._state = replace(self._state, mode=HostMode.SERVING, unasked=False, prepared=None)
        await self._journal.serve()

    async def _is_still_next(self, step: Step) -> bool:
        await self._bounded(self.view.confirm())
        return next_step(self.state, self.view.history, self._limits.max_skew) == step

    def permitted_s(self, live: FleetVersion | None) -> float:
        """Return for how many seconds the host may begin to serve a version, by what was read.

        An engine that comes back by itself asks this, too. A `live` of None is an unknown version.
        Raises ENGINE_AWAY when the host may not serve.
        """
        # What is unknown may have been left; a host without a version is behind in no apply.
        live = live or FleetVersion(0, "")
        state = replace(self.state, live=live, mode=HostMode.SERVING, unasked=False)
        step = next_step(state, self.view.history, self._limits.max_skew)
        if isinstance(step, Fence):
            raise WeightSyncError(Reason.ENGINE_AWAY, step.reason, retry_after_s=1.0)
        if not self.view.presence.counts:
            self.view.look()
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                "this host was suspended or could not reach its fleet's register for so long "
                "that the fleet may have decided without it; it asks the register before it "
                "serves",
                retry_after_s=1.0,
            )
        return self.view.presence.left_s

    async def _fence(self, reason: str) -> None:
        logger.error("this host is fenced: %s", reason, extra=event("fleet.fenced"))
        self._why_not = reason
        # Which holds the host as long as it takes.
        await self._drop_preparing()
        try:
            await self._journal.stop(0)
        except WeightSyncError as error:
            # A barrier has written it down before: what is lost is why it served nothing.
            logger.warning(
                "that this host is fenced is not recorded in the state directory: %s", error
            )
        await self.host.fence(reason)
        self._state = replace(self._state, mode=HostMode.FENCED, unasked=False, prepared=None)

    async def _mark(
        self, digest: str, call: Coroutine[object, object, None], *, rejected: bool
    ) -> None:
        try:
            await call
        except (WeightSyncError, OSError) as error:
            # Which is its digest, whatever its number is here.
            self._fail(FleetVersion(0, digest), error)
            return
        state, one = self._state, {digest}
        if rejected:
            state = replace(state, rejected=state.rejected | one, accepted=state.accepted - one)
        else:
            state = replace(state, rejected=state.rejected - one, accepted=state.accepted | one)
        self._state = state

    def _fail(self, target: FleetVersion, error: Exception) -> None:
        named = f"version {target.number}" if target.number else f"content {target.digest}"
        logger.warning("this member could not take %s of its fleet: %s", named, error)
        self._failed_in = self.view.number, clock.boottime()
        why = error.message if isinstance(error, WeightSyncError) else str(error)
        self._state = replace(self._state, failed=target, why=why)
        # Also of what was fenced before: that is what it waits for now.
        self._why_not = why


def _log_failure(what: str, error: Exception) -> None:
    """Log an error in a line, and what is a fault of this server with where it was."""
    fault = None if isinstance(error, (WeightSyncError, OSError)) else error
    logger.warning("%s failed: %s", what, error, exc_info=fault)
