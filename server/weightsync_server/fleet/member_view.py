"""What a member sees of its fleet: it is there, it reads, it notes how old that is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_keys import APPLIES, coordinator_key, member_key, report_key
from weightsync_server.fleet.fleet_plan import ApplyPhase
from weightsync_server.fleet.fleet_records import decode_boot

if TYPE_CHECKING:
    from weightsync_server.fleet.fleet_history import History
    from weightsync_server.fleet.fleet_limits import FleetLimits
    from weightsync_server.fleet.member_journal import MemberJournal
    from weightsync_server.register.membership import Membership
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
        read_at: When that was asked for, by `clock.monotonic`.
        said: Which reports of this member the register has.
        why: Why it could not be read the last time; "": it was.
        changed: Set after each reading.
        boot: Names this process.
        displaced: Another process has this member's name.
    """

    def __init__(
        self, register: Register, name: str, journal: MemberJournal, limits: FleetLimits
    ) -> None:
        self._register, self._name, self._journal = register, name, journal
        self._limits = limits
        self._reader = HistoryReader(register)
        self._hint = asyncio.Event()
        self._membership: Membership | None = None
        self._gone_since: float | None = None
        self.history: History | None = None
        self.read_at = clock.monotonic()
        self.said: frozenset[tuple[int, ApplyPhase]] = frozenset()
        self.why = "it was not read yet"
        self.changed = asyncio.Event()
        self.boot = secrets.token_hex(8)
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

    async def announce(self, value: bytes) -> None:
        """Be there, with this value.

        Raises:
            WeightSyncError: Others may not see that.
        """
        before = self._membership
        key, ttl_s = member_key(self._name), self._limits.member_ttl_s
        self._membership = await self._register.member(key, value, ttl_s)
        if before is not None:
            await before.close()

    async def run(self) -> None:
        """Read until cancelled; `announce` comes first, so that no coordinator overlooks it."""
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

    async def close(self) -> None:
        """Be gone."""
        if self._membership is not None:
            await self._membership.close()

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
        asked = clock.monotonic()
        history, found = await self._ask()
        if found is None and self._membership is not None:
            # Of a time without the register. Nobody has counted on this member meanwhile: it is
            # there again before it goes by what it reads.
            await self._membership.renew()
            asked = clock.monotonic()
            history, found = await self._ask()
        number = history.number
        if number < self._journal.seen:
            raise WeightSyncError(
                Reason.FAULT,
                f"the register's newest apply is {number}, and {self._journal.seen} was read "
                "before: it was emptied or put back; see `weightsync fleet status`, then remove "
                "this member's journal",
            )
        await self._journal.see(number)
        if self.history is None or self.number != number:
            self.said = frozenset(
                [(number, phase) for phase in ApplyPhase if await self._has_said(number, phase)]
            )
        await self._look_for_coordinator(history)
        self.displaced = found is not None and self._is_others(found)
        self.history, self.read_at = history, asked

    async def _has_said(self, number: int, phase: ApplyPhase) -> bool:
        return await self._register.get(report_key(number, phase, self._name)) is not None

    async def _ask(self) -> tuple[History, bytes | None]:
        """Return the history, and who has this member's name."""
        # At once: between a decision and the last member that knows it this is most of the time.
        key = member_key(self._name)
        return await asyncio.gather(self._reader.read(), self._register.get(key))

    def _is_others(self, found: bytes) -> bool:
        try:
            return decode_boot(found) != self.boot
        except WeightSyncError:
            # Of another release.
            return True

    async def _look_for_coordinator(self, history: History) -> None:
        running = history.running
        key = coordinator_key(running.plan.nonce) if running else ""
        if not key or await self._register.get(key) is not None:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = clock.monotonic()
