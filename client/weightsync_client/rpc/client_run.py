"""How a client names its run to the server: the same for everything that one process pushes."""

from __future__ import annotations

import os
import secrets
import socket
from functools import cache

__all__ = ["client_run"]


@cache
def client_run() -> str:
    """Return host, process and a random part; processes that are forked later share it."""
    host = "".join(c for c in socket.gethostname()[:64] if c.isascii() and c.isprintable())
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
