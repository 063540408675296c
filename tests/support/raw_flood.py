"""A flood of HTTP/2 frames that no gRPC library sends: `python -m tests.support.raw_flood`.

Arguments: address, seconds, connections. It runs at the lowest priority, as one from another host
would not take the server's processors. The kernel ends it by SIGALRM: on a busy machine the main
thread gets neither a processor nor the interpreter's lock for minutes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import struct
import sys
import threading
from typing import TYPE_CHECKING

from tests.support.raw_http2 import PREFACE, connect, frame, headers_frame, settings_frame

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

__all__ = ["KINDS", "called", "half_open"]

_STATUS = "/weightsync.v1.WeightSync/GetStatus"
_DATA, _RESET, _PING, _WINDOW = 0, 3, 6, 8
_BATCH = 50


def _reset(stream: int) -> bytes:
    return frame(_RESET, 0, stream, struct.pack(">I", 8))


def half_open(stream: int) -> bytes:
    """Return a call that never gets its request."""
    return headers_frame(stream, _STATUS)


def called(stream: int) -> bytes:
    """Return a call with its request."""
    # An empty request is an empty message.
    return half_open(stream) + frame(_DATA, 1, stream, bytes(5))


#: Frames of one stream, by what is wrong with them.
KINDS: Mapping[str, Callable[[int], bytes]] = {
    "settings": lambda _: settings_frame(random.randrange(1, 1 << 20)),
    "pings": lambda stream: frame(_PING, 0, 0, struct.pack(">Q", stream)),
    "resets": lambda stream: half_open(stream) + _reset(stream),
    "called and reset": lambda stream: called(stream) + _reset(stream),
    "half open": half_open,
    "never read": called,
    "windows": lambda _: frame(_WINDOW, 0, 0, struct.pack(">I", random.randrange(1 << 20))),
    "unknown": lambda stream: frame(200, stream & 0xFF, stream, b"x" * 50),
}


def _flood(address: str, kind: str) -> None:
    """Connect and send, again whenever the server has had enough."""
    window = 1 if kind == "never read" else 1 << 16
    while True:
        with contextlib.suppress(OSError), connect(address) as link:
            link.settimeout(2)
            link.sendall(PREFACE + settings_frame(window))
            if kind != "never read":
                threading.Thread(target=_drain, args=(link,), daemon=True).start()
            for first in itertools.count(step=_BATCH):
                frames = (KINDS[kind](2 * index + 1) for index in range(first, first + _BATCH))
                link.sendall(b"".join(frames))


def _drain(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while link.recv(1 << 16):
            pass


def main() -> None:
    """Flood an address until the alarm."""
    address, seconds, connections = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    os.nice(19)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    kinds = itertools.cycle(KINDS)
    for _ in range(connections):
        threading.Thread(target=_flood, args=(address, next(kinds)), daemon=True).start()
    signal.pause()


if __name__ == "__main__":
    main()
