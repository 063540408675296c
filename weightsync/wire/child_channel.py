"""Messages between the server and its children, over sockets that only the two ends hold.

A message is the sizes of its two parts as little-endian 32-bit integers, a JSON object, and a blob
(digests, messages of a push). Descriptors travel with the first byte (`SCM_RIGHTS`, unix(7)). The
blob keeps 200,000 digests out of JSON: 3.2 MB that need no parsing on the event loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weightsync import log_lines
from weightsync.wire.documents import receive_exactly

if TYPE_CHECKING:
    import asyncio


#: Both ends must speak the same; they differ only while an installation is being replaced.
PROTOCOL = 4

_HEAD = struct.Struct("<II")
_MAX_DOCUMENT = 1 << 20
_MAX_BLOB = 16 << 20
_MAX_FDS = 4


def encode(document: dict[str, Any], blob: bytes = b"") -> bytes:
    body = json.dumps(document).encode()
    return _HEAD.pack(len(body), len(blob)) + body + blob


def _sizes(head: bytes) -> tuple[int, int]:
    document, blob = _HEAD.unpack(head)
    if document > _MAX_DOCUMENT or blob > _MAX_BLOB:
        raise ValueError(f"a message of {document} + {blob} bytes")
    return document, blob


def _document(body: bytes) -> dict[str, Any]:
    document = json.loads(body)
    if not isinstance(document, dict):
        raise ValueError("a message that is not a JSON object")  # noqa: TRY004 - a malformed message, not a wrong argument
    return document


def split(buffer: bytearray) -> tuple[dict[str, Any], bytes] | None:
    """Take the first message out of a buffer and return it; None: it is not complete.

    Raises ValueError if what lies there is no message.
    """
    if len(buffer) < _HEAD.size:
        return None
    document, blob = _sizes(bytes(buffer[: _HEAD.size]))
    begin = _HEAD.size + document
    if len(buffer) < begin + blob:
        return None
    message = _document(bytes(buffer[_HEAD.size : begin])), bytes(buffer[begin : begin + blob])
    del buffer[: begin + blob]
    return message


async def read(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Return the next message, without descriptors.

    Raises EOFError when the other end is gone, ValueError when what came is no message.
    """
    document, blob = _sizes(await reader.readexactly(_HEAD.size))
    body = await reader.readexactly(document)
    return _document(body), await reader.readexactly(blob)


async def hang_up(writer: asyncio.StreamWriter | None, sock: socket.socket) -> None:
    """Close an end with an event loop, whether or not it was opened there already."""
    if writer is not None:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    sock.close()


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which the caller closes; raises as `read`."""
    head, fds, _, _ = socket.recv_fds(sock, _HEAD.size, _MAX_FDS)
    try:
        if not head:
            raise EOFError
        document, blob = _sizes(head + receive_exactly(sock, _HEAD.size - len(head)))
        body = receive_exactly(sock, document)
        receive_exactly(sock, blob)
        return _document(body), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    It stays so when the process executes another program. A parent that has ended before this call
    is not noticed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def connect() -> socket.socket:
    """Return the socket whose descriptor is this program's only argument.

    From then on it dies with the thread that started it.
    """
    # An interrupt from the terminal goes to the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.setblocking(True)
    return sock


def begin(sock: socket.socket) -> dict[str, Any]:
    """Greet the server and return what it told to begin with, or raise EOFError if it is gone.

    From then on this process logs as the server does.
    """
    hello = {"op": "hello", "protocol": PROTOCOL, "pid": os.getpid()}
    sock.sendall(encode(hello))
    start, _ = receive(sock)
    # The server may have died before PR_SET_PDEATHSIG was set.
    if os.getppid() != start["parent"]:
        raise EOFError
    if "log" in start:
        log_lines.configure(**start["log"])
    return start


@contextlib.contextmanager
def noted(facts: dict[str, Any]) -> Iterator[int]:
    """Lend a descriptor of a file with these facts, for another process of this server."""
    fd = os.memfd_create("weightsync-task", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(facts).encode())
        yield fd
    finally:
        os.close(fd)


def read_note(fd: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return found
