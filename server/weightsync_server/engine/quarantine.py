"""Leases of versions that a rank may still read although nobody waits for it any more.

A commit that was given up, or whose answer was lost, may go on in the engine. Until every rank has
answered a later call, nothing else may come into the memory that it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.refusals import OUT_OF_REACH
from weightsync_server.engine.version_loads import LoadFailedError

if TYPE_CHECKING:
    from weightsync_server.engine.ranks import Ranks
    from weightsync_server.residency.leases import SlotLease

__all__ = ["QuarantinedLeases"]

#: After these nobody knows what the ranks do or hold, or whether the engine generates.
_UNSURE = OUT_OF_REACH | {Reason.ENGINE_FENCED, Reason.FAULT}


class QuarantinedLeases:
    """Keeps such leases until the ranks have answered."""

    def __init__(self) -> None:
        self._leases: list[SlotLease] = []

    @staticmethod
    def outcome_unknown(ranks: Ranks, error: BaseException) -> bool:
        """Return whether nobody knows any more what the ranks do, after a call that failed so."""
        loading = isinstance(error, LoadFailedError)
        known = loading or (isinstance(error, WeightSyncError) and error.reason not in _UNSURE)
        return not known or ranks.may_write

    def release(self, lease: SlotLease, ranks: Ranks, error: BaseException) -> None:
        """Release a lease of what was not made live: at once, or after the ranks' next answer."""
        if self.outcome_unknown(ranks, error):
            self._leases.append(lease)
        else:
            lease.release()

    def answered(self) -> None:
        """Take note that every rank has answered a call, and so is done with those before."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()
