"""Bytes come in: pushes of versions, straight into slots."""

from __future__ import annotations

from weightsync_server.push.messages import ChunkView, Message, plain_chunk, read_message
from weightsync_server.push.push_settings import PushSettings
from weightsync_server.push.service import PushService
from weightsync_server.push.shard_part import SliceWindow
from weightsync_server.push.sources.remote_stream import Claim, Grant, RemoteStream, Written
from weightsync_server.push.sources.same_host import SameHostOffers, is_here, serve_same_host

__all__ = [
    "ChunkView",
    "Claim",
    "Grant",
    "Message",
    "PushService",
    "PushSettings",
    "RemoteStream",
    "SameHostOffers",
    "SliceWindow",
    "Written",
    "is_here",
    "plain_chunk",
    "read_message",
    "serve_same_host",
]
