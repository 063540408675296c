"""What operators see of trainers that are attached, and of what they write."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_server.ops.metrics import Metrics

__all__ = ["AttachMetrics"]


class AttachMetrics:
    """Counts for all engines of a server.

    Args:
        metrics: The server's.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._attached = metrics.gauge(
            "weightsync_attached_trainers", "Trainers that have the parameters of an engine."
        )
        self._transactions = metrics.counters(
            "weightsync_in_place_total",
            "Transactions in place by how they ended: committed, restored (the version before was "
            "put back) or failed (the engine was fenced, or nothing was begun).",
            "outcome",
            ("committed", "restored", "failed"),
        )

    def set_attached(self, trainers: int) -> None:
        """Take note of how many trainers are attached."""
        self._attached.set(trainers)

    def count_transaction(self, outcome: str) -> None:
        """Count the end of a transaction."""
        self._transactions[outcome].inc()
