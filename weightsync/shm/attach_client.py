"""A trainer's end of the attach socket, whose requests `attach_server` describes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.fork_guard import NO_FORK, close_in_children
from weightsync.shm.huge_pages import Mapping
from weightsync.shm.live_views import DOCUMENT, HANDLE_BYTES, HANDLES, MEMORY, LiveViews
from weightsync.wire.fd_passing import receive, receive_fds, send

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["AttachClient", "RankMemory"]

#: Seconds of a trainer's patience.
_ANSWER_S = 60.0


class RankMemory(NamedTuple):
    """What one rank handed out.

    Attributes:
        views: What lies where.
        mappings: Its allocations in the host's memory, which stay as long as something views them.
        handles: What opens its allocations on a GPU.
    """

    views: LiveViews
    mappings: tuple[Mapping, ...]
    handles: tuple[bytes, ...]


class AttachClient:
    """One attachment, until `close` or the end of this process; no child that is forked has it.

    Args:
        path: Socket file.
        secret: From Attach.

    Attributes:
        version: What the parameters held then.
        content_digest: Its content digest.
        ranks: What each rank handed out.

    Raises:
        OSError: Nobody listens there, or not for us.
        WeightSyncError: The secret is not good any more, or this is another user.
    """

    def __init__(self, path: str | Path, secret: str) -> None:
        self._lock = threading.Lock()
        self._fds: list[int] = []
        with NO_FORK:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            close_in_children(self)
        try:
            self._socket.settimeout(_ANSWER_S)
            self._socket.connect(str(path))
            answer = self._ask({"op": "redeem", "secret": secret})
            self.version = int(answer["version"])
            self.content_digest = str(answer["content_digest"])
            files = [[(str(n), int(s)) for n, s in rank["files"]] for rank in answer["ranks"]]
            self.ranks = self._received(files)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Return if what was handed out is still live.

        Raises:
            OSError: The server has ended.
            WeightSyncError: Why it is not.
        """
        self._ask({"op": "alive"})

    def close(self) -> None:
        """End the attachment."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def leave_to_parent(self) -> None:
        """In a child that was forked: close what only its parent should have."""
        for fd in [*self._fds, self._socket.detach()]:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _received(self, files: Sequence[Sequence[tuple[str, int]]]) -> tuple[RankMemory, ...]:
        try:
            # Waited for here, so that no fork waits for a server.
            self._socket.recv(1, socket.MSG_PEEK)
            with NO_FORK:
                self._fds = receive_fds(self._socket, sum(map(len, files)))
        except EOFError:
            raise _ended() from None
        try:
            fds = iter(self._fds)
            return tuple(_rank([(*file, next(fds)) for file in rank]) for rank in files)
        finally:
            with NO_FORK:
                for fd in self._fds:
                    os.close(fd)
                self._fds = []

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._lock:
                send(self._socket, request)
                answer = receive(self._socket)
        except EOFError:
            raise _ended() from None
        if "error" in answer:
            name = str(answer.get("reason"))
            reason = Reason.__members__.get(name, Reason.NOT_SUPPORTED)
            raise WeightSyncError(reason, str(answer["error"]))
        return answer


def _rank(files: Sequence[tuple[str, int, int]]) -> RankMemory:
    document, mappings, handles = b"", [], b""
    for name, size, fd in files:
        if name == MEMORY:
            mappings.append(_mapped(fd, size))
        elif name == HANDLES:
            handles = _read(fd, size)
        elif name == DOCUMENT:
            document = _read(fd, size)
    each = range(0, len(handles), HANDLE_BYTES)
    opened = tuple(handles[at : at + HANDLE_BYTES] for at in each)
    return RankMemory(LiveViews.from_json(document), tuple(mappings), opened)


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.pread(fd, size - len(data), len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _mapped(fd: int, size: int) -> Mapping:
    with NO_FORK:
        mapping = Mapping(fd, size)
        mapping.keep_from_children()
        return mapping


def _ended() -> ConnectionError:
    return ConnectionError("the server has ended the connection; attach again")
