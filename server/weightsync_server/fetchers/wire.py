"""Messages between the server and a fetcher, over a socket pair that only these two hold.

A message is the sizes of its two parts as little-endian 32-bit integers, a JSON object, and a blob
(digests). Descriptors travel with the first byte (`SCM_RIGHTS`, unix(7)). The blob keeps 200,000
digests out of JSON: 3.2 MB that need no parsing on the event loop.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

__all__ = ["PROTOCOL", "encode", "read", "receive"]

#: Both ends must speak the same; they differ only while an installation is being replaced.
PROTOCOL = 2

_HEAD = struct.Struct("<II")
_MAX_DOCUMENT = 1 << 20
_MAX_BLOB = 16 << 20
_MAX_FDS = 4


def encode(document: dict[str, Any], blob: bytes = b"") -> bytes:
    """Return the bytes of one message."""
    body = json.dumps(document).encode()
    return _HEAD.pack(len(body), len(blob)) + body + blob


def _sizes(head: bytes) -> tuple[int, int]:
    document, blob = _HEAD.unpack(head)
    if document > _MAX_DOCUMENT or blob > _MAX_BLOB:
        msg = f"a message of {document} + {blob} bytes"
        raise ValueError(msg)
    return document, blob


def _document(body: bytes) -> dict[str, Any]:
    document = json.loads(body)
    if not isinstance(document, dict):
        msg = "a message that is no JSON object"
        raise ValueError(msg)  # noqa: TRY004 - a malformed message, not a wrong argument
    return document


async def read(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Return the next message: the server's end.

    Raises:
        EOFError: The fetcher is gone.
        ValueError: What came is no message.
    """
    document, blob = _sizes(await reader.readexactly(_HEAD.size))
    body = await reader.readexactly(document)
    return _document(body), await reader.readexactly(blob)


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors: the fetcher's end. The caller closes them.

    Raises:
        EOFError: The server is gone.
        ValueError: What came is no message.
    """
    head, fds, _, _ = socket.recv_fds(sock, _HEAD.size, _MAX_FDS)
    try:
        if not head:
            raise EOFError
        document, blob = _sizes(head + _exactly(sock, _HEAD.size - len(head)))
        body = _exactly(sock, document)
        _exactly(sock, blob)
        return _document(body), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
