"""Bytes come in: pushes of versions, straight into slots."""

from __future__ import annotations

from weightsync_server.push.limits import PushLimits
from weightsync_server.push.messages import ChunkView, Message, plain_chunk, read_message
from weightsync_server.push.service import Pushes
from weightsync_server.push.sources.remote_stream import Claim, Distant, Grant, Wrote
from weightsync_server.push.sources.same_host import Lender, is_here, start_lending

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
