"""How long to wait before something is tried, or looked at, again."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import TypeVar

from weightsync import clock

T = TypeVar("T")

#: More failures in a row lengthen no wait: a power of them would be too large for a float.
_MOST_FAILURES = 200


def backoff_s(
    failures: int, first_s: float, most_s: float, factor: float = 2.0, *, jitter: float = 0.0
) -> float:
    """Return the seconds to wait after so many failures in a row, counted from 1.

    They grow from `first_s` to `most_s` by `factor`; the part `jitter`, from 0 to 1, is random.
    """
    longest_s = min(most_s, first_s * factor ** min(failures - 1, _MOST_FAILURES))
    # Jitter keeps many from knocking at the same moment; it needs no secrecy.
    return random.uniform((1 - jitter) * longest_s, longest_s)  # noqa: S311


async def until(look: Callable[[], T], every_s: float, timeout_s: float = math.inf) -> T:
    """Return what `look` returns as soon as that is true, else its last result when time is over.

    It looks at once, then every `every_s` seconds.
    """
    end = clock.monotonic() + timeout_s
    while not (found := look()) and clock.monotonic() < end:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(every_s)
    return found
