"""Which version loses its slot to another, and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from weightsync_server.catalog.commits import CommitService
    from weightsync_server.catalog.garbage_collector import GarbageCollector
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.serving import ServingState
    from weightsync_server.catalog.table import VersionTable

__all__ = ["EvictionPolicy"]


class EvictionPolicy:
    """Bounds memory; never touches what is live, leased, pinned or being written.

    Args:
        table: The versions of the model.
        serving: Which of them is live.
        commits: Erases what is lost with its slot.
        collector: Knows who is in use.
        durable: What loses its slot can be read from the store again.
    """

    def __init__(
        self,
        table: VersionTable,
        serving: ServingState,
        commits: CommitService,
        collector: GarbageCollector,
        *,
        durable: bool,
    ) -> None:
        self._table = table
        self._serving = serving
        self._commits = commits
        self._collector = collector
        self._durable = durable

    def order(self, record: VersionRecord, claimer: VersionRecord) -> tuple[int, int] | None:
        """Tell when a version loses its slot to another, smallest first; None: it keeps it."""
        if self._collector.use(record):
            return None
        if record.holds and not self._durable and claimer.base is not record:
            # Its only copy, which a delta needs.
            return None
        if record.version == self._table.newest and not record.rejected_reason:
            return (2, record.version)
        return (1 if record.version in self._serving.ways_back else 0, record.version)

    def evict(self, record: VersionRecord) -> None:
        """Take note that a version loses its slot."""
        record.residency = pb.RESIDENCY_ABSENT
        record.manifest = None
        if self._durable:
            self._table.publish(record)
        else:
            # memory://: its slot was all there was of it.
            self._table.remove(record)
            self._collector.spawn(self._commits.scrub(record))
