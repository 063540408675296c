"""A trainer's end of the lending socket, whose requests `same_host_server` describes.

No child that is forked meanwhile keeps a descriptor or a mapping of it (`fork_guard`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.fork_guard import NO_FORK, close_in_children
from weightsync.shm.huge_pages import Mapping
from weightsync.shm.same_host_server import WriteLease
from weightsync.wire.fd_passing import receive, receive_fds, send

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["IpcPlacement", "SameHostClient", "map_lease"]

#: Seconds of a trainer's patience; making a shard durable is not waited for.
_ANSWER_S = 60.0


class IpcPlacement(NamedTuple):
    """Where a shard lies on a GPU.

    Attributes:
        device: UUID of the GPU.
        header: What comes before the first tensor.
        handles: Open allocations.
        places: Of each tensor that is not empty: the number of its handle, its offset in bytes.
        replicas: Of one of several writers, the joined digests of the boxes that it has besides.
        digests: Whether such a writer wants those of what is copied.
    """

    device: bytes
    header: bytes
    handles: Sequence[bytes]
    places: Sequence[tuple[int, int]]
    replicas: bytes = b""
    digests: bool = False


class SameHostClient:
    """A trainer's connection to a lending socket; its methods may be called by several threads.

    Args:
        path: Socket file.
        secret: From BeginPush.

    Raises:
        OSError: Nobody listens there, or not for us.
        WeightSyncError: The secret is not good any more.
    """

    def __init__(self, path: str | Path, secret: str) -> None:
        self._lock = threading.RLock()
        self._borrowed: set[int] = set()
        with NO_FORK:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            close_in_children(self)
        try:
            self._socket.settimeout(_ANSWER_S)
            self._socket.connect(str(path))
            self._knows = self._ask({"op": "redeem", "secret": secret}).get("knows") or ()
        except BaseException:
            self._socket.close()
            raise

    def borrow(self, shard: int) -> WriteLease:
        """Return the memory of a shard; end it with `give_back`.

        Raises:
            OSError: The connection has ended.
            WeightSyncError: The server refused; the connection has ended.
        """
        # Held on until the descriptor is here: it comes after the answer.
        with self._lock:
            huge = bool(self._ask({"op": "lend", "shard": shard}).get("huge"))
            try:
                # Waited for here, so that no fork waits for a server.
                self._socket.recv(1, socket.MSG_PEEK)
                with NO_FORK:
                    (fd,) = receive_fds(self._socket, 1)
                    self._borrowed.add(fd)
            except EOFError:
                raise _ended() from None
            return WriteLease(fd, huge)

    def give_back(self, lease: WriteLease) -> None:
        """Close what `borrow` returned."""
        with NO_FORK:
            self._borrowed.discard(lease.fd)
            os.close(lease.fd)

    def written(self, shard: int, digests: Sequence[bytes]) -> None:
        """Tell that a whole shard lies in its memory, which this process let go of.

        Raises:
            OSError: The connection has ended.
            WeightSyncError: The server refused; the connection has ended.
        """
        self._ask({"op": "written", "shard": shard, "digests": b"".join(digests).hex()})

    def announce_ipc(self, shards: dict[int, IpcPlacement]) -> None:
        """Tell where shards lie that `collect` will be called for, where the server wants to know.

        Args:
            shards: By their index; a few thousand tensors in all, for one message.

        Raises:
            OSError: The connection has ended.
            WeightSyncError: The server refused; the connection has ended.
        """
        if shards and "lying" in self._knows:
            told = {index: _told(where) for index, where in shards.items()}
            self._ask({"op": "lying", "shards": told})

    def collect(self, shard: int, where: IpcPlacement) -> str:
        """Have the server copy a shard from a GPU; return why it declines, else "".

        The tensors must stay as they are until `collected` returns, and their memory must not be
        freed before it has for all shards, or until the connection has ended.

        Raises:
            OSError: The connection has ended.
            WeightSyncError: The server refused; the connection has ended.
        """
        told = {"header": where.header.hex(), **_told(where)}
        told |= {"replicas": where.replicas.hex(), "digests": where.digests}
        return str(self._ask({"op": "collect", "shard": shard, **told}).get("declined", ""))

    def collected(self, shard: int) -> bytes:
        """Return the joined digests that the server computed of a shard, once it was copied.

        Raises:
            OSError: The connection has ended.
            WeightSyncError: The server refused; the connection has ended.
        """
        return bytes.fromhex(str(self._ask({"op": "collected", "shard": shard})["digests"]))

    def alive(self) -> None:
        """Give a sign of life.

        Raises:
            OSError: The connection has ended.
        """
        self._ask({"op": "alive"})

    def close(self) -> None:
        """End the connection, also under a thread that waits for an answer."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def leave_to_parent(self) -> None:
        """In a child that was forked: close what only its parent should have."""
        for fd in [*self._borrowed, self._socket.detach()]:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._borrowed.clear()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._lock:
                send(self._socket, request)
                answer = receive(self._socket)
        except EOFError:
            raise _ended() from None
        if "error" in answer:
            raise WeightSyncError(_reason(answer.get("reason")), str(answer["error"]))
        return answer


def _told(where: IpcPlacement) -> dict[str, Any]:
    return {
        "device": where.device.hex(),
        "handles": [handle.hex() for handle in where.handles],
        "places": where.places,
    }


def map_lease(lease: WriteLease, size: int) -> Mapping:
    """Return the first `size` bytes of lent memory, mapped; no child that is forked has them.

    Raises:
        OSError: They cannot be mapped.
    """
    with NO_FORK:
        mapping = Mapping(lease.fd, size)
        try:
            mapping.keep_from_children()
        except BaseException:
            mapping.close()
            raise
        return mapping


def _ended() -> ConnectionError:
    return ConnectionError("the server has ended the connection")


def _reason(name: object) -> Reason:
    return Reason.__members__.get(str(name), Reason.NOT_SUPPORTED)
