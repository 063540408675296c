"""Small JSON documents and descriptors over a unix socket, and the socket to listen on.

A document comes after its length, 4 bytes, little-endian. Descriptors come in batches of `BATCH`,
each with one byte of data (`SCM_RIGHTS`, unix(7)).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

from weightsync.wire.unix_sockets import claimed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = [
    "BATCH",
    "TIMEOUT_S",
    "accept_each",
    "listen",
    "receive",
    "receive_exactly",
    "receive_fds",
    "send",
    "send_fds",
]

#: Linux sends at most 253 descriptors in one message (SCM_MAX_FD).
BATCH = 128
_MAX_MESSAGE = 16 << 20
_INT = struct.calcsize("i")
#: Longest silence of the other end, seconds.
TIMEOUT_S = 30.0
#: From a connection that could not be accepted to the next try, seconds.
_AGAIN_S = 0.1


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes; blocks.

    Raises:
        EOFError: There are fewer.
    """
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(sock: socket.socket, document: dict[str, Any]) -> None:
    """Send one document."""
    data = json.dumps(document).encode()
    sock.sendall(struct.pack("<I", len(data)) + data)


def receive(sock: socket.socket) -> dict[str, Any]:
    """Return the next document.

    Raises:
        EOFError: There will be none.
        ValueError: It is none, or too large.
    """
    (size,) = struct.unpack("<I", receive_exactly(sock, 4))
    if size > _MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes; at most {_MAX_MESSAGE}")
    document = json.loads(receive_exactly(sock, size))
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - a malformed message, not a wrong argument
    return document


def send_fds(sock: socket.socket, fds: Sequence[int]) -> None:
    """Send descriptors; the caller keeps and closes its own."""
    for start in range(0, len(fds), BATCH):
        socket.send_fds(sock, [b"F"], fds[start : start + BATCH])


def receive_fds(sock: socket.socket, count: int) -> list[int]:
    """Return `count` descriptors, which no started program inherits; the caller closes them.

    Raises:
        EOFError: There are fewer.
    """
    fds: list[int] = []
    try:
        while len(fds) < count:
            # socket.recv_fds ignores its flags: a program started meanwhile would inherit them.
            space = socket.CMSG_SPACE(min(BATCH, count - len(fds)) * _INT)
            data, received, _, _ = sock.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
            some = [fd for _, _, part in received for (fd,) in struct.iter_unpack("i", part)]
            fds += some
            if not data or not some:
                raise EOFError
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def listen(path: Path, mode: int, remedy: str) -> socket.socket:
    """Return a socket that listens at `path`; replaced when a dead process left one there.

    Args:
        path: Socket file.
        mode: Its permissions.
        remedy: What else one can do than free the path.

    Raises:
        WeightSyncError: REQUEST_INVALID; the path is somebody else's or holds no socket.
        OSError: It cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with claimed(path, remedy):
            listener.bind(str(path))
            # Nobody can connect before it listens, so nobody can with another mode.
            path.chmod(mode)
            # All workers of an engine may come at once; with a full queue they would be refused.
            listener.listen(256)
    except BaseException:
        listener.close()
        raise
    return listener


def accept_each(listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
    """Serve every connection in a thread of its own; returns when the listener was closed.

    Where descriptors or threads are short, who connects meanwhile waits or is closed, and the next
    one is served again.

    Args:
        listener: Listens.
        serve: Serves a connection and closes it.
        name: Of the threads.
    """
    while True:
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if listener.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
                return
            threading.Event().wait(_AGAIN_S)
            continue
        try:
            threading.Thread(target=serve, args=(peer,), name=name, daemon=True).start()
        except RuntimeError:
            peer.close()
