"""What a fleet has decided, as the register says it, in the order of the applies' numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination.coordination import CoordinationStore
from weightsync_server.decide import ApplyOrder, DecisionPlan, FleetVersion, Verdict
from weightsync_server.fleet.fleet_records import (
    APPLIES,
    FLOORS,
    REJECTED,
    REJECTED_SINCE,
    REJECTED_UNTIL,
    REPORTS,
    apply_prefix,
    create_until_answered,
    decision_key,
    decode_plan,
    decode_verdict,
    encode_rollback,
    floor_key,
    is_ours,
    is_pause_of,
    number_in,
    plan_key,
    rejected_key,
    rejected_since_key,
    rejected_until_key,
    rollback_key,
    roster_prefix,
)


class ContentMark(NamedTuple):
    """What one COMMIT says of a content: rejected from then on, or accepted again.

    A `number` of 0 stands for an unknown apply, before every other.
    """

    number: int
    digest: str
    rejected: bool


def marks_of_keys(keys: Iterable[str]) -> Iterator[ContentMark]:
    """Yield what the keys below `rejected/` say; others are left out."""
    for key in filter(is_ours, keys):
        for prefix, rejected in ((REJECTED_SINCE, True), (REJECTED_UNTIL, False)):
            if key.startswith(prefix):
                yield ContentMark(number_in(key), key.rpartition("/")[2], rejected)
                break
        else:
            if key.startswith(REJECTED):
                yield ContentMark(0, key[len(REJECTED) :], rejected=True)


def marks_of_plans(plans: Iterable[DecisionPlan]) -> Iterator[ContentMark]:
    for plan in plans:
        if plan.rejects:
            yield ContentMark(plan.number, plan.rejects, rejected=True)
        if plan.clears:
            yield ContentMark(plan.number, plan.target.digest, rejected=False)


def newest_marks(marks: Iterable[ContentMark]) -> list[ContentMark]:
    """Return the one that counts of each content that was ever rejected or accepted again."""
    return list({mark.digest: mark for mark in sorted(marks)}.values())


async def keep_marks(coordination: CoordinationStore, plans: Iterable[DecisionPlan]) -> None:
    """Have what committed plans say in keys of their own, which outlast the plans."""
    for number, digest, rejected in marks_of_plans(plans):
        # The first of them is all that the first release reads.
        since = (rejected_key(digest), rejected_since_key(number, digest))
        for key in since if rejected else (rejected_until_key(number, digest),):
            await create_until_answered(coordination, key, b"{}")


async def superseded_marks(coordination: CoordinationStore) -> list[str]:
    """Return the keys below `rejected/` that a newer key of the same content makes needless."""
    keys = await coordination.list(REJECTED)
    marks = {key: mark for key in keys for mark in marks_of_keys([key])}
    newest: dict[str, ContentMark] = {}
    for mark in marks.values():
        newest[mark.digest] = max(mark, newest.get(mark.digest, mark))
    return [
        key
        for key, mark in marks.items()
        # Of what is rejected the first release reads the one without a number alone.
        if mark != newest[mark.digest] and not (newest[mark.digest].rejected and not mark.number)
    ]


#: After so many applies all of them are read again.
_READ_AGAIN = 32


@dataclass(frozen=True)
class Apply:
    """One apply, as far as it has come; only the newest one's `plan` has waves.

    `pause`: a barrier's members may pause. `reason` is the last verdict's.
    """

    plan: DecisionPlan
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
        return len(self.decisions) + 1


class Seen(NamedTuple):
    """How far a fleet had come when it was read: its newest apply that is known or decided.

    A `nonce` or `verdict` that is empty is not known. `decisions` end with the process.
    """

    number: int = 0
    nonce: str = ""
    verdict: str = ""
    decisions: tuple[Verdict, ...] = ()

    @property
    def written(self) -> dict[str, Any]:
        return {"seen": self.number, "nonce": self.nonce, "verdict": self.verdict}


@dataclass(frozen=True)
class History:
    """All applies that count, oldest first.

    One that cannot be read, as of a newer release, counts for nothing once it is decided against.

    Attributes:
        unreadable: Why the newest one cannot be read, or empty.
        unreadable_commits: A part of it is committed.
        unreadable_decided: It is damaged, and decided: no abort ends it, and a barrier may follow.
        floor: Number of the first apply that counts.
        marks: What keys say of contents that were rejected, besides the plans here.
        hidden: Numbers of commits before the newest apply that cannot be read.
        highest: Number of the last apply that anybody has written, whatever it says.
        decided: Number of the last one with a decision.
        foreign: Keys among these that are none of a fleet, and count for nothing.
    """

    applies: tuple[Apply, ...] = ()
    unreadable: str = ""
    unreadable_number: int = 0
    unreadable_commits: bool = False
    unreadable_decided: bool = False
    floor: int = 0
    marks: tuple[ContentMark, ...] = ()
    hidden: tuple[int, ...] = ()
    highest: int = 0
    decided: int = 0
    foreign: frozenset[str] = frozenset()

    @property
    def settled(self) -> int:
        """Number of the first apply that may change; those before it are decided for good."""
        open_ones = [one.plan.number for one in self.applies if one.outcome is None]
        unread = [*self.hidden, self.unreadable_number or self.number]
        return min([self.number, *open_ones, *unread])

    @property
    def newest(self) -> Apply | None:
        return self.applies[-1] if self.applies else None

    @property
    def number(self) -> int:
        """The highest number of an apply; 0: there was none."""
        return max(self.highest, self.newest.plan.number if self.newest else 0)

    @property
    def nonce(self) -> str:
        """The newest known plan's; "": there is none."""
        return self.newest.plan.nonce if self.newest else ""

    @property
    def seen(self) -> Seen:
        """What is known for good: not of a record that cannot be read and decides nothing."""
        newest = self.newest
        if newest is None or newest.plan.number < self.decided:
            return Seen(self.decided)
        outcome = newest.outcome or ""
        return Seen(newest.plan.number, newest.plan.nonce, str(outcome), newest.decisions)

    def lacks(self, seen: Seen) -> str:
        """Return what was read before and is not so here; "": nothing."""
        number, found = seen.number, [one for one in self.applies if one.plan.number == seen.number]
        if self.number < number:
            return f"its newest apply is {self.number}, but {number} was read before"
        if not found:
            # What was decided against, or is below the floor, is removed.
            unread = {*self.hidden, self.unreadable_number}
            gone = seen.verdict == Verdict.COMMIT and self.floor <= number not in unread
            return f"apply {number} was committed, but its record is missing" if gone else ""
        (one,) = found
        if seen.nonce and one.plan.nonce != seen.nonce:
            return f"its apply {number} differs from the one that was read before"
        fewer = one.decisions.count(Verdict.COMMIT) < seen.decisions.count(Verdict.COMMIT)
        if (seen.verdict and one.outcome != seen.verdict) or fewer:
            what = f"{seen.verdict} was" if seen.verdict else "more was"
            return f"{what} decided in apply {number}, and no longer is"
        return ""

    @property
    def running(self) -> Apply | None:
        newest = self.newest
        return newest if newest is not None and newest.outcome is None else None

    @property
    def commits(self) -> tuple[Apply, ...]:
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
    def left(self) -> FleetVersion | None:
        """What the newest apply was to lead to, where it was decided against and all go back."""
        newest = self.newest
        if newest is None or newest.outcome is not Verdict.ABORT:
            return None
        plan = newest.plan
        return plan.target if plan.previous not in (None, plan.target) else None

    @property
    def rejects(self) -> frozenset[str]:
        """Digests that nobody applies, also by a COMMIT whose coordinator may be dead."""
        return frozenset(mark.digest for mark in self._newest_marks if mark.rejected)

    def rejection_reason(self, digest: str) -> str:
        """Return why a content was rejected the last time; "": it is not known."""
        reasons = [one.plan.reason for one in self.commits if one.plan.rejects == digest]
        return reasons[-1] if reasons else ""

    def accepts_since(self, number: int) -> frozenset[str]:
        """Digests that were rejected, and may be applied again since an apply after this one."""
        marks = [mark for mark in self._newest_marks if mark.number > number]
        return frozenset(mark.digest for mark in marks if not mark.rejected)

    @property
    def _newest_marks(self) -> list[ContentMark]:
        return newest_marks([*self.marks, *marks_of_plans(one.plan for one in self.commits)])

    def missed(self, live: FleetVersion | None) -> tuple[Apply, ...]:
        """Return the commits that a member which serves `live` has not followed."""
        if self._is_ahead(live):
            return ()
        followed = [at for at, one in enumerate(self.commits, 1) if one.plan.target == live]
        return self.commits[followed[-1] if followed else 0 :]

    def hides_missed(self, live: FleetVersion | None) -> bool:
        """Return whether a commit that a member has not followed cannot be read."""
        numbers = [one.plan.number for one in self.commits if one.plan.target == live]
        followed = max(numbers, default=0)
        return not self._is_ahead(live) and any(number > followed for number in self.hidden)

    def _is_ahead(self, live: FleetVersion | None) -> bool:
        """Return whether it is what a wave has that goes on or goes back."""
        newest = self.newest
        if newest is None or newest.plan.order is ApplyOrder.BARRIER:
            return False
        return live == newest.plan.target


def parse_history(keys: Mapping[str, bytes], roster: Mapping[str, bytes] | None) -> History:
    """Return what the keys below `applies/`, `floors/` and `rejected/` say.

    `roster` is the newest plan's; without it, that plan has no waves.
    """
    ours = sorted(filter(is_ours, keys))
    floor = max((number_in(key) for key in ours if key.startswith(FLOORS)), default=0)
    found: dict[int, dict[str, bytes]] = {}
    for key in ours:
        if key.startswith(APPLIES) and (number := number_in(key)) >= floor:
            found.setdefault(number, {})[key.removeprefix(apply_prefix(number))] = keys[key]
    marks = tuple(marks_of_keys(keys))
    planned = [(number, parts) for number, parts in sorted(found.items()) if "plan" in parts]
    if strays := _strays(planned, floor):
        planned = [(number, parts) for number, parts in planned if number not in strays]
        ours = [key for key in ours if key not in {plan_key(number) for number in strays}]
    applies: dict[int, Apply] = {}
    hidden: dict[int, str] = {}

    damaged: set[int] = set()

    def read(number: int, parts: Mapping[str, bytes], roster: Mapping[str, bytes] | None) -> None:
        try:
            applies[number] = _apply(number, parts, roster)
        except WeightSyncError as error:
            bare = applies.get(number)
            if bare is not None and bare.outcome is not None:
                # Who took part in what is decided changes nothing.
                return
            applies.pop(number, None)
            if Verdict.ABORT not in _verdicts(parts):
                hidden[number] = error.message
            if error.reason is Reason.DATA_CORRUPT and _is_decided(parts):
                damaged.add(number)

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
        bool(unreadable and last in damaged),
        floor,
        marks,
        tuple(hidden),
        highest,
        max((number for number, parts in planned if _verdicts(parts)), default=0),
        frozenset(keys).difference(ours),
    )


def _strays(planned: list[tuple[int, dict[str, bytes]]], floor: int) -> set[int]:
    """Return the numbers of plans that no coordinator wrote.

    Whoever plans takes the number after the newest plan's, which stays until many have followed.
    """
    strays: set[int] = set()
    before = max(0, floor - 1)
    for number, parts in planned:
        if number == before + 1 or _is_decided(parts):
            before = number
        else:
            strays.add(number)
    return strays


class HistoryReader:
    """Reads what counts now, linearisably; a roster once, and what is decided for good seldom.

    Readings may overlap.
    """

    def __init__(self, coordination: CoordinationStore) -> None:
        self._coordination = coordination
        self._roster: tuple[str, dict[str, bytes]] = ("", {})
        #: Number of the first apply that may change, its plan and all that counts of those before.
        self._known = 0, dict[str, bytes]()

    async def read(self) -> History:
        # Floors afterwards: what somebody creates anew below one is seen only with it.
        rooms = (APPLIES, FLOORS, REJECTED)
        # As of now: another reading may keep or forget some while this one waits.
        known, past = self._known
        start = apply_prefix(known) if known else ""
        keys = await self._coordination.list_each(rooms, start)
        if known and keys.get(plan_key(known)) != past.get(plan_key(known)):
            # It was emptied, or put back, and may have gone on since.
            known, past = 0, {}
            keys = await self._coordination.list_each(rooms)
        keys = past | keys
        bare = parse_history(keys, None)
        self._keep(keys, known, bare.settled)
        newest = bare.newest
        if newest is None or bare.unreadable:
            return bare
        nonce, (kept, roster) = newest.plan.nonce, self._roster
        if kept != nonce:
            roster = await self._coordination.list(roster_prefix(nonce))
        history = parse_history(keys, roster)
        if history.newest is not None and history.newest.plan.waves:
            # One that is damaged may be put back.
            self._roster = nonce, roster
        return history

    async def whole(self, apply: Apply) -> Apply:
        """Return an apply with its waves also where another one has followed it, if they are there.

        Its decision rests on none of them.
        """
        plan = apply.plan
        roster = await self._coordination.list(roster_prefix(plan.nonce))
        # It says how many parts there are.
        body = await self._coordination.get(plan_key(plan.number)) or b""
        with contextlib.suppress(WeightSyncError):
            found = decode_plan(body, roster)
            return replace(apply, plan=found) if found.nonce == plan.nonce else apply
        return apply

    def _keep(self, keys: Mapping[str, bytes], known: int, settled: int) -> None:
        """Keep what need not be read again; all is read now and then, for some is removed."""
        if settled // _READ_AGAIN != known // _READ_AGAIN and known:
            settled = 0
        first, mark = apply_prefix(settled) if settled else APPLIES, plan_key(settled)
        # Both at once: one without the other would leave out applies that count. With the plan
        # itself, by which another register is told.
        self._known = settled, {key: keys[key] for key in keys if key < first or key == mark}


_DECISIONS = "decisions/"


def _verdicts(parts: Mapping[str, bytes]) -> set[Verdict]:
    found = set()
    for key in parts:
        with contextlib.suppress(WeightSyncError):
            if key.startswith(_DECISIONS):
                found.add(decode_verdict(parts[key])[0])
    return found


def _is_decided(parts: Mapping[str, bytes]) -> bool:
    return any(key.startswith(_DECISIONS) for key in parts)


@contextlib.contextmanager
def _naming(key: str, *, decided: bool) -> Iterator[None]:
    """Have a damaged record named by its key, with what is to be done."""
    try:
        yield
    except WeightSyncError as error:
        if error.reason is not Reason.DATA_CORRUPT:
            raise
        way = (
            "apply a version to the fleet with `weightsync fleet apply VERSION --order barrier`"
            if decided
            else "end this apply by `weightsync fleet abort` and begin another"
        )
        what = error.message.partition(";")[0]
        raise WeightSyncError(error.reason, f"restore {key}, or {way}: {what}") from error


def _apply(number: int, parts: Mapping[str, bytes], roster: Mapping[str, bytes] | None) -> Apply:
    decided, verdicts = _is_decided(parts), list[tuple[Verdict, str]]()
    with _naming(plan_key(number), decided=decided):
        plan = decode_plan(parts["plan"])
        if plan.number != number:
            raise WeightSyncError(Reason.DATA_CORRUPT, f"it is the plan of apply {plan.number}")
    for key in parts:
        # A step that this plan does not have was decided of another one.
        if key.startswith(_DECISIONS) and (step := number_in(key)) <= plan.decisions:
            with _naming(f"{apply_prefix(number)}{key}", decided=decided):
                verdict = decode_verdict(parts[key], plan.nonce)
            expected = len(verdicts) + 1
            if verdict[0] is Verdict.COMMIT and step > expected:
                with _naming(decision_key(number, expected), decided=decided):
                    raise WeightSyncError(
                        Reason.DATA_CORRUPT, f"it no longer exists, but {key} does"
                    )
            verdicts.append(verdict)
    if roster is not None:
        with _naming(roster_prefix(plan.nonce), decided=decided):
            plan = decode_plan(parts["plan"], roster)
    word = parts.get("pause") if plan.order is ApplyOrder.BARRIER else None
    return Apply(
        plan,
        pause=word is not None and is_pause_of(word, plan.nonce),
        decisions=tuple(verdict for verdict, _ in verdicts),
        reason=verdicts[-1][1] if verdicts else "",
    )


#: Applies that are kept whole, and commits that are kept: for members that lag, and rollbacks.
_KEPT_APPLIES, _KEPT_COMMITS = 8, 4


async def compact(coordination: CoordinationStore, history: History) -> None:
    """Remove what members said of old applies, raise the floor and remove what is below.

    A process that was stopped may create a key below the floor at any later time: whoever reads the
    history reads the floor after it, and leaves such keys out. Between the commits that are kept
    and the newest applies, nothing but commits stays.
    """
    numbers = [one.plan.number for one in history.applies]
    if len(numbers) <= _KEPT_APPLIES or numbers[-1] % _KEPT_APPLIES:
        return
    kept = numbers[-_KEPT_APPLIES]
    old = [one.plan for one in history.applies if one.plan.number < kept]
    doomed = await _below(coordination, REPORTS, kept)
    for plan in old:
        doomed += list(await coordination.list(roster_prefix(plan.nonce)))
    await coordination.delete(doomed)
    await _keep_rollbacks(coordination, [one for one in history.applies if one.plan.number < kept])
    commits = [one.plan.number for one in history.commits]
    floor = min([kept, *commits[-_KEPT_COMMITS:]])
    if floor > numbers[0]:
        # Whoever does not read the plans any more reads these after the floor.
        leaving = (one.plan for one in history.commits if one.plan.number < floor)
        await keep_marks(coordination, leaving)
        await create_until_answered(coordination, floor_key(floor), b"{}")
        # Plans first: without its plan an apply is nothing, whatever of it is still there.
        await coordination.delete([plan_key(one.number) for one in old if one.number < floor])
    # What was decided against counts for nothing, and for nothing more without its plan.
    gone = {one.number for one in old}.difference(commits)
    await coordination.delete([plan_key(number) for number in sorted(gone)])
    rooms = tuple(apply_prefix(number) for number in gone)
    doomed = [key for key in await _below(coordination, APPLIES, kept) if key.startswith(rooms)]
    doomed += await _below(coordination, APPLIES, history.floor)
    doomed += await superseded_marks(coordination)
    doomed += await _below(coordination, FLOORS, history.floor)
    await coordination.delete(sorted(set(doomed)))


async def _keep_rollbacks(coordination: CoordinationStore, old: Iterable[Apply]) -> None:
    """Have a rollback's idempotency key count for ever: nothing else refuses a second one."""
    for apply in old:
        plan, outcome = apply.plan, apply.outcome
        if plan.rejects and plan.key and outcome is not None:
            body = encode_rollback(plan, outcome, apply.reason)
            await create_until_answered(coordination, rollback_key(plan.key), body)


async def _below(coordination: CoordinationStore, prefix: str, number: int) -> list[str]:
    end = f"{prefix}{number:012}"
    return [key for key in await coordination.list(prefix) if key < end and is_ours(key)]
