"""The gRPC face of the server: thin, one method per RPC, no rules of its own."""

from __future__ import annotations

from weightsync_server.service.debug import add_debug_service
from weightsync_server.service.health import PUSH, SERVING, Announcer, HealthServicer
from weightsync_server.service.servicer import WeightSyncServicer
from weightsync_server.service.serving import add_service

__all__ = [
    "PUSH",
    "SERVING",
    "Announcer",
    "HealthServicer",
    "WeightSyncServicer",
    "add_debug_service",
    "add_service",
]
