"""Links and request rates, as clocks: a queue needs no event of its own."""

from __future__ import annotations

__all__ = ["Link", "RequestRate"]


class Link:
    """Serves what is sent in the order in which it was asked for, at one rate.

    Args:
        units_per_s: Bytes or requests in a second.
    """

    def __init__(self, units_per_s: float) -> None:
        self._rate = units_per_s
        self._free_at = 0.0

    def send(self, now: float, units: float) -> float:
        """Return when the last of these has been served, in seconds of the simulation."""
        self._free_at = max(now, self._free_at) + units / self._rate
        return self._free_at


class RequestRate:
    """Admits requests up to a rate, with a burst, and refuses the others.

    Args:
        requests_per_s: Of a long time.
        burst: That are admitted at once after a pause.
    """

    def __init__(self, requests_per_s: float, burst: float) -> None:
        self._rate = requests_per_s
        self._burst = burst
        self._tokens = burst
        self._counted_at = 0.0

    def admit(self, now: float, requests: int) -> bool:
        """Return whether so many requests are served; else none of them is.

        More than the burst are admitted from a full one, and the next wait for longer.
        """
        more = (now - self._counted_at) * self._rate
        self._tokens = min(self._burst, self._tokens + more)
        self._counted_at = now
        if self._tokens < min(requests, self._burst):
            return False
        self._tokens -= requests
        return True
