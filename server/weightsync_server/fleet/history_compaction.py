"""Removes what is known of old applies, first saying that it counts for nothing any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync_server.fleet.content_marks import keep_marks, superseded_marks
from weightsync_server.fleet.decision import create_until_answered
from weightsync_server.fleet.fleet_keys import (
    APPLIES,
    FLOORS,
    REPORTS,
    apply_prefix,
    floor_key,
    plan_key,
    rollback_key,
    roster_prefix,
)
from weightsync_server.fleet.fleet_records import encode_rollback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync_server.fleet.fleet_history import Apply, History
    from weightsync_server.register.register import Register

__all__ = ["compact"]

#: Applies that are kept whole, and commits that are kept: for members that lag, and rollbacks.
_KEPT_APPLIES, _KEPT_COMMITS = 8, 4


async def compact(register: Register, history: History) -> None:
    """Remove what members said of old applies, raise the floor and remove what is below.

    Done once in so many applies as are kept. A process that was stopped may create a key below the
    floor at any later time: whoever reads the history reads the floor after it, and leaves such
    keys out. Between the commits that are kept and the newest applies, nothing but commits stays.

    Raises:
        WeightSyncError: It is not done; the next one does it.
    """
    numbers = [one.plan.number for one in history.applies]
    if len(numbers) <= _KEPT_APPLIES or numbers[-1] % _KEPT_APPLIES:
        return
    kept = numbers[-_KEPT_APPLIES]
    old = [one.plan for one in history.applies if one.plan.number < kept]
    doomed = await _below(register, REPORTS, kept)
    for plan in old:
        doomed += list(await register.list(roster_prefix(plan.nonce)))
    await register.delete(doomed)
    await _keep_rollbacks(register, [one for one in history.applies if one.plan.number < kept])
    commits = [one.plan.number for one in history.commits]
    floor = min([kept, *commits[-_KEPT_COMMITS:]])
    if floor > numbers[0]:
        # Whoever does not read the plans any more reads these after the floor.
        leaving = (one.plan for one in history.commits if one.plan.number < floor)
        await keep_marks(register, leaving)
        await create_until_answered(register, floor_key(floor), b"{}")
        # Plans first: without its plan an apply is nothing, whatever of it is still there.
        await register.delete([plan_key(one.number) for one in old if one.number < floor])
    # What was decided against counts for nothing, and for nothing more without its plan.
    gone = {one.number for one in old}.difference(commits)
    await register.delete([plan_key(number) for number in sorted(gone)])
    rooms = tuple(apply_prefix(number) for number in gone)
    doomed = [key for key in await _below(register, APPLIES, kept) if key.startswith(rooms)]
    doomed += await _below(register, APPLIES, history.floor)
    doomed += await superseded_marks(register)
    doomed += [key for key in await register.list(FLOORS) if key < floor_key(history.floor)]
    await register.delete(sorted(set(doomed)))


async def _keep_rollbacks(register: Register, old: Iterable[Apply]) -> None:
    """Have a rollback's idempotency key count for ever: nothing else refuses a second one."""
    for apply in old:
        plan, outcome = apply.plan, apply.outcome
        if plan.rejects and plan.key and outcome is not None:
            body = encode_rollback(plan, outcome, apply.reason)
            await create_until_answered(register, rollback_key(plan.key), body)


async def _below(register: Register, prefix: str, number: int) -> list[str]:
    end = f"{prefix}{number:012}/"
    return [key for key in await register.list(prefix) if key < end]
