"""The one place at which time is read wherever it decides something, so that tests can replace it.

It is called as `clock.monotonic()`, never imported by name. How long something took is told by
`time.perf_counter`, and asyncio's timeouts by the event loop's own clock, which is as monotonic.
"""

from __future__ import annotations

import time


def monotonic() -> float:
    """Return seconds that only rise, also while this process stands still; for all that ends."""
    return time.monotonic()


def boottime() -> float:
    """Return seconds that only rise, also while this host is suspended.

    Leases that others count go on meanwhile.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall() -> float:
    """Return Unix time in seconds, which may jump: for people, and for what people have dated."""
    return time.time()


def wall_ns() -> int:
    """Return Unix time in nanoseconds."""
    return time.time_ns()
