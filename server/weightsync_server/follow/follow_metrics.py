"""What operators see of a follower."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_server.ops.metrics import Metrics
    from weightsync_server.store.objects.piece_digests import CacheOutcome

__all__ = ["FollowMetrics"]

#: What may come of a piece that a cache is asked for.
_PIECES = ("right", "wrong", "missing")


class FollowMetrics:
    """Counts for one follower; a server that follows none has none of them.

    Args:
        metrics: The server's.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._up = metrics.gauge(
            "weightsync_follow_origin_up", "1 while the origin of a follower answers."
        )
        self._lag = metrics.gauge(
            "weightsync_follow_lag_versions",
            "Versions of the origin above the newest one that this follower has.",
        )
        self._failures = metrics.counter(
            "weightsync_follow_failures_total",
            "Tries of a follower to have the newest version that failed.",
        )
        self._fetches = metrics.counters(
            "weightsync_follow_fetched_total",
            "Versions that a follower has fetched, by the form in which they came.",
            "form",
            ("full", "delta"),
        )

        self._pieces = metrics.counters(
            "weightsync_follow_cache_pieces_total",
            "Pieces of shards that a follower asked its cache for: right, wrong, or missing there.",
            "outcome",
            _PIECES,
        )

    def set_up(self, *, up: bool) -> None:
        """Take note of whether the origin answers."""
        self._up.set(up)

    def set_lag(self, versions: int) -> None:
        """Take note of how many versions of the origin are newer than all that are here."""
        self._lag.set(versions)

    def count_failure(self) -> None:
        """Count a try that failed."""
        self._failures.inc()

    def count_fetch(self, *, delta: bool) -> None:
        """Count a version that is here now."""
        self._fetches["delta" if delta else "full"].inc()

    def count_pieces(self, outcome: CacheOutcome) -> None:
        """Count what a cache had of one shard."""
        for name in _PIECES:
            self._pieces[name].inc(getattr(outcome, name))
