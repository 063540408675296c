"""The rollout's side of a weight sync: it asks the server until the actor's version is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from weightsync.errors import Reason
from weightsync_client.errors import ClientError, DeadlineError, UnavailableError, refuse

__all__ = ["wait_for"]

T = TypeVar("T")

#: Every rank of the rollout asks so often, seconds.
_POLL_S = 0.2


async def wait_for(find: Callable[[], T | None], timeout_s: float, sentence: str) -> T:
    """Return what is found at last; a server that restarts meanwhile is waited for.

    Args:
        find: Asks the server, in a thread; None: not yet.
        timeout_s: How long, in seconds.
        sentence: What the error says if it is not found.

    Raises:
        ClientError: DEADLINE_EXCEEDED, or that no server answers; any other of `find` at once.
    """
    until = time.monotonic() + timeout_s
    last: ClientError | None = None
    while True:
        try:
            found = await asyncio.to_thread(find)
            if found is not None:
                return found
            last = None
        except (UnavailableError, DeadlineError) as error:
            last = error  # A server that restarts goes on with what it was doing.
        if time.monotonic() >= until:
            raise last or refuse(Reason.DEADLINE_EXCEEDED, sentence)
        await asyncio.sleep(_POLL_S)
