"""Small JSON documents and descriptors over a unix socket.

A document comes after its length, 4 bytes, little-endian. Descriptors come in batches of `BATCH`,
each with one byte of data (`SCM_RIGHTS`, unix(7)).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.errors import Reason, WeightSyncError

#: Linux sends at most 253 descriptors in one message (SCM_MAX_FD).
BATCH = 128
_MAX_MESSAGE = 16 << 20
_INT = struct.calcsize("i")
#: Longest silence of the other end, seconds.
TIMEOUT_S = 30.0


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes; blocks. EOFError: there are fewer."""
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def refusal(error: WeightSyncError) -> dict[str, Any]:
    """Return a refusal as a document, of which `refusal_of` makes the error again."""
    return {"error": error.message, "reason": error.reason.value, "metadata": error.metadata}


def refusal_of(document: Mapping[str, Any]) -> WeightSyncError:
    """Return the error of a refusal; NOT_SUPPORTED for a reason that only a newer release knows."""
    reason = Reason.__members__.get(str(document.get("reason")), Reason.NOT_SUPPORTED)
    facts = document.get("metadata")
    metadata = facts if isinstance(facts, dict) else {}
    named = {str(name): str(value) for name, value in metadata.items()}
    return WeightSyncError(reason, str(document["error"]), metadata=named)


def send(sock: socket.socket, document: dict[str, Any]) -> None:
    data = json.dumps(document).encode()
    sock.sendall(struct.pack("<I", len(data)) + data)


def receive(sock: socket.socket) -> dict[str, Any]:
    """Return the next document.

    Raises EOFError at the end, ValueError if it is none or too large.
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

    After an error none is open: EOFError when fewer come, OSError (EMFILE) when this process may
    have no more.
    """
    fds: list[int] = []
    try:
        while len(fds) < count:
            # socket.recv_fds ignores its flags: a program started meanwhile would inherit them.
            space = socket.CMSG_SPACE(min(BATCH, count - len(fds)) * _INT)
            data, received, flags, _ = sock.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
            some = [fd for _, _, part in received for (fd,) in struct.iter_unpack("i", part)]
            fds += some
            if flags & socket.MSG_CTRUNC:
                # The kernel has dropped the rest, which would be waited for.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not data or not some:
                raise EOFError
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds
