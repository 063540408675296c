"""The gRPC face of the server: thin, and without rules of its own."""

from __future__ import annotations

from weightsync_server.rpc.servicers import (
    CHECK_HEALTH,
    PUSH,
    SERVING,
    Announcer,
    HealthServicer,
    PushHealth,
    add_calls,
    failpoint_calls,
)

__all__ = [
    "CHECK_HEALTH",
    "PUSH",
    "SERVING",
    "Announcer",
    "HealthServicer",
    "PushHealth",
    "add_calls",
    "failpoint_calls",
]
