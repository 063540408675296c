"""Threads and tasks that are never left running unwatched, and the time by which each must end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from weightsync import clock

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from weightsync.model.manifest import Manifest
    from weightsync.v1 import weightsync_pb2 as pb

_T = TypeVar("_T")


async def in_thread(
    function: Callable[..., _T], *args: Any, executor: Executor | None = None
) -> _T:
    """Return `function(*args)`, run in a thread of `executor` or the loop's own.

    Unlike `asyncio.to_thread`, a cancelled caller gets its CancelledError only when the thread is
    done, so that what it does next cannot meet the thread's work half done.
    """
    loop = asyncio.get_running_loop()
    return await to_end(loop.run_in_executor(executor, partial(function, *args)))


async def to_end(future: asyncio.Future[_T], on_cancel: Callable[[], object] = lambda: None) -> _T:
    """Return a future's result; a caller that is cancelled learns of it only at its end.

    `on_cancel` is called at each cancellation, to bring that end about.
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
    """Return all results; an error is raised only once all have ended, so memory can be freed."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    results: list[_T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


async def cancel_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel what there is, and return when it has ended, however that was."""
    ending = [task for task in tasks if task is not None and not task.done()]
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


class DeadlineMonitor:
    """Work that has promised to end. It enforces nothing: each part of the server does that."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count(1)

    @contextlib.contextmanager
    def within(self, what: str, seconds: float) -> Iterator[None]:
        """Note that the block, named by `what`, ends within so many seconds, retries included."""
        number = next(self._numbers)
        self._running[number] = (what, clock.monotonic() + seconds)
        try:
            yield
        finally:
            del self._running[number]

    def overdue(self) -> Iterator[str]:
        now = clock.monotonic()
        for number, (what, end) in self._running.items():
            if now > end:
                yield f"{what} (no. {number}) exceeded its time limit"


@dataclass(slots=True)
class TaskSet:
    """What is under way in a push as a whole, and not in a shard.

    Attributes:
        opening: Gets it its slot; None: an earlier life of the server did.
        resuming: Gets it its slot again, after it was suspended.
        suspending: Makes what came durable, then gives its slot back.
        sealing: Makes its manifest, once all bytes are proved.
        closing: Frees everything of one that failed.
    """

    opening: asyncio.Task[None] | None = None
    resuming: asyncio.Task[None] | None = None
    suspending: asyncio.Task[None] | None = None
    sealing: asyncio.Task[Manifest] | None = None
    committing: asyncio.Task[pb.CommitPushResponse] | None = None
    closing: asyncio.Task[None] | None = None


#: What nobody may be waiting for: the loop alone would not keep these tasks.
_started: set[asyncio.Task[Any]] = set()


def start_task(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Return a task that goes on, and whose error is taken, also when whoever would ask is gone."""
    task = asyncio.create_task(work)
    _started.add(task)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[Any]) -> None:
    _started.discard(task)
    retrieve(task)


def retrieve(ended: asyncio.Future[Any]) -> None:
    """Take the error of what has ended, at which nobody may be there to look."""
    if not ended.cancelled():
        ended.exception()


def is_running(task: asyncio.Task[_T] | None) -> TypeGuard[asyncio.Task[_T]]:
    return task is not None and not task.done()
