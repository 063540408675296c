"""Connections to the server's unix sockets, whose other end is `socket_server`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from weightsync.fork_guard import NO_FORK, close_in_children
from weightsync.wire.documents import receive, receive_fds, refusal_of, send


class SocketClient:
    """One connection; no forked child has it, nor a descriptor that came over it.

    Several threads may send requests. `ended` is what is said once the server has ended it. Raises
    OSError if nobody listens there, or not for us.
    """

    def __init__(self, path: str | Path, timeout_s: float, ended: str) -> None:
        self._lock = threading.Lock()
        self._fds: set[int] = set()
        self._ended = ended
        with NO_FORK:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            close_in_children(self)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(str(path))
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """End the connection, also under a thread that waits for an answer."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def leave_to_parent(self) -> None:
        for fd in [*self._fds, self._socket.detach()]:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds.clear()
        # The thread does not run here that may have locked this.
        self._lock = threading.Lock()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return an answer.

        Raises OSError once the connection has ended, WeightSyncError if refused.
        """
        return self._ask_fds(request, lambda _: 0)[0]

    def _ask_fds(
        self, request: dict[str, Any], count: Callable[[dict[str, Any]], int]
    ) -> tuple[dict[str, Any], list[int]]:
        """Return an answer and its descriptors, of which `count` says the number; see `_ask`."""
        try:
            # Held on until the descriptors are here: they come after the answer.
            with self._lock:
                send(self._socket, request)
                answer = receive(self._socket)
                if "error" in answer:
                    raise refusal_of(answer)
                return answer, self._received(count(answer))
        except EOFError:
            raise ConnectionError(self._ended) from None

    def _received(self, count: int) -> list[int]:
        if not count:
            return []
        # Waited for here, so that no fork waits for a server.
        self._socket.recv(1, socket.MSG_PEEK)
        with NO_FORK:
            fds = receive_fds(self._socket, count)
            self._fds.update(fds)
        return fds

    def _forget(self, fds: Iterable[int]) -> None:
        """Close descriptors that came over this, unless that was done."""
        with NO_FORK:
            for fd in self._fds.intersection(fds):
                self._fds.remove(fd)
                os.close(fd)
