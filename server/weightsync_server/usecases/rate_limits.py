"""What callers may ask at once and per second; the rest is refused before it costs anything."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.settings_group import setting

#: Seconds worth of calls that may come at once.
_BURST_S = 2.0
#: Callers whose rates are remembered.
_CALLERS = 1024
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class CallSettings:
    """Bounds on calls, over all pushes and models; the rate is per caller and service."""

    calls_per_s: float = setting(
        500,
        "Calls per second of one caller; bursts may have twice as many.",
        name="max_calls_per_s",
        ge=1,
    )
    streams: int = setting(
        32, "Concurrent PushWeights streams, of all pushes.", name="max_streams", ge=1
    )
    pulls: int = setting(16, "Concurrent PullWeights streams.", name="max_pulls", ge=1)
    watches: int = setting(
        64,
        "Other concurrent streams, such as WatchVersions and health watches.",
        name="max_watches",
        ge=1,
    )
    reader_timeout_s: float = setting(
        10, "Seconds that a reader may take for one message of a stream.", gt=0
    )


class Rates:
    """Counts the calls of each caller: so many per second, and those of two seconds at once."""

    def __init__(self, calls_per_s: float) -> None:
        self._rate = calls_per_s
        #: When each caller's last call would have been due at the rate; the newest callers.
        self._due: OrderedDict[tuple[str, str], float] = OrderedDict()

    def take(self, who: tuple[str, str]) -> float:
        """Count a call and return 0, or return after how many seconds it may come again."""
        now = clock.monotonic()
        due = max(now - _BURST_S, self._due.pop(who, 0.0)) + 1 / self._rate
        if due > now:
            self._due[who] = due - 1 / self._rate
            return due - now
        self._due[who] = due
        if len(self._due) > _CALLERS:
            self._due.popitem(last=False)
        return 0.0


class RateLimits:
    def __init__(self, limits: CallSettings) -> None:
        self._limits = limits
        self._rates = Rates(limits.calls_per_s)
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def admitted(self, kind: str, service: str, who: str) -> Iterator[None]:
        """Count a call of `who`: of the kind `streams`, `pulls`, `watches` or `calls`."""
        wait = self._rates.take((who, service))
        if wait:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"over {self._limits.calls_per_s:g} calls per second from {who}; call less often, "
                "or raise max_calls_per_s",
                retry_after_s=wait,
            )
        most = {
            "streams": self._limits.streams,
            "pulls": self._limits.pulls,
            "watches": self._limits.watches,
        }.get(kind)
        if most is not None and self._open[kind] >= most:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"{most} {kind} are open, the most there may be; end one, or raise max_{kind}",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._open[kind] += 1
        try:
            yield
        finally:
            self._open[kind] -= 1
