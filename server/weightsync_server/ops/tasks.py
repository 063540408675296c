"""Threads and groups of tasks that are never left running unwatched."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from concurrent.futures import Executor

__all__ = ["all_done", "in_thread", "to_end"]

_T = TypeVar("_T")


async def in_thread(
    function: Callable[..., _T], *args: Any, executor: Executor | None = None
) -> _T:
    """Return `function(*args)`, run in a thread.

    Unlike `asyncio.to_thread`, a cancelled caller gets its CancelledError only when the thread is
    done, so that what it does next cannot meet the thread's work half done.

    Args:
        function: What blocks.
        *args: Its arguments.
        executor: Threads to use; None: the loop's own.
    """
    loop = asyncio.get_running_loop()
    return await to_end(loop.run_in_executor(executor, partial(function, *args)))


async def to_end(future: asyncio.Future[_T], on_cancel: Callable[[], object] = lambda: None) -> _T:
    """Return the result of a future or task; a cancelled caller learns of it only at its end.

    Args:
        future: What is waited for.
        on_cancel: Called whenever the caller is cancelled, to bring that end about.
    """
    interrupted: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            interrupted = error
            on_cancel()
    if interrupted is not None:
        if not future.cancelled():
            future.exception()  # retrieved: the cancellation goes before it
        raise interrupted
    return future.result()


async def all_done(works: Iterable[Awaitable[_T]]) -> list[_T]:
    """Return all results; when one fails, wait for the others before its error is raised.

    So whoever frees memory afterwards frees it from under nobody.
    """
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    results: list[_T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results
