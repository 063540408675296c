"""Rejecting what an engine left behind, so that "newest" does not go back to it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from weightsync_server.model import ModelVersions

__all__ = ["reject"]

logger = logging.getLogger(__name__)


async def reject(versions: ModelVersions, version: int, reason: str) -> bool:
    """Reject a version that the engine left; return whether it is, and raise nothing."""
    if versions.find(version) is None:
        # It was never committed, and went when another version took its place.
        return False
    try:
        await versions.set_rejected(version, reason)
    except WeightSyncError as error:
        # What the engine serves is not less true for it.
        logger.critical("version %d could not be rejected: %s", version, error.message)
        return False
    return True
