"""The one place at which time is read wherever it decides something.

So that a test that puts another function in the place of one of these lets an hour pass, or sets
the wall clock back. They are called as `clock.monotonic()`, never imported by name. Two kinds of
time are read elsewhere: how long something took, by `time.perf_counter`, and the timeouts of
asyncio, by the event loop's own clock, which is as monotonic.
"""

from __future__ import annotations

import time

__all__ = ["boottime", "monotonic", "wall", "wall_ns"]


def monotonic() -> float:
    """Return seconds that only rise, also while this process stands still; for all that ends."""
    return time.monotonic()


def boottime() -> float:
    """Return seconds that only rise, also while this whole host is suspended.

    For what others count, who are not: a lease has ended there, whatever stood still here.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall() -> float:
    """Return Unix time in seconds, which may jump: for people, and for what people have dated."""
    return time.time()


def wall_ns() -> int:
    """Return Unix time in nanoseconds."""
    return time.time_ns()
