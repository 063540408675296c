"""The name of the one model of a server."""

from __future__ import annotations

from weightsync.errors import Reason, WeightSyncError

__all__ = ["check_model"]


def check_model(asked: str, served: str) -> None:
    """Refuse a call about another model.

    Args:
        asked: The name that it has.
        served: The one of this server.

    Raises:
        WeightSyncError: MODEL_UNKNOWN.
    """
    if asked != served:
        raise WeightSyncError(
            Reason.MODEL_UNKNOWN,
            f"model {asked!r} is not configured; this server has {served!r}",
        )
