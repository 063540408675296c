"""Calls of an engine, which must be answered in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["answered"]

_T = TypeVar("_T")


async def answered(call: Awaitable[_T], seconds: float, what: str) -> _T:
    """Return what a call of an engine returns in so many seconds.

    Args:
        call: The call.
        seconds: The longest wait.
        what: Of what kind it is, for people.

    Raises:
        WeightSyncError: ENGINE_AWAY: it was not answered. What the call raises.
    """
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        # Not known whether it was done: the ranks are asked before anything else.
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            f"vLLM did not answer a {what} within {seconds:g} s; look at its log and apply again",
        ) from None
