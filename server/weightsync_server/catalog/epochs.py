"""Who may write: the epoch of a model, which only rises and is persisted before it counts.

Two runs of clients that push a model and do not know of each other are both told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ops.tasks import to_end

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.store.protocol import Store

logger = logging.getLogger(__name__)

_MAX_HOLDER_BYTES, _MAX_RUN_BYTES = 256, 128


def check_run(client_run: str) -> None:
    if len(client_run.encode()) > _MAX_RUN_BYTES or not client_run.isprintable():
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"client_run must be printable, of at most {_MAX_RUN_BYTES} bytes; shorten it",
        )


class Epochs:
    """The newest epoch of one model: 0 while no client has asked for one.

    `acquired_by` is the run of the client that asked for the newest one, empty if it is not known.
    `lock` is held over each commit, so that no older writer commits after `acquire` returned.
    `catch_up` is awaited after each rise and each doubt: what was committed elsewhere.
    """

    def __init__(self, model: str, store: Store, catch_up: Callable[[], Awaitable[None]]) -> None:
        self.newest = 0
        self.acquired_by = ""
        self.lock = asyncio.Lock()
        self._model = model
        self._store = store
        self._observers: list[Callable[[], None]] = []
        self.catch_up = catch_up
        self._doubtful = False

    async def open(self, committed: int = 0) -> None:
        """Read the persisted epoch; it never falls below `committed`, that of a committed version.

        So a lost or restored epoch file does not readmit earlier writers.
        """
        stored = await self._store.read_epoch(self._model)
        if stored < committed:
            logger.critical(
                "the store has epoch %d, below that of a version, %d: it was restored from an "
                "older copy, or lost its epoch; epochs go on from %d",
                stored,
                committed,
                committed,
            )
        self.newest = max(stored, committed)

    def observe(self, observer: Callable[[], None]) -> None:
        """Call `observer` after each rise, before the new writer is answered."""
        self._observers.append(observer)

    async def acquire(self, holder: str, client_run: str = "") -> int:
        """Return the next epoch, persisted; older writers are refused. `holder` is for the log."""
        check_run(client_run)
        if len(holder.encode()) > _MAX_HOLDER_BYTES:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"holder has more than {_MAX_HOLDER_BYTES} bytes; shorten it",
            )
        async with self.lock:
            # To its end even if the caller leaves: what is written must count.
            return await to_end(asyncio.ensure_future(self._rise(holder, client_run)))

    async def follow(self, epoch: int) -> None:
        """Take over an epoch that another server's writers have, if it is newer; persisted."""
        async with self.lock:
            if epoch > self.newest:
                await self._store.write_epoch(self._model, epoch)
                self.newest, self.acquired_by = epoch, ""

    async def _rise(self, holder: str, client_run: str) -> int:
        # Another server that uses the store may have gone further.
        epoch = max(self.newest, await self._store.read_epoch(self._model)) + 1
        await self._store.write_epoch(self._model, epoch)
        self.newest, self.acquired_by = epoch, client_run
        for observer in self._observers:
            observer()
        logger.info("epoch %d of model %s is acquired by %r", self.newest, self._model, holder)
        await self.catch_up()
        return self.newest

    def doubt(self, error: WeightSyncError) -> None:
        """Note a refusal after which the store may have a version that is unknown here.

        Else its number would be given, and refused, again and again.
        """
        if not self._store.local and error.reason in (Reason.FAULT, Reason.VERSION_CONFLICT):
            self._doubtful = True

    async def settle(self) -> None:
        if not self._doubtful:
            return
        async with self.lock:
            await self.catch_up()
            self._doubtful = False

    def check(self, epoch: int) -> int:
        """Return the epoch to bind to: the newest, for which 0 stands; EPOCH_STALE for another."""
        if epoch in (0, self.newest):
            return self.newest
        raise self.stale(epoch)

    def stale(self, epoch: int) -> WeightSyncError:
        what = "is stale" if epoch < self.newest else "was not issued here"
        return WeightSyncError(
            Reason.EPOCH_STALE,
            f"epoch {epoch} of model {self._model} {what}, the newest is {self.newest}; call "
            "AcquireEpoch if this process should be the writer; otherwise stop it",
            metadata={"epoch": str(self.newest)},
        )


#: Runs that `status` tells.
_TOLD = 8


class OtherRun(NamedTuple):
    """The run that pushed the version before a given one, if it is another run.

    `alternates`: the given version's run pushed before that one, so both push.
    """

    run: str
    version: int
    alternates: bool


class ClientRuns:
    """The runs that the versions of a model came from, as far as these exist."""

    def __init__(self, table: VersionTable, epochs: Epochs) -> None:
        self._table = table
        self._epochs = epochs

    def check(self, run: str, epoch: int) -> None:
        """Refuse a push without an epoch where another run took one and pushes under it.

        An `epoch` of 0 is none. A client with an empty `run` is not refused.
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
        if request.writer:
            # Of several writers the first speaks for all.
            return
        stated = bool(request.epoch) and not request.epoch_assigned
        took = stated or request.client_run == self._epochs.acquired_by
        record.name_run(request.client_run, epoch_taken=bool(request.client_run) and took)

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
