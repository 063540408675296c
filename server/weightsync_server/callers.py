"""Who makes the call that is being served."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

__all__ = ["caller", "host_of"]

#: The caller of the present RPC, by which shares and rates are counted; empty outside of one.
caller: ContextVar[str] = ContextVar("caller", default="")


def host_of(context: Any) -> str:
    """Return the host of a call's peer, or its unix socket: all that is known without authority."""
    peer: str = context.peer()
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]
