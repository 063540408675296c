"""Threads of an event loop that stand still until a test lets them go."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["HeldThreads", "held_threads", "memfds", "stand_still"]


class HeldThreads(ThreadPoolExecutor):
    """Threads that take work and do nothing of it before `go` is set.

    Attributes:
        begun: A thread has taken some: it cannot be called back any more.
        go: Set it to let all of them work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(4)
        self.begun = asyncio.Event()
        self.go = threading.Event()
        self._loop = loop

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Take work."""
        return super().submit(self._held, fn, *args, **options)

    def _held(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._loop.call_soon_threadsafe(self.begun.set)
        self.go.wait()
        return fn(*args, **options)


@contextlib.contextmanager
def held_threads() -> Iterator[HeldThreads]:
    """Hold the threads of the running loop; what they were given is done at the end."""
    loop = asyncio.get_running_loop()
    held = HeldThreads(loop)
    loop.set_default_executor(held)
    try:
        yield held
    finally:
        held.go.set()
        loop.set_default_executor(ThreadPoolExecutor())
        held.shutdown()


async def stand_still() -> None:
    """Return when every task has come as far as it can without a thread, a timer or a socket."""
    for _ in range(100):
        await asyncio.sleep(0)


def memfds() -> int:
    """Return how many segments this process has open."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:weightsync" in str(link.readlink())
    return found
