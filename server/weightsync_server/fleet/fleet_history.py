"""What a fleet has decided, as the register says it: applies in order, none by any clock."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.errors import WeightSyncError
from weightsync_server.fleet.content_marks import marks_of_keys, marks_of_plans, newest_marks
from weightsync_server.fleet.fleet_keys import (
    APPLIES,
    FLOORS,
    REJECTED,
    apply_prefix,
    plan_key,
    roster_prefix,
)
from weightsync_server.fleet.fleet_plan import FleetPlan, FleetVersion, Kind, Verdict
from weightsync_server.fleet.fleet_records import decode_plan, decode_verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync_server.fleet.content_marks import ContentMark
    from weightsync_server.register.register import Register

__all__ = ["Apply", "History", "HistoryReader", "parse_history"]

#: After so many applies all of them are read again.
_READ_AGAIN = 32


@dataclass(frozen=True)
class Apply:
    """One apply, as far as it has come.

    Attributes:
        plan: What is to be done; the newest one's with waves.
        pause: A barrier's members may pause.
        decisions: The verdicts so far, in order.
        reason: Why the last one was made.
    """

    plan: FleetPlan
    pause: bool = False
    decisions: tuple[Verdict, ...] = ()
    reason: str = ""

    @property
    def outcome(self) -> Verdict | None:
        """COMMIT or ABORT; None: it runs."""
        if Verdict.ABORT in self.decisions:
            return Verdict.ABORT
        return Verdict.COMMIT if len(self.decisions) >= self.plan.decisions else None

    @property
    def step(self) -> int:
        """Number of the next decision."""
        return len(self.decisions) + 1


@dataclass(frozen=True)
class History:
    """All applies that count, oldest first.

    One that cannot be read, as of a newer release, counts for nothing once it is decided against.

    Attributes:
        applies: Those that can be read.
        unreadable: Why the newest one cannot be; "": it can.
        unreadable_number: Its number.
        unreadable_commits: A part of it is committed.
        floor: Number of the first apply that counts.
        marks: What keys say of contents that were rejected, besides the plans here.
        hidden: Numbers of commits before the newest apply that cannot be read.
        highest: The highest number of any plan.
    """

    applies: tuple[Apply, ...] = ()
    unreadable: str = ""
    unreadable_number: int = 0
    unreadable_commits: bool = False
    floor: int = 0
    marks: tuple[ContentMark, ...] = ()
    hidden: tuple[int, ...] = ()
    highest: int = 0

    @property
    def newest(self) -> Apply | None:
        """The last one."""
        return self.applies[-1] if self.applies else None

    @property
    def number(self) -> int:
        """The highest number of an apply; 0: there was none."""
        return max(self.highest, self.newest.plan.number if self.newest else 0)

    @property
    def running(self) -> Apply | None:
        """The one that is not decided."""
        newest = self.newest
        return newest if newest is not None and newest.outcome is None else None

    @property
    def commits(self) -> tuple[Apply, ...]:
        """Those that were."""
        return tuple(one for one in self.applies if one.outcome is Verdict.COMMIT)

    @property
    def target(self) -> FleetVersion | None:
        """What every member that is in no running apply is to serve; None: what it has."""
        newest = self.newest
        if newest is None:
            return None
        # Not of the last commit that can be read: there may be one after it that cannot.
        committed = newest.outcome is Verdict.COMMIT
        return newest.plan.target if committed else newest.plan.previous

    @property
    def rejects(self) -> frozenset[str]:
        """Digests that nobody applies, also by a COMMIT whose coordinator may be dead."""
        return frozenset(digest for digest, rejected in self._newest_marks.items() if rejected)

    def rejection_reason(self, digest: str) -> str:
        """Return why a content was rejected the last time; "": it is not known."""
        reasons = [one.plan.reason for one in self.commits if one.plan.rejects == digest]
        return reasons[-1] if reasons else ""

    @property
    def accepts(self) -> frozenset[str]:
        """Digests that were rejected and may be applied again."""
        return frozenset(digest for digest, rejected in self._newest_marks.items() if not rejected)

    @property
    def _newest_marks(self) -> Mapping[str, bool]:
        return newest_marks([*self.marks, *marks_of_plans(one.plan for one in self.commits)])

    def missed(self, live: FleetVersion | None) -> tuple[Apply, ...]:
        """Return the commits that a member has not followed.

        Args:
            live: What it serves.
        """
        if self._is_ahead(live):
            return ()
        followed = [at for at, one in enumerate(self.commits, 1) if one.plan.target == live]
        return self.commits[followed[-1] if followed else 0 :]

    def hides_missed(self, live: FleetVersion | None) -> bool:
        """Return whether a commit that a member has not followed cannot be read.

        Args:
            live: What it serves.
        """
        numbers = [one.plan.number for one in self.commits if one.plan.target == live]
        followed = max(numbers, default=0)
        return not self._is_ahead(live) and any(number > followed for number in self.hidden)

    def _is_ahead(self, live: FleetVersion | None) -> bool:
        """Return whether it is what a wave has that goes on or goes back."""
        newest = self.newest
        if newest is None or newest.plan.kind is Kind.BARRIER:
            return False
        return live == newest.plan.target


def parse_history(keys: Mapping[str, bytes], roster: Mapping[str, bytes] | None) -> History:
    """Return what the keys below `applies/` and `floors/` say.

    Args:
        keys: They and those below `rejected/`, with values.
        roster: Of the newest plan; None: nobody needs its waves.
    """
    floor = max((int(key[len(FLOORS) :]) for key in keys if key.startswith(FLOORS)), default=0)
    found: dict[int, dict[str, bytes]] = {}
    for key in sorted(keys):
        name, _, rest = key.removeprefix(APPLIES).partition("/")
        if key.startswith(APPLIES) and int(name) >= floor:
            found.setdefault(int(name), {})[rest] = keys[key]
    marks = tuple(marks_of_keys(keys))
    planned = [(number, parts) for number, parts in sorted(found.items()) if "plan" in parts]
    applies: dict[int, Apply] = {}
    hidden: dict[int, str] = {}

    def read(number: int, parts: Mapping[str, bytes], roster: Mapping[str, bytes] | None) -> None:
        try:
            applies[number] = _apply(parts, roster)
        except WeightSyncError as error:
            applies.pop(number, None)
            if Verdict.ABORT not in _verdicts(parts):
                hidden[number] = error.message

    for number, parts in planned:
        read(number, parts, None)
    newest, highest = max(applies, default=0), max((number for number, _ in planned), default=0)
    if roster is not None and newest:
        read(newest, found[newest], roster)
    last = max(hidden, default=0)
    unreadable = hidden.pop(last) if last > max(applies, default=0) else ""
    return History(
        tuple(applies.values()),
        unreadable,
        last if unreadable else 0,
        bool(unreadable and _verdicts(found[last])),
        floor,
        marks,
        tuple(hidden),
        highest,
    )


class HistoryReader:
    """Reads what counts now, linearisably; a roster once, and what is decided for good seldom.

    An apply that another one has followed is decided, and never changes. Readings may overlap.

    Args:
        register: The fleet's.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self._roster: tuple[str, dict[str, bytes]] = ("", {})
        #: Number of the newest apply as of some reading, and all that counts of those before.
        self._known = 0, dict[str, bytes]()

    async def read(self) -> History:
        """Return the history.

        Raises:
            WeightSyncError: As `Register.list`.
        """
        # Floors afterwards: what somebody creates anew below one is seen only with it.
        rooms = (APPLIES, FLOORS, REJECTED)
        # As of now: another reading may keep or forget some while this one waits.
        known, past = self._known
        start = apply_prefix(known) if known else ""
        keys = await self._register.list_each(rooms, start)
        if known and plan_key(known) not in keys:
            # It was emptied, or put back.
            known, past = 0, {}
            keys = await self._register.list_each(rooms)
        keys = past | keys
        self._keep(keys, known)
        bare = parse_history(keys, None)
        newest = bare.newest
        if newest is None or bare.unreadable:
            return bare
        nonce = newest.plan.nonce
        if self._roster[0] != nonce:
            self._roster = nonce, await self._register.list(roster_prefix(nonce))
        return parse_history(keys, self._roster[1])

    def _keep(self, keys: Mapping[str, bytes], known: int) -> None:
        """Keep what need not be read again; all is now and then, for some of it is removed."""
        plans = [key for key in keys if key.startswith(APPLIES) and key.endswith("/plan")]
        newest = max((int(key[len(APPLIES) :].partition("/")[0]) for key in plans), default=0)
        if newest // _READ_AGAIN != known // _READ_AGAIN and known:
            newest = 0
        first = apply_prefix(newest) if newest else APPLIES
        # Both at once: one without the other would leave out applies that count.
        self._known = newest, {key: keys[key] for key in keys if key < first}


def _verdicts(parts: Mapping[str, bytes]) -> set[Verdict]:
    """Return what is decided on an apply, whatever else of it cannot be read."""
    found = set()
    for key in parts:
        with contextlib.suppress(WeightSyncError):
            if key.startswith("decisions/"):
                found.add(decode_verdict(parts[key])[0])
    return found


def _apply(parts: Mapping[str, bytes], roster: Mapping[str, bytes] | None) -> Apply:
    verdicts = [decode_verdict(parts[key]) for key in parts if key.startswith("decisions/")]
    return Apply(
        decode_plan(parts["plan"], roster),
        pause="pause" in parts,
        decisions=tuple(verdict for verdict, _ in verdicts),
        reason=verdicts[-1][1] if verdicts else "",
    )
