"""Who may write: the epoch of a model, which only rises and is persisted before it counts."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.tasks import to_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from weightsync_server.store.protocol import Store

__all__ = ["Epochs", "check_run"]

logger = logging.getLogger(__name__)

_MAX_HOLDER_BYTES, _MAX_RUN_BYTES = 256, 128


async def _nothing() -> None: ...


def check_run(client_run: str) -> None:
    """Refuse the name of a client's run that is no short line of text.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if len(client_run.encode()) > _MAX_RUN_BYTES or not client_run.isprintable():
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"client_run must be printable, of at most {_MAX_RUN_BYTES} bytes; shorten it",
        )


class Epochs:
    """The newest epoch of one model.

    Attributes:
        newest: The newest epoch; 0: nobody has asked for one.
        acquired_by: The run of the client that asked for it; empty: not known.
        lock: Held over each commit, so that no older writer commits after `acquire` returned.
    """

    def __init__(self, model: str, store: Store) -> None:
        self.newest = 0
        self.acquired_by = ""
        self.lock = asyncio.Lock()
        self._model = model
        self._store = store
        self._observers: list[Callable[[], None]] = []
        #: Awaited after each rise and each doubt: what was committed elsewhere.
        self.catch_up: Callable[[], Awaitable[None]] = _nothing
        self._doubtful = False

    async def open(self, committed: int = 0) -> None:
        """Read the persisted epoch; it never falls.

        Args:
            committed: Newest epoch of a committed version: an epoch file that was lost or put back
                does not make its writer's predecessors good again.
        """
        stored = await self._store.read_epoch(self._model)
        if stored < committed:
            logger.critical("the epoch fell to %d, a version has %d", stored, committed)
        self.newest = max(stored, committed)

    def observe(self, observer: Callable[[], None]) -> None:
        """Call `observer` after each rise, before the new writer is answered."""
        self._observers.append(observer)

    async def acquire(self, holder: str, client_run: str = "") -> int:
        """Return the next epoch, persisted; older writers are refused from now on.

        Args:
            holder: Who asks, for the log.
            client_run: The run of the client that asks; empty: not told.

        Raises:
            WeightSyncError: REQUEST_INVALID for a holder or a run that is too long.
        """
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
        logger.info("epoch %d of model %s goes to %r", self.newest, self._model, holder)
        await self.catch_up()
        return self.newest

    def doubt(self, error: WeightSyncError) -> None:
        """Take note of a refusal by the store after which it may have a version unknown here.

        Else the number of that version would be given, and refused, again and again.
        """
        if not self._store.local and error.reason in (Reason.FAULT, Reason.VERSION_CONFLICT):
            self._doubtful = True

    async def settle(self) -> None:
        """Take up what was committed elsewhere if there is a doubt.

        Raises:
            WeightSyncError: The store cannot be used.
        """
        if not self._doubtful:
            return
        async with self.lock:
            await self.catch_up()
            self._doubtful = False

    def check(self, epoch: int) -> int:
        """Return the epoch to bind to; 0 stands for the newest.

        Raises:
            WeightSyncError: EPOCH_STALE for any other than the newest.
        """
        if epoch in (0, self.newest):
            return self.newest
        raise self.stale(epoch)

    def stale(self, epoch: int) -> WeightSyncError:
        """Return the refusal of an epoch that is not the newest."""
        what = "is stale" if epoch < self.newest else "was not issued here"
        return WeightSyncError(
            Reason.EPOCH_STALE,
            f"epoch {epoch} of model {self._model} {what}, the newest is {self.newest}; call "
            "AcquireEpoch if this process shall be the writer, else stop",
            metadata={"epoch": str(self.newest)},
        )
