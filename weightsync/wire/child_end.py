"""A child's own end: it begins with the server's word and dies with the server."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import Any

from weightsync.wire import frames

__all__ = ["begin", "connect"]

_PR_SET_PDEATHSIG = 1


def connect() -> socket.socket:
    """Return the socket whose descriptor is this program's only argument."""
    # An interrupt from the terminal goes to the whole group; the server decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.setblocking(True)
    return sock


def begin(sock: socket.socket) -> dict[str, Any]:
    """Greet the server and return what it told to begin with.

    Raises:
        EOFError: The server is gone.
    """
    hello = {"op": "hello", "protocol": frames.PROTOCOL, "pid": os.getpid()}
    sock.sendall(frames.encode(hello))
    start, _ = frames.receive(sock)
    # The server may have died before PR_SET_PDEATHSIG was set.
    if os.getppid() != start["parent"]:
        raise EOFError
    return start
