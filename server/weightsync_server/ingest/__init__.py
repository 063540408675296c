"""Bytes come in: pushes of versions, straight into slots."""

from __future__ import annotations

from weightsync_server.ingest.chunks import ChunkView, Message, plain_chunk, read_message
from weightsync_server.ingest.distant import Claim, Distant, Grant, Wrote
from weightsync_server.ingest.lending import Lender, is_here, start_lending
from weightsync_server.ingest.limits import PushLimits
from weightsync_server.ingest.pushes import Pushes

__all__ = [
    "ChunkView",
    "Claim",
    "Distant",
    "Grant",
    "Lender",
    "Message",
    "PushLimits",
    "Pushes",
    "Wrote",
    "is_here",
    "plain_chunk",
    "read_message",
    "start_lending",
]
