"""Has the codec compiled while nobody waits for it."""

from __future__ import annotations

import threading

__all__ = ["Warmth"]


class Warmth:
    """Compiles the codec's kernels in a thread of its own, once; until then it is slower."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it was begun; returns at once."""
        from weightsync.delta import warm_up

        with self._lock:
            if self._thread is None:
                # No daemon: a compiler that is torn down with the interpreter may crash it.
                self._thread = threading.Thread(target=warm_up, name="weightsync-warm-up")
                self._thread.start()
