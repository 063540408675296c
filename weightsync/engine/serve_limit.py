"""The time for which an engine may serve: whoever does not hear from its server stops in time."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from weightsync import clock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ServeLimit"]


class ServeLimit:
    """At most one limit, which each word of the server moves; without one the engine serves on.

    It is counted by `clock.boottime`, as the server counts, also while the host is suspended. One
    that has run out is noticed before it is moved, also when this process stood still meanwhile and
    hears of both at once. After a suspension the timer comes late, as the event loop's clock stood
    still: whoever answers for the engine calls `check` first.

    Args:
        on_end: Called when it has run out; it stays so until it is moved.

    Attributes:
        reason: Why an engine is fenced then, in one sentence.
    """

    reason = (
        "its weightsync-server has not said in time that this engine may serve on: it is dead, "
        "stands still, or cannot read its fleet's register for max_age_s; start it again, and see "
        "`weightsync fleet status`"
    )

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """Whether the engine may not serve now."""
        return clock.boottime() >= self._until

    def check(self) -> None:
        """Notice that it has run out, where nobody has noticed yet."""
        if self._timer is not None and self.over:
            self._end()

    def move(self, seconds: float | None) -> None:
        """Let the engine serve for so long from now; None: without a limit."""
        self.check()
        self.drop()
        if seconds is not None:
            self._until = clock.boottime() + seconds
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(seconds, 0.0), self._end)

    def drop(self) -> None:
        """Forget the limit."""
        self._until = math.inf
        self._stop()

    def _end(self) -> None:
        self._stop()
        self._on_end()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
