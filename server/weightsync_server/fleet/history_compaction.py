"""Removes what is known of old applies, first saying that it counts for nothing any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync_server.fleet.content_marks import keep_marks
from weightsync_server.fleet.decision import create_until_answered
from weightsync_server.fleet.fleet_keys import (
    APPLIES,
    FLOORS,
    REPORTS,
    floor_key,
    plan_key,
    roster_prefix,
)

if TYPE_CHECKING:
    from weightsync_server.fleet.fleet_history import History
    from weightsync_server.register.register import Register

__all__ = ["compact"]

#: Applies that are kept whole, and commits that are kept: for members that lag, and rollbacks.
_KEPT_APPLIES, _KEPT_COMMITS = 8, 4


async def compact(register: Register, history: History) -> None:
    """Remove what members said of old applies, raise the floor and remove what is below.

    Done once in so many applies as are kept. A process that was stopped may create a key below the
    floor at any later time: whoever reads the history reads the floor after it, and leaves such
    keys out. Between the commits that are kept and the newest applies, plans and decisions stay.

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
    commits = [one.plan.number for one in history.commits]
    floor = min([kept, *commits[-_KEPT_COMMITS:]])
    if floor > numbers[0]:
        # Whoever does not read the plans any more reads these after the floor.
        leaving = (one.plan for one in history.commits if one.plan.number < floor)
        await keep_marks(register, leaving)
        await create_until_answered(register, floor_key(floor), b"{}")
        # Plans first: without its plan an apply is nothing, whatever of it is still there.
        await register.delete([plan_key(one.number) for one in old if one.number < floor])
    doomed = await _below(register, APPLIES, history.floor)
    doomed += [key for key in await register.list(FLOORS) if key < floor_key(history.floor)]
    await register.delete(doomed)


async def _below(register: Register, prefix: str, number: int) -> list[str]:
    end = f"{prefix}{number:012}/"
    return [key for key in await register.list(prefix) if key < end]
