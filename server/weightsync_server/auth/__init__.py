"""Authority: who may call what, proved before a call is read, and an audit line for every change.

Each listening address is a gRPC server of its own, because a call does not tell which socket it
came in on. Light to import: what needs gRPC is imported from its module.
"""

from __future__ import annotations

from weightsync_server.auth.caller import Caller
from weightsync_server.auth.roles import PUSH_WEIGHTS, RULES, Endpoint, ListenerSettings, Role, Rule

__all__ = [
    "PUSH_WEIGHTS",
    "RULES",
    "Caller",
    "Endpoint",
    "ListenerSettings",
    "Role",
    "Rule",
]
