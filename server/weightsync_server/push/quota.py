"""Shares of the open pushes, so that one caller cannot keep all others out."""

from __future__ import annotations

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError

__all__ = ["Shares"]

#: Seconds after its last begin for which a caller still has a share.
_REMEMBERED_S = 600.0
_RETRY_AFTER_S = 1.0


class Shares:
    """Divides the open pushes among the callers that want some; a lone one may have them all.

    Args:
        total: Pushes open at once.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._wanted: dict[str, float] = {}

    def check(self, who: str, open_pushes: int) -> None:
        """Refuse one more push to a caller that has its share already.

        Args:
            who: The caller.
            open_pushes: Pushes that it has open.

        Raises:
            WeightSyncError: LIMIT_EXCEEDED.
        """
        now = clock.monotonic()
        self._wanted[who] = now
        # No more callers count than can have a push each.
        recent = sorted(self._wanted.items(), key=lambda item: item[1])[-self._total :]
        self._wanted = {name: at for name, at in recent if now - at < _REMEMBERED_S}
        share = -(-self._total // len(self._wanted))
        if open_pushes >= share:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"{who} has {open_pushes} pushes open, its share of {self._total} while "
                f"{len(self._wanted)} callers push; commit or abort one, or raise max_pushes",
                retry_after_s=_RETRY_AFTER_S,
            )
