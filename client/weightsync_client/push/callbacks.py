"""What a push reports to its caller on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["ByteCounter", "SourceRelease"]


class ByteCounter:
    """Counts the bytes of one push as they are sent; threads may share it.

    Args:
        report: Called with bytes sent and bytes in all; None: nobody wants to know.
        total: Bytes in all; 0: not known.
    """

    def __init__(self, report: Callable[[int, int], None] | None, total: int) -> None:
        self._report = report
        self._total = total
        self._lock = threading.Lock()
        self.sent = 0

    def add(self, size: int) -> None:
        """Count a piece, and report."""
        with self._lock:
            self.sent += size
            sent = self.sent
        if self._report is not None:
            self._report(sent, self._total)


class SourceRelease:
    """Tells the caller, once, that its tensors are not in use any more.

    Args:
        callback: Called for that; None: the caller waits for the end of the push.
        restore: Called before that; where nobody is told, the end of the push is soon enough.

    Attributes:
        done: It was called: the tensors may hold other weights by now.
    """

    def __init__(
        self, callback: Callable[[], None] | None, restore: Callable[[], None] = lambda: None
    ) -> None:
        self._callback = callback
        self._restore = restore
        self.done = False

    def __call__(self) -> None:
        """Call it, unless that was done."""
        if self._callback is not None and not self.done:
            self.done = True
            self._restore()
            self._callback()
