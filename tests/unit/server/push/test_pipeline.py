"""What runs for a push, and what its failure means for the push."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.world import begin
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.unit.server.world import World
    from weightsync_server.push.parts import Push


async def opened(here: World) -> Push:
    """Return an open push."""
    return here.pushes.find((await here.pushes.begin(begin(), 10)).push_id)


def failing(error: Exception) -> Coroutine[None, None, None]:
    """Return work that raises an error."""

    async def work() -> None:
        raise error

    return work()


async def test_a_failure_is_the_pushs(here: World) -> None:
    push = await opened(here)
    task = push.pipeline.start(failing(KeyError("x")), "trying it")
    await asyncio.wait([task])
    assert push.state.error is task.exception()
    assert push.state.error is not None
    assert push.state.error.reason is Reason.FAULT
    assert "trying it failed inside the server" in push.state.error.message
    await push.lifecycle.closed()


async def test_a_passing_failure_is_not(here: World) -> None:
    push = await opened(here)
    lost = WeightSyncError(Reason.FETCHER_FAILED, "lost")
    task = push.pipeline.start(failing(lost), "trying it", frozenset({Reason.FETCHER_FAILED}))
    with pytest.raises(WeightSyncError, match="lost"):
        await task
    assert push.state.error is None


async def test_what_is_cancelled_at_once_leaves_nothing_that_was_never_awaited(here: World) -> None:
    push = await opened(here)
    work = failing(KeyError("x"))
    task = push.pipeline.start(work, "trying it")
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
    assert push.state.error is None
