"""What a member sees of its fleet: it is there, it reads, it notes how old that is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_keys import APPLIES, coordinator_key, report_key
from weightsync_server.fleet.fleet_plan import ApplyPhase
from weightsync_server.fleet.member_presence import MemberPresence

if TYPE_CHECKING:
    from weightsync_server.fleet.fleet_history import History
    from weightsync_server.fleet.fleet_limits import FleetLimits
    from weightsync_server.fleet.member_journal import MemberJournal
    from weightsync_server.register.register import Register

__all__ = ["MemberView"]

logger = logging.getLogger(__name__)

#: How often a running apply is read where no hint comes, and after a fault; seconds.
_RUNNING_S, _FAULT_S = 1.0, 0.5


class MemberView:
    """Reads the register at each hint and now and then.

    Args:
        register: The fleet's.
        name: Of the member.
        journal: Remembers the newest apply, so that a register that was put back is noticed.
        limits: How long to wait.

    Attributes:
        history: As last read; None: never.
        read_at: When that was asked for, by `clock.boottime`: engines count so, too.
        said: Which reports of this member the register has.
        why: Why it could not be read the last time; "": it was.
        ill: Why nothing can be written down, as on a full disk; "": it can.
        changed: Set after each reading.
        presence: That it is there.
        displaced: Another process has this member's name.
    """

    def __init__(
        self, register: Register, name: str, journal: MemberJournal, limits: FleetLimits
    ) -> None:
        self._register, self._name, self._journal = register, name, journal
        self._limits = limits
        self._reader = HistoryReader(register)
        self._hint = asyncio.Event()
        self.presence = MemberPresence(register, name, limits.member_ttl_s)
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
        """Number of the newest apply that was read; 0: none was."""
        return self.history.number if self.history else 0

    @property
    def alone(self) -> bool:
        """Whether the coordinator of the running apply has been gone for the time of grace."""
        gone = self._gone_since
        return gone is not None and clock.monotonic() >= gone + self._limits.grace_s

    async def confirm(self) -> None:
        """Return when what was read counts: be seen and read again, where it may not.

        Raises:
            WeightSyncError: The register does not answer.
        """
        if self.presence.counts:
            return
        await self.presence.renew()
        await self._read()
        self.changed.set()
        if not self.presence.counts:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                "the fleet's register answers too late to act on it; it is asked again",
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
            watching.cancel()
            await asyncio.wait({watching})

    def look(self) -> None:
        """Read soon."""
        self._hint.set()

    async def _watch(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._register.watch(APPLIES)) as hints:
                    async for _ in hints:
                        self._hint.set()
            except WeightSyncError as error:
                logger.warning("the fleet's register cannot be watched: %s", error)
            await asyncio.sleep(self._limits.poll_s)

    async def _read_once(self) -> float:
        """Read, and return after how many seconds to read again."""
        try:
            await self._read()
        except WeightSyncError as error:
            if error.message != self.why:
                logger.warning("the fleet's register cannot be read: %s", error)
            self.why = error.message
            # Nobody is taken to be gone by a register that does not answer.
            self._gone_since = None
            return _FAULT_S
        self.why = ""
        self.changed.set()
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
        number = history.number
        if number < self._journal.seen:
            raise WeightSyncError(
                Reason.FAULT,
                f"the register's newest apply is {number}, and {self._journal.seen} was read "
                "before: it was emptied or put back; see `weightsync fleet status`, then remove "
                "this member's journal",
            )
        try:
            await self._journal.see(number)
        except WeightSyncError as error:
            # What is decided is followed all the same.
            self.ill = error.message
        else:
            self.ill = ""
        if self.history is None or self.number != number:
            self.said = frozenset(
                [(number, phase) for phase in ApplyPhase if await self._has_said(number, phase)]
            )
        await self._look_for_coordinator(history)
        self.displaced = found is not None and self.presence.is_others(found)
        self.history, self.read_at = history, asked
        self.presence.has_read(asked)

    async def _has_said(self, number: int, phase: ApplyPhase) -> bool:
        return await self._register.get(report_key(number, phase, self._name)) is not None

    async def _ask(self) -> tuple[History, bytes | None]:
        """Return the history, and who has this member's name."""
        # At once: between a decision and the last member that knows it this is most of the time.
        return await asyncio.gather(self._reader.read(), self.presence.found())

    async def _look_for_coordinator(self, history: History) -> None:
        running = history.running
        key = coordinator_key(running.plan.nonce) if running else ""
        if not key or await self._register.get(key) is not None:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = clock.monotonic()
