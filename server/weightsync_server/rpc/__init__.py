"""The gRPC face of the server: thin, one method per RPC, no rules of its own."""

from __future__ import annotations

from weightsync_server.rpc.debug_servicer import add_debug_service
from weightsync_server.rpc.health import PUSH, SERVING, Announcer, HealthServicer, PushHealth
from weightsync_server.rpc.registration import add_service
from weightsync_server.rpc.servicer import WeightSyncServicer

__all__ = [
    "PUSH",
    "SERVING",
    "Announcer",
    "HealthServicer",
    "PushHealth",
    "WeightSyncServicer",
    "add_debug_service",
    "add_service",
]
