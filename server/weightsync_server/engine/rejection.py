"""Rejects what an engine left, or could not take."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from weightsync_server.catalog.serving import ServingState

__all__ = ["reject"]

logger = logging.getLogger(__name__)


async def reject(serving: ServingState, version: int, reason: str) -> bool:
    """Reject a version that the engine left, so that "newest" does not go back to it.

    Returns whether it is rejected, and raises nothing.
    """
    try:
        await serving.reject(version, reason)
    except WeightSyncError as error:
        # It may never have been committed, and gone when another version took its place.
        if error.reason is not Reason.VERSION_UNKNOWN:
            # What the engine serves is not less true for it.
            logger.critical("version %d could not be rejected: %s", version, error.message)
        return False
    return True
