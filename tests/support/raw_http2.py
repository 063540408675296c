"""One gRPC call over a bare socket, whose client decides itself when it reads and what it answers.

grpcio reads ahead and answers pings on its own; a client that reads slowly, or never, must not.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["PREFACE", "RawCall", "connect", "frame", "headers_frame", "settings_frame"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW = 0, 1, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_MOST = (1 << 31) - 1


def connect(address: str) -> socket.socket:
    """Return a socket connected to a gRPC address, unix:PATH or HOST:PORT."""
    if address.startswith("unix:"):
        link = socket.socket(socket.AF_UNIX)
        link.connect(address.removeprefix("unix:"))
        return link
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return one HTTP/2 frame."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def settings_frame(window: int) -> bytes:
    """Return SETTINGS with the window that every stream begins with, in bytes."""
    return frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, window))


def headers_frame(stream: int, method: str) -> bytes:
    """Return the HEADERS of a gRPC call, every field literal."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(_HEADERS, _END_HEADERS, stream, block)


class RawCall:
    """A call with one request message, already sent.

    Args:
        address: Of the server.
        method: Path, such as /weightsync.v1.WeightSync/PullWeights.
        request: The message.
        window: Bytes that the server may send before `allow` is called.
    """

    def __init__(self, address: str, method: str, request: Message, window: int = _MOST) -> None:
        self._link = connect(address)
        body = request.SerializeToString()
        self._link.sendall(
            PREFACE
            + settings_frame(window)
            + frame(_WINDOW, 0, 0, struct.pack(">I", _MOST - 65_535))
            + headers_frame(1, method)
            + frame(_DATA, _END_STREAM, 1, b"\0" + struct.pack(">I", len(body)) + body)
        )
        self._rest = b""
        #: Bytes of messages that have come.
        self.received = 0
        #: The server ended the call or the connection.
        self.ended = False

    def allow(self, size: int) -> None:
        """Let the server send `size` bytes more."""
        self._link.sendall(frame(_WINDOW, 0, 1, struct.pack(">I", size)))

    def read(self, timeout_s: float = 0.0) -> None:
        """Take what has come, waiting for the first of it, and answer pings and settings."""
        self._link.settimeout(timeout_s)
        try:
            data = self._link.recv(1 << 20)
        except (BlockingIOError, TimeoutError):
            return
        except ConnectionError:
            data = b""
        if not data:
            self.ended = True
            return
        self._rest += data
        while len(self._rest) >= 9:
            size = int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < 9 + size:
                return
            kind, flags = self._rest[3], self._rest[4]
            body, self._rest = self._rest[9 : 9 + size], self._rest[9 + size :]
            self._take(kind, flags, body)

    def _take(self, kind: int, flags: int, body: bytes) -> None:
        if kind == _DATA:
            self.received += len(body)
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            self.ended = True
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._link.settimeout(None)
            self._link.sendall(frame(kind, _ACK, 0, body if kind == _PING else b""))

    def close(self) -> None:
        """Close the connection."""
        self._link.close()
