"""The attach socket: hands the live parameters of an engine to a trainer on this host.

A worker opens no socket for trainers. It sends what opens its memory over the segment socket, to
the server, as the engine sends the files of its checkpoint; the server, which knows who may call,
hands it on over this one. So the engine has no authority of its own to keep, a trainer needs one
address, and what is handed out ends with one connection: whatever becomes of the trainer, the
kernel closes it.

It is not the lending socket, which is for the whole group: who attaches can write what is being
served. This one has mode 0600, and who connects must be the server's own user, by the kernel's
word.

Request and answer are documents of `weightsync.wire.fd_passing`; an answer with `error` and
`reason` is a refusal.

| op | request | answer | descriptors |
| --- | --- | --- | --- |
| redeem | secret, from Attach; the first request | version, content_digest, ranks, attachment, \
guarded | as in ranks |
| write | transaction | ranks | as in ranks |
| alive | | {} | none |

`ranks` has for each rank its `files`, pairs of a name and a size in bytes, as `live_views` tells.
`attachment` names the attachment when a transaction begins. What is handed out to a `guarded` one
is written in a block only, with what `write` answers while the transaction is open. The trainer is
attached until it closes the connection.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.live_views import HANDLES
from weightsync.wire.fd_passing import receive, send, send_fds
from weightsync.wire.peer_server import PeerServer, peer_process

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from weightsync.shm.segment_socket import OfferedFile
    from weightsync.wire.peer_server import PeerCredentials

__all__ = ["AttachHandler", "AttachServer", "HandedOut"]

logger = logging.getLogger(__name__)

#: Seconds in which a connection must redeem its secret.
_REDEEM_S = 5.0


class HandedOut(NamedTuple):
    """What a secret opens; the descriptors are closed once they were sent.

    Attributes:
        version: What the parameters hold.
        content_digest: Its content digest.
        ranks: The files of each rank, in order.
        attachment: Names the attachment; "": this is for one that exists.
        guarded: Whether they are written in blocks only.
    """

    version: int
    content_digest: str
    ranks: Sequence[Sequence[OfferedFile]]
    attachment: str = ""
    guarded: bool = False

    @property
    def on_device(self) -> bool:
        """Whether it opens memory of a GPU, which cannot be taken back."""
        return any(name == HANDLES for files in self.ranks for name, _, _ in files)

    def copy(self) -> HandedOut:
        """Return the same with descriptors of its own."""
        ranks = [[(name, size, os.dup(fd)) for name, size, fd in files] for files in self.ranks]
        return self._replace(ranks=ranks)

    def close(self) -> None:
        """Close the descriptors."""
        for _, _, fd in (file for files in self.ranks for file in files):
            os.close(fd)


class AttachHandler(Protocol):
    """Answers one connection; called by one thread."""

    def redeem(self, secret: str, pidfd: int) -> HandedOut:
        """Return what a secret opens, to the process of that pidfd, which is closed afterwards."""

    def write(self, transaction: str) -> HandedOut:
        """Return what the block of a transaction is written with."""

    def check(self) -> None:
        """Raise why what was handed out is not live any more."""

    def close(self) -> None:
        """The connection has ended."""


class AttachServer(PeerServer):
    """Listens for trainers, with a thread for each.

    Args:
        path: Socket file; replaced when a dead server left it.
        handler: Makes what answers a connection.

    Raises:
        WeightSyncError: REQUEST_INVALID; the path is somebody else's or holds no socket.
        OSError: It cannot be bound.
    """

    def __init__(self, path: Path, handler: Callable[[PeerCredentials], AttachHandler]) -> None:
        self._handler = handler
        super().__init__(path, 0o600, "choose another --run-dir", self._serve, "attach")

    def _serve(self, peer: socket.socket, who: PeerCredentials) -> None:
        handler = self._handler(who)
        try:
            peer.settimeout(_REDEEM_S)
            _hand_out(peer, who, handler, receive(peer))
            # A trainer may compute for hours; the kernel ends the connection of one that is dead.
            peer.settimeout(None)
            while True:
                _answer(peer, handler, receive(peer))
        except WeightSyncError as error:
            _tell(peer, error)
        except (EOFError, TimeoutError, ConnectionError):
            pass
        except Exception as error:  # noqa: BLE001 - what a trainer sends ends only its connection
            logger.warning("attach socket: dropped a trainer: %s", error)
        finally:
            handler.close()


def _hand_out(
    peer: socket.socket, who: PeerCredentials, handler: AttachHandler, request: dict[str, Any]
) -> None:
    if who.uid != os.geteuid():
        raise WeightSyncError(
            Reason.PERMISSION_DENIED,
            f"user {who.uid} may not write what user {os.geteuid()} serves; run the trainer as the "
            "user of weightsync-server and vLLM",
        )
    if request.get("op") != "redeem" or not isinstance(request.get("secret"), str):
        raise _refused("the first request must redeem a secret; call Attach for one")
    pidfd = peer_process(peer, who)
    try:
        found = handler.redeem(request["secret"], pidfd)
    finally:
        os.close(pidfd)
    _give(peer, found)


def _answer(peer: socket.socket, handler: AttachHandler, request: dict[str, Any]) -> None:
    if request.get("op") == "write" and isinstance(request.get("transaction"), str):
        try:
            found = handler.write(request["transaction"])
        except WeightSyncError as error:
            # Of a transaction that is over; the attachment goes on.
            send(peer, _error(error))
        else:
            _give(peer, found)
    elif request.get("op") == "alive":
        handler.check()
        send(peer, {})
    else:
        raise _refused("this server knows no such request; see attach_server")


def _give(peer: socket.socket, found: HandedOut) -> None:
    try:
        ranks = [{"files": [[name, size] for name, size, _ in files]} for files in found.ranks]
        document = {"version": found.version, "content_digest": found.content_digest}
        document |= {"attachment": found.attachment, "guarded": found.guarded}
        send(peer, document | {"ranks": ranks})
        send_fds(peer, [fd for files in found.ranks for _, _, fd in files])
    finally:
        found.close()


def _tell(peer: socket.socket, error: WeightSyncError) -> None:
    try:
        send(peer, _error(error))
    except OSError:
        logger.info("attach socket: a trainer left before it was told why: %s", error.message)


def _error(error: WeightSyncError) -> dict[str, Any]:
    return {"error": error.message, "reason": error.reason.value}


def _refused(message: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, message)
