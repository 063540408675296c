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
        f"check vLLM's log: rank {', '.join(silent)} does not report who can write its memory; "
        "the server asks it again; restart vLLM if this repeats"
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
        f"end {who}, or continue it if it is suspended: it can still write the engine's memory "
        "after its block ended, and nothing is served until it has released that memory"
    )


async def wait_let_go(session: EngineSession) -> str:
    """Return "" when nobody can write an engine that stands still, or who can still."""
    until, left = clock.monotonic() + _LET_GO_S, still_writing(await session.states())
    while left and clock.monotonic() < until:
        await asyncio.sleep(_LOOK_S)
        left = still_writing(await session.states())
    return left
