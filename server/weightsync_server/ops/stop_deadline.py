"""The bound on a stop: this process ends in time, whatever has not ended by then."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: Seconds after the deadline in which the kernel ends a process that cannot even end itself:
#: something keeps Python's lock. And seconds to write into the log why.
_KERNEL_S, _LOG_S = 3.0, 1.0
#: Places that are told of; after a flood thousands of tasks may wait.
_PLACES = 30


class StopDeadline:
    """Ends this process, with exit `code`, and all that it started, when a stop takes too long."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._begun = False

    def begin(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to count, unless that was begun before; call it on the main thread.

        The log says where the tasks of `loop` wait.
        """
        if self._begun:
            return
        self._begun = True
        signal.setitimer(signal.ITIMER_REAL, seconds + _KERNEL_S)
        watch = threading.Thread(
            target=self._watch, args=(seconds, loop), name="stop-deadline", daemon=True
        )
        # Without a thread for it the kernel's timer is left.
        with contextlib.suppress(RuntimeError):
            watch.start()

    def _watch(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        # A thread, because the loop may be what hangs, or may have ended before what does.
        threading.Event().wait(seconds)
        try:
            places = _unfinished(loop)
            children = _descendants(os.getpid())
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            # In a thread of its own: nobody may read the log, which may be why this is needed.
            text = (seconds, len(children), "\n".join(places))
            writing = threading.Thread(target=_tell, args=text, name="stop-deadline-log")
            writing.daemon = True
            writing.start()
            writing.join(_LOG_S)
        finally:
            os._exit(self._code)


def _tell(seconds: float, children: int, places: str) -> None:
    logger.critical(
        "did not stop within %g s: exiting, with %d of its own processes; still waiting:\n%s",
        seconds,
        children,
        places,
    )
    faulthandler.dump_traceback(sys.stderr)


def _unfinished(loop: asyncio.AbstractEventLoop) -> list[str]:
    places = Counter(_place(task) for task in asyncio.all_tasks(loop))
    return [f"{count} x {place}" for place, count in places.most_common(_PLACES)]


def _place(task: asyncio.Task[Any]) -> str:
    names = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        names.append(getattr(awaited, "__qualname__", type(awaited).__name__))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return " > ".join(names)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]
