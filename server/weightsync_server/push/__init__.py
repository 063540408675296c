"""Bytes come in: pushes of versions, straight into slots."""

from __future__ import annotations

from weightsync_server.push.box_upload import BoxWindow
from weightsync_server.push.limits import PushLimits
from weightsync_server.push.messages import ChunkView, Message, plain_chunk, read_message
from weightsync_server.push.service import PushService
from weightsync_server.push.sources.remote_stream import Claim, Grant, RemoteStream, Written
from weightsync_server.push.sources.same_host import SameHostOffers, is_here, start_lending

__all__ = [
    "BoxWindow",
    "ChunkView",
    "Claim",
    "Grant",
    "Message",
    "PushLimits",
    "PushService",
    "RemoteStream",
    "SameHostOffers",
    "Written",
    "is_here",
    "plain_chunk",
    "read_message",
    "start_lending",
]
