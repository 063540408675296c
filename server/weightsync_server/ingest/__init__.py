"""Bytes come in: pushes of versions, straight into slots."""

from __future__ import annotations

from weightsync_server.ingest.limits import PushLimits
from weightsync_server.ingest.pushes import Pushes

__all__ = ["PushLimits", "Pushes"]
