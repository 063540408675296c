"""Serves processes of this host over a unix socket, a thread for each, and knows who they are."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.fd_passing import accept_each, listen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["MOST", "PeerCredentials", "PeerServer", "peer_process"]

_SO_PEERPIDFD = 77

#: Connections at once to one server; more are closed unheard.
MOST = 128


class PeerCredentials(NamedTuple):
    """The process at the other end, by the kernel's word at the time of its connect."""

    pid: int
    uid: int


class PeerServer:
    """Listens until `close`, which ends every connection too.

    Args:
        path: Socket file; replaced when a dead server left it.
        mode: Its permissions.
        remedy: What else one can do than free the path.
        serve: Serves a connection, in a thread of its own.
        name: Of the threads.

    Raises:
        WeightSyncError: REQUEST_INVALID; the path is somebody else's or holds no socket.
        OSError: It cannot be bound.
    """

    def __init__(
        self,
        path: Path,
        mode: int,
        remedy: str,
        serve: Callable[[socket.socket, PeerCredentials], None],
        name: str,
    ) -> None:
        self.path = path
        self._answer = serve
        self._lock = threading.Lock()
        self._peers: set[socket.socket] = set()
        self._socket = listen(path, mode, remedy)
        self._thread = threading.Thread(
            target=accept_each,
            args=(self._socket, self._admit, f"{name}-peer"),
            name=name,
            daemon=True,
        )
        self._thread.start()

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._peers)

    def close(self) -> None:
        """Stop listening and end every connection."""
        self.path.unlink(missing_ok=True)
        with self._lock:
            ending = [self._socket, *self._peers]
        for sock in ending:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=5)

    def _admit(self, peer: socket.socket) -> None:
        with self._lock:
            full = len(self._peers) >= MOST
            if not full:
                self._peers.add(peer)
        try:
            if not full:
                self._answer(peer, _credentials(peer))
        finally:
            with self._lock:
                self._peers.discard(peer)
            peer.close()


def peer_process(peer: socket.socket, who: PeerCredentials) -> int:
    """Return a pidfd of the process at the other end; the caller closes it.

    Raises:
        ProcessLookupError: It has ended.
        WeightSyncError: NOT_SUPPORTED: this kernel does not tell which process it is.
    """
    try:
        found = peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except ProcessLookupError:
        # Another one may have its pid by now.
        raise
    except OSError as error:
        # Kernels before 6.5.
        if not who.pid:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                "run the process that connects in the PID namespace of weightsync-server, or both "
                "on Linux 6.5 or newer: it is in another one, where this kernel does not tell "
                "which it is",
            ) from error
        return os.pidfd_open(who.pid)
    os.set_inheritable(found, False)
    return found


def _credentials(peer: socket.socket) -> PeerCredentials:
    known = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", known)
    return PeerCredentials(pid, uid)
