"""What is under way and until when: so that what outlives its own bound is seen."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

from weightsync import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DeadlineMonitor"]


class DeadlineMonitor:
    """Work that has promised to end. It enforces nothing: each part of the server does that."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count(1)

    @contextlib.contextmanager
    def within(self, what: str, seconds: float) -> Iterator[None]:
        """Take note that the block ends within so many seconds.

        Args:
            what: What it is, such as `the pause of apply 1f`.
            seconds: Its bound, every retry and every grace in it.
        """
        number = next(self._numbers)
        self._running[number] = (what, clock.monotonic() + seconds)
        try:
            yield
        finally:
            del self._running[number]

    def overdue(self) -> Iterator[str]:
        """Yield a sentence for everything that should have ended by now."""
        now = clock.monotonic()
        for number, (what, end) in self._running.items():
            if now > end:
                yield f"{what} (no. {number}) goes on past its bound"
