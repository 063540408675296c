"""Bytes come in: pushes of versions, straight into slots."""

from __future__ import annotations

from weightsync_server.ingest.lending import Lender, start_lending
from weightsync_server.ingest.limits import PushLimits
from weightsync_server.ingest.pushes import Pushes

__all__ = ["Lender", "PushLimits", "Pushes", "start_lending"]
