"""Processes that can still write the memory of an engine in a block that is over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from weightsync import clock
from weightsync_server.engine.session import EngineSession
from weightsync_server.engine.worker_reports import RankState

#: How long a trainer that hears of it may take to let go, and from one look to the next, seconds.
_LET_GO_S, _LOOK_S = 5.0, 0.05


def untold(states: Sequence[RankState]) -> str:
    """Return which ranks do not say who has their memory, one sentence; "": every one does."""
    silent = [state.rank for state in states if not state.answered]
    if not silent:
        return ""
    return (
        f"read in vLLM's log why rank {', '.join(silent)} does not say who can write its memory, "
        "and restart vLLM if it goes on; it is asked again"
    )


def still_writing(states: Sequence[RankState]) -> str:
    """Return who has a block open, one sentence; "": nobody has, by the word of every rank."""
    if not any(state.writing for state in states):
        return untold(states)
    holders = {pid for state in states for pid in state.writers or state.holders or ()}
    # One of a PID namespace that is not seen from here has no name.
    found = sorted(holders - {0})
    who = f"process {', '.join(map(str, found))}" if found else "the trainer"
    return (
        f"end {who}, or let it go on if it is stopped: it can still write the engine's memory in "
        "a block that is over, and nothing is served until it has let go of that"
    )


async def wait_let_go(session: EngineSession) -> str:
    """Return "" when nobody can write an engine that stands still, or who can still."""
    until, left = clock.monotonic() + _LET_GO_S, still_writing(await session.states())
    while left and clock.monotonic() < until:
        await asyncio.sleep(_LOOK_S)
        left = still_writing(await session.states())
    return left
