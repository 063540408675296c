"""The lending socket: memory of a push for a trainer on this host to write its tensors into.

One connection serves one push. Request and answer are documents of `weightsync.wire.fd_passing`; an
answer with `error` and `reason` is a refusal.

| op | request | answer | descriptors |
| --- | --- | --- | --- |
| redeem | secret, from BeginPush; the first request, once | knows: ops of later releases | none |
| lend | shard | huge | one, writable: the shard's memory |
| written | shard, digests: of its tensors in order, hexadecimal | {} | none |
| collect | shard, device, header, handles, places, replicas, digests | declined | none |
| lying | shards: for each, by its index, device, handles, places | {} | none |
| collected | shard | digests | none |
| alive | | {} | none |

`huge` tells that mapping the memory takes no time; otherwise pwrite(2) is the faster way.

With `collect` the trainer tells where a shard lies on a GPU, in place of writing it: `device` is
its UUID, `header` what comes before the first tensor, `handles` open allocations
(cuIpcGetMemHandle), all hexadecimal, and `places` has for each tensor that is not empty, in order,
the number of its handle and its offset in bytes. One of several writers tells of its boxes in
place of tensors, no header, in `replicas` the digests of those that a lower writer sends, and with
`digests` whether it wants those of its own. The answer may come before the shard was copied;
`declined` tells why the server cannot, else it is empty. The tensors must stay as they are until
`collected` answers, with the digests that the server computed; their memory may be freed once it
has for every shard that was asked for, or the connection has ended.

With `lying`, where `redeem` has told that the server knows it, the trainer may tell where shards
lie before it asks for each: engines on this host may copy them from there at once.

`alive` is a sign of life while large shards are being written: who says nothing for a minute is not
waited for. With `written` the trainer tells that the whole shard lies there, that it has closed the
descriptor and every mapping, and what the digests of the tensors are. What it has not told as
written by the end of the connection counts as not sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.fd_passing import receive, send, send_fds
from weightsync.wire.peer_server import PeerCredentials, PeerServer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["MOST_PLACES", "LendingServer", "PeerCredentials", "SameHostHandler", "WriteLease"]

logger = logging.getLogger(__name__)

#: Tensors of a shard that is copied from a GPU: what is told of so many is read in a moment, for
#: which the server does nothing else.
MOST_PLACES = 2048
#: Seconds in which a connection must redeem its secret.
_REDEEM_S = 5.0


class WriteLease(NamedTuple):
    """Memory of a shard: a writable descriptor, and whether it lies in huge pages."""

    fd: int
    huge: bool


class SameHostHandler(Protocol):
    """Answers one connection; called by one thread at a time."""

    def redeem(self, secret: str) -> None:
        """Open the push that the secret is for."""

    def lend(self, shard: int) -> WriteLease:
        """Return the memory of a shard, whose descriptor the caller closes once it was sent."""

    def written(self, shard: int, digests: bytes) -> None:
        """Take a shard back."""

    def collect(self, shard: int, where: dict[str, Any]) -> str:
        """Begin to copy a shard from a GPU; return why that cannot be, else ""."""

    def announce_ipc(self, shards: dict[int, dict[str, Any]]) -> None:
        """Take note of where shards lie that `collect` will be asked for."""

    def collected(self, shard: int) -> bytes:
        """Return the digests of a shard once it was copied."""

    def close(self) -> None:
        """The connection has ended."""


class LendingServer(PeerServer):
    """Listens for trainers, with a thread for each.

    Args:
        path: Socket file; replaced when a dead server left it.
        desk: Makes the desk of a connection.
        silence_s: Seconds without a request after which a connection is ended.

    Raises:
        WeightSyncError: REQUEST_INVALID; the path is somebody else's or holds no socket.
        OSError: It cannot be bound.
    """

    def __init__(
        self,
        path: Path,
        desk: Callable[[PeerCredentials], SameHostHandler],
        silence_s: float,
    ) -> None:
        self._desk = desk
        self._silence_s = silence_s
        remedy = "choose another --same-host-socket"
        super().__init__(path, 0o660, remedy, self._serve, "lending")

    def _serve(self, peer: socket.socket, who: PeerCredentials) -> None:
        desk = self._desk(who)
        try:
            peer.settimeout(_REDEEM_S)
            self._reply(peer, lambda: _redeemed(desk, receive(peer)))
            peer.settimeout(self._silence_s)
            while True:
                request = receive(peer)
                self._reply(peer, partial(_asked, desk, request))
        except (EOFError, TimeoutError, ConnectionError, _RefusedError):
            pass
        except Exception as error:  # noqa: BLE001 - what a trainer sends ends only its connection
            logger.warning("lending socket: dropped a trainer: %s", error)
        finally:
            desk.close()

    def _reply(
        self, peer: socket.socket, ask: Callable[[], WriteLease | dict[str, Any] | None]
    ) -> None:
        try:
            answer = ask()
        except WeightSyncError as error:
            send(peer, {"error": error.message, "reason": error.reason.value})
            raise _RefusedError from error
        if not isinstance(answer, WriteLease):
            send(peer, answer or {})
            return
        try:
            send(peer, {"huge": answer.huge})
            send_fds(peer, [answer.fd])
        finally:
            os.close(answer.fd)


class _RefusedError(Exception):
    """The peer was told why; nothing more is done for it on this connection."""


def _redeemed(desk: SameHostHandler, request: dict[str, Any]) -> dict[str, Any]:
    if request.get("op") != "redeem" or not isinstance(request.get("secret"), str):
        raise ValueError("the first request must redeem a secret")
    desk.redeem(request["secret"])
    return {"knows": ["lying"]}


def _asked(desk: SameHostHandler, request: dict[str, Any]) -> WriteLease | dict[str, Any] | None:
    op, shard = request.get("op"), request.get("shard")
    if op == "alive":
        return None
    if op == "lying":
        desk.announce_ipc(_by_index(request.get("shards")))
        return None
    if type(shard) is not int:
        raise _refused("the index of a shard is an integer")
    if op == "lend":
        return desk.lend(shard)
    if op == "written":
        desk.written(shard, _digests(request))
        return None
    if op == "collect":
        return {"declined": desk.collect(shard, request)}
    if op == "collected":
        return {"digests": desk.collected(shard).hex()}
    raise _refused(
        f"this server knows no request {str(op)[:40]!r}; see weightsync.shm.same_host_server"
    )


def _by_index(shards: object) -> dict[int, dict[str, Any]]:
    if isinstance(shards, dict):
        with contextlib.suppress(ValueError):
            told = {int(index): where for index, where in shards.items()}
            if all(isinstance(where, dict) for where in told.values()):
                return told
    raise _refused("shards that lie on a GPU are told by their indices")


def _digests(request: dict[str, Any]) -> bytes:
    try:
        return bytes.fromhex(request["digests"])
    except (KeyError, TypeError, ValueError):
        raise _refused("the digests of a shard are hexadecimal") from None


def _refused(message: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, message)
