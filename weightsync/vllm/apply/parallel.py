"""Several threads for what one processor core is too slow for: copying and digesting weights."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "SliceThreads",
    "background_thread_count",
    "commit_thread_count",
    "leave_core",
    "taking_turns",
    "yield_cores",
]

#: More than this many threads do not copy faster: memory is the limit.
_MOST = 8
#: For how long one thread keeps the interpreter that another one wants, seconds.
_TURN_S = 0.0002


def commit_thread_count(device: torch.device, ranks: int) -> int:
    """Return how many threads a rank may use for its parameters: on a CPU its share of the cores.

    Args:
        device: Where the parameters are; a GPU copies by itself.
        ranks: Workers on this host.
    """
    if device.type != "cpu":
        return 1
    return max(1, min(_MOST, (os.cpu_count() or 1) // ranks))


def background_thread_count(device: torch.device, ranks: int) -> int:
    """Return how many threads a rank may use beside generation: where that needs the cores, one.

    Args:
        device: Where the parameters are; beside a GPU half of the cores are free.
        ranks: Workers on this host.
    """
    if device.type == "cpu":
        return 1
    return max(1, min(_MOST, (os.cpu_count() or 1) // 2 // ranks))


def leave_core() -> None:
    """Let the calling thread run on every core, as far as the system allows.

    vLLM binds a worker's main thread to its cores, and threads inherit that.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def yield_cores() -> None:
    """Let the calling thread run where and when the threads that generate leave room.

    On the core of the worker's main thread it would halve the decode speed. Both calls are per
    thread on Linux, and best effort.
    """
    leave_core()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Have threads of this process wait for the interpreter no longer than they must.

    Who computes in Python keeps it for 5 ms at a time, as long as a step takes on a GPU, and the
    thread that generates needs it several times in a step.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class SliceThreads:
    """Does one thing to each of many slices, the largest first, the caller helping.

    Args:
        size: Threads, the caller's among them.
        begin: What each of the others does first.
    """

    def __init__(self, size: int, begin: Callable[[], None] = leave_core) -> None:
        self._helpers = size - 1
        self._begin = begin
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def each(self, work: Callable[[int], None], sizes: Sequence[int]) -> None:
        """Call `work(index)` for every slice; returns when all are done.

        Args:
            work: Releases the GIL while it copies or digests. What it raises first is raised here,
                and slices that nobody has begun are left out.
            sizes: Bytes of each slice.
        """
        # A list's iterator gives every index to one thread only.
        order = iter(sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True))
        failed = threading.Event()

        def run() -> None:
            with torch.inference_mode():
                for index in order:
                    if failed.is_set():
                        return
                    try:
                        work(index)
                    except BaseException:
                        failed.set()
                        raise

        helpers = [self._executor().submit(run) for _ in range(min(self._helpers, len(sizes) - 1))]
        try:
            run()
        finally:
            # Nothing may still be written when this returns, whatever happened.
            errors = [helper.exception() for helper in helpers]
        for error in errors:
            if error is not None:
                raise error

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._helpers, thread_name_prefix="weightsync", initializer=self._begin
                )
            return self._pool
