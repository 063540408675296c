"""Bytes come in: pushes of versions, straight into slots."""

from __future__ import annotations

from weightsync_server.ingest.chunks import Message, read_message
from weightsync_server.ingest.lending import Lender, start_lending
from weightsync_server.ingest.limits import PushLimits
from weightsync_server.ingest.pushes import Pushes

__all__ = ["Lender", "Message", "PushLimits", "Pushes", "read_message", "start_lending"]
