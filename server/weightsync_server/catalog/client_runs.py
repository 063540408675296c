"""Which runs of clients push a model: two that do not know of each other are both told."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from weightsync_server.catalog.epochs import Epochs
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable

__all__ = ["ClientRuns", "OtherRun"]

#: Runs that `status` tells.
_TOLD = 8


class OtherRun(NamedTuple):
    """A run other than that of a version, of which the version before came.

    Attributes:
        run: Its name.
        version: The version before.
        alternates: The run of the version itself had pushed before that one: both push.
    """

    run: str
    version: int
    alternates: bool


class ClientRuns:
    """The runs that the versions of a model came from, as far as these exist.

    Args:
        table: The versions.
        epochs: Who took the epoch.
    """

    def __init__(self, table: VersionTable, epochs: Epochs) -> None:
        self._table = table
        self._epochs = epochs

    def check(self, run: str, epoch: int) -> None:
        """Refuse a push without an epoch where another run took one and pushes under it.

        Args:
            run: Who pushes; empty: a client that does not say.
            epoch: That it gave; 0: none.

        Raises:
            WeightSyncError: EPOCH_STALE, naming the other run.
        """
        newest = self._epochs.newest
        if not run or epoch or not newest or run == self._epochs.acquired_by:
            return
        holders = {r.client_run: r for r in self._table.list() if self._holds(r, newest)}
        if holders and run not in holders:
            other, record = next(iter(holders.items()))
            raise WeightSyncError(
                Reason.EPOCH_STALE,
                f"run {other} took epoch {newest} and pushed version {record.version} under it; "
                "stop that run and call acquire_epoch() (`weightsync epoch`) to be the writer, or "
                f"give epoch={newest} if this process belongs to it",
                metadata={"epoch": str(newest), "client_run": other},
            )

    def take(self, record: VersionRecord, request: pb.BeginPushRequest) -> None:
        """Take note of who brings a version."""
        if request.writer:
            # Of several writers the first speaks for all.
            return
        stated = bool(request.epoch) and not request.epoch_assigned
        record.client_run = request.client_run
        record.epoch_taken = bool(request.client_run) and (
            stated or request.client_run == self._epochs.acquired_by
        )

    def before(self, record: VersionRecord) -> OtherRun | None:
        """Return the other run that the version before came from; None: it came from the same."""
        if not record.client_run:
            return None
        earlier = [r for r in self._table.list() if r.version < record.version and _came(r)]
        if not earlier or _same(earlier[0], record):
            return None
        alternates = any(_same(one, record) for one in earlier)
        return OtherRun(earlier[0].client_run, earlier[0].version, alternates)

    def status(self) -> list[pb.ClientRun]:
        """Return the runs, that of the newest version first."""
        found: dict[str, pb.ClientRun] = {}
        for record in filter(_came, self._table.list()):
            one = found.setdefault(
                record.client_run,
                pb.ClientRun(client_run=record.client_run, newest_version=record.version),
            )
            one.versions += 1
            one.has_epoch = one.has_epoch or self._holds(record, self._epochs.newest)
        return list(found.values())[:_TOLD]

    @staticmethod
    def _holds(record: VersionRecord, epoch: int) -> bool:
        return record.epoch == epoch and record.epoch_taken


def _came(record: VersionRecord) -> bool:
    return record.commit is not None and bool(record.client_run)


def _same(one: VersionRecord, other: VersionRecord) -> bool:
    """Tell whether two versions are of one run; one that was resumed keeps its `run_id`."""
    run_id = one.metadata.get("run_id")
    return one.client_run == other.client_run or bool(
        run_id and run_id == other.metadata.get("run_id")
    )
