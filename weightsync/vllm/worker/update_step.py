"""What a rank does for an update in a thread of its own, and what ends it when nothing comes."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from weightsync import clock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["UpdateStep"]

logger = logging.getLogger(__name__)

#: How often it is looked whether anything comes, seconds.
_LOOK_S = 0.1


class UpdateStep:
    """Work beside generation, whose steps go on.

    Args:
        work: What is done.
        undo: Done by its thread when `work` has ended, if nobody waited for that.

    Attributes:
        error: Why it failed; "": it did not.
        over: Whether it has ended; `error` is known by then.
    """

    def __init__(self, work: Callable[[], None], undo: Callable[[], None]) -> None:
        self.error = ""
        self.over = False
        self._work, self._undo = work, undo
        self._left = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="weightsync-update", daemon=True).start()

    def watch(self, arrived: Callable[[], int], limit_s: float, end: Callable[[], None]) -> None:
        """End it when nothing comes, although nobody may be able to ask this rank for it.

        What waits for the device, in the thread that answers calls, waits for the trainer as well.

        Args:
            arrived: Tells how much has come.
            limit_s: Longest time in which that stays the same, seconds.
            end: Ends what it waits for.
        """
        threading.Thread(
            target=self._watch, args=(arrived, limit_s, end), name="weightsync-watch", daemon=True
        ).start()

    def leave(self) -> bool:
        """Wait for it no longer; return whether it was over, so that its thread undoes nothing."""
        with self._lock:
            self._left = True
            return self.over

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            logger.exception("weightsync: a step of an update failed")
            self.error = f"{type(error).__name__}: {error}"[:500]
        with self._lock:
            self.over = True
            left = self._left
        self._ended.set()
        if left:
            self._undo()

    def _watch(self, arrived: Callable[[], int], limit_s: float, end: Callable[[], None]) -> None:
        before, since = arrived(), clock.monotonic()
        while not self._ended.wait(_LOOK_S):
            now = arrived()
            if now != before:
                before, since = now, clock.monotonic()
            elif clock.monotonic() - since > limit_s:
                logger.error("weightsync: nothing came for %g s; the update is given up", limit_s)
                end()
                return
