"""Several threads for what one processor core is too slow for: copying and digesting weights."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

#: More than this many threads do not copy faster: memory is the limit.
_MOST = 8
#: For how long one thread keeps the interpreter that another one wants, seconds.
_TURN_S = 0.0002


def commit_thread_count(device: torch.device, ranks: int) -> int:
    """Return how many threads a rank, of so many on the host, may use for its parameters."""
    if device.type != "cpu":
        return 1
    return max(1, min(_MOST, (os.cpu_count() or 1) // ranks))


def background_thread_count(device: torch.device, ranks: int) -> int:
    """Return how many threads a rank, of so many on the host, may use beside generation."""
    if device.type == "cpu":
        return 1
    return max(1, min(_MOST, (os.cpu_count() or 1) // 2 // ranks))


def leave_core() -> None:
    """Let the calling thread run on every core, as far as the system allows.

    vLLM binds a main thread to its cores, and threads inherit that.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def yield_cores() -> None:
    """Let the calling thread run where and when the threads that generate leave room.

    On the core of the worker's main thread it would halve the decode speed.
    """
    leave_core()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Have threads of this process wait for the interpreter no longer than they must.

    Who computes in Python keeps it for 5 ms at a time, and the thread that generates needs it
    several times in a step.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class SliceThreads:
    """Does one thing to each of many slices, the largest first.

    The caller's thread is one of `size`; each of the others calls `begin` first.
    """

    def __init__(self, size: int, begin: Callable[[], None] = leave_core) -> None:
        self._helpers = size - 1
        self._begin = begin
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def each(self, work: Callable[[int], None], sizes: Sequence[int]) -> None:
        """Call `work(index)` for every slice, `sizes` being in bytes; returns when all are done.

        `work` releases the GIL. What it raises first is raised here, and slices that no thread has
        begun are left out.
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
