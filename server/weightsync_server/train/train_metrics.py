"""What operators see of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_server.ops.metrics import Metrics

__all__ = ["JOB_OUTCOMES", "TrainMetrics"]

JOB_OUTCOMES = ("finished", "failed", "cancelled")


class TrainMetrics:
    """Counts for one trainer; a server that supervises none has none of them.

    Args:
        metrics: The server's.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._jobs = metrics.counters(
            "weightsync_train_jobs_total", "Jobs of the trainer ended.", "outcome", JOB_OUTCOMES
        )
        self._restarts = metrics.counter(
            "weightsync_trainer_restarts_total", "Trainers started again."
        )

    def track(self, *, up: Callable[[], float], queued: Callable[[], float]) -> None:
        """Have what changes be read at each scrape.

        Args:
            up: 1 while the trainer waits for jobs, or runs one.
            queued: Jobs that wait.
        """
        self._metrics.track(
            "weightsync_trainer_up", "1 while the trainer waits for jobs, or runs one.", up
        )
        self._metrics.track("weightsync_train_queued_jobs", "Jobs that wait.", queued)

    def count_job(self, outcome: str) -> None:
        """Count the end of a job: one of `JOB_OUTCOMES`."""
        self._jobs[outcome].inc()

    def count_restart(self) -> None:
        """Count a trainer that was started again."""
        self._restarts.inc()
