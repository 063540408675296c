"""What the memory of engines is written with, for as long as transactions let it be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from weightsync.shm.attach_server import HandedOut

__all__ = ["OpenBlocks"]


class OpenBlocks:
    """Gives every process of a job what opens the memory, in its block alone.

    What was given is a descriptor, so that the kernel tells the ranks when all are closed.
    """

    def __init__(self) -> None:
        self._open: dict[str, HandedOut] = {}

    def open(self, transaction: str, found: HandedOut) -> None:
        """Give that to who names a transaction, from now on."""
        self._open[transaction] = found

    def close(self, transaction: str) -> None:
        """Give it to nobody any more; repeating it is harmless."""
        found = self._open.pop(transaction, None)
        if found is not None:
            found.close()

    def take(self, transaction: str) -> HandedOut:
        """Return what a block is written with; the caller closes it.

        Raises:
            WeightSyncError: APPLY_RESTORED: it is not open.
        """
        found = self._open.get(transaction)
        if found is None:
            raise WeightSyncError(
                Reason.APPLY_RESTORED,
                f"transaction {transaction} is not open, so that nothing may be written in it; "
                "begin another one",
            )
        return found.copy()
