"""Who makes the call that is being served."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from weightsync_server.auth.caller import CALLER
from weightsync_server.auth.principals import EVERYBODY

__all__ = ["caller", "caller_name", "host_of"]

#: The caller of the present RPC, by which shares and rates are counted; empty outside of one.
caller: ContextVar[str] = ContextVar("caller", default="")


def host_of(context: Any) -> str:
    """Return the host of a call's peer, or its unix socket: all that is known without authority."""
    peer: str = context.peer()
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]


def caller_name(context: Any) -> str:
    """Return the principal that a call proved, or its host where nothing was asked."""
    known = CALLER.get()
    if known is None or known.principal is EVERYBODY:
        return host_of(context)
    return known.principal.name
