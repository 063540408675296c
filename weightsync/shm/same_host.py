"""The lending socket: a trainer on this host writes its tensors into memory of a push. Both ends.

One connection serves one push. Request and answer are documents of `weightsync.wire.documents`; an
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

No child that is forked meanwhile keeps a descriptor or a mapping of it (`fork_guard`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weightsync.errors import WeightSyncError, invalid_request
from weightsync.fork_guard import NO_FORK
from weightsync.shm.segments import MemoryMapping
from weightsync.wire.documents import receive, refusal, send, send_fds
from weightsync.wire.socket_client import SocketClient
from weightsync.wire.socket_server import PeerCredentials, PeerServer

__all__ = [
    "MOST_PLACES",
    "IpcPlacement",
    "PeerCredentials",
    "SameHostClient",
    "SameHostHandler",
    "SameHostServer",
    "WriteLease",
    "map_lease",
]

logger = logging.getLogger(__name__)


#: Tensors of a shard that is copied from a GPU: what is told of so many is read in a moment, for
#: which the server does nothing else.
MOST_PLACES = 2048
#: Seconds in which a connection must redeem its secret.
_REDEEM_S = 5.0


class WriteLease(NamedTuple):
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


class SameHostServer(PeerServer):
    """Listens for trainers, with a thread for each.

    A socket file that a dead server left at `path` is replaced; REQUEST_INVALID if it is somebody
    else's or holds no socket. `session` makes the session of a connection, which is ended after
    `silence_s` without a request.
    """

    def __init__(
        self,
        path: Path,
        session: Callable[[PeerCredentials], SameHostHandler],
        silence_s: float,
    ) -> None:
        self._session = session
        self._silence_s = silence_s
        remedy = "choose another --same-host-socket"
        super().__init__(path, 0o660, remedy, self._serve, "lending")

    def _serve(self, peer: socket.socket, who: PeerCredentials) -> None:
        session = self._session(who)
        try:
            peer.settimeout(_REDEEM_S)
            self._reply(peer, lambda: _redeemed(session, receive(peer)))
            peer.settimeout(self._silence_s)
            while True:
                request = receive(peer)
                self._reply(peer, partial(_asked, session, request))
        except (EOFError, TimeoutError, ConnectionError, _RefusedError):
            pass
        except Exception as error:  # noqa: BLE001 - what a trainer sends ends only its connection
            logger.warning("same-host socket: closed the connection of a trainer: %s", error)
        finally:
            session.close()

    def _reply(
        self, peer: socket.socket, ask: Callable[[], WriteLease | dict[str, Any] | None]
    ) -> None:
        try:
            answer = ask()
        except WeightSyncError as error:
            send(peer, refusal(error))
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


def _redeemed(session: SameHostHandler, request: dict[str, Any]) -> dict[str, Any]:
    if request.get("op") != "redeem" or not isinstance(request.get("secret"), str):
        raise ValueError("the first request must redeem a secret")
    session.redeem(request["secret"])
    return {"knows": ["lying"]}


def _asked(session: SameHostHandler, request: dict[str, Any]) -> WriteLease | dict[str, Any] | None:
    op, shard = request.get("op"), request.get("shard")
    if op == "alive":
        return None
    if op == "lying":
        session.announce_ipc(_by_index(request.get("shards")))
        return None
    if type(shard) is not int:
        raise invalid_request("shard must be a whole number")
    if op == "lend":
        return session.lend(shard)
    if op == "written":
        session.written(shard, _digests(request))
        return None
    if op == "collect":
        return {"declined": session.collect(shard, request)}
    if op == "collected":
        return {"digests": session.collected(shard).hex()}
    raise invalid_request(
        "install the same weightsync release in the trainer and for the server, which does not "
        f"know the request {str(op)[:40]!r}"
    )


def _by_index(shards: object) -> dict[int, dict[str, Any]]:
    if isinstance(shards, dict):
        with contextlib.suppress(ValueError):
            told = {int(index): where for index, where in shards.items()}
            if all(isinstance(where, dict) for where in told.values()):
                return told
    raise invalid_request("shards must map the index of each shard to its place on the GPU")


def _digests(request: dict[str, Any]) -> bytes:
    try:
        return bytes.fromhex(request["digests"])
    except (KeyError, TypeError, ValueError):
        raise invalid_request("digests of a shard must be hexadecimal digits, as text") from None


#: Seconds of a trainer's patience; making a shard durable is not waited for.
_ANSWER_S = 60.0


class IpcPlacement(NamedTuple):
    """Where a shard lies on a GPU; the module's docstring explains the fields, at `collect`."""

    device: bytes
    header: bytes
    handles: Sequence[bytes]
    places: Sequence[tuple[int, int]]
    replicas: bytes = b""
    digests: bool = False


class SameHostClient(SocketClient):
    """A trainer's connection to a lending socket; its methods may be called by several threads.

    They raise OSError when it has ended or nobody listens, and WeightSyncError when the server
    refused, which ends it.
    """

    def __init__(self, path: str | Path, secret: str) -> None:
        super().__init__(path, _ANSWER_S, "the server has ended the connection")
        try:
            self._knows = self._ask({"op": "redeem", "secret": secret}).get("knows") or ()
        except BaseException:
            self.close()
            raise

    def take_lease(self, shard: int) -> WriteLease:
        """Return the memory of a shard; end it with `give_back`.

        Raises:
            OSError: The connection has ended.
            WeightSyncError: The server refused; the connection has ended.
        """
        answer, (fd,) = self._ask_fds({"op": "lend", "shard": shard}, lambda _: 1)
        return WriteLease(fd, bool(answer.get("huge")))

    def give_back(self, lease: WriteLease) -> None:
        self._forget([lease.fd])

    def written(self, shard: int, digests: Sequence[bytes]) -> None:
        """Tell that a whole shard lies in its memory, which this process let go of."""
        self._ask({"op": "written", "shard": shard, "digests": b"".join(digests).hex()})

    def announce_ipc(self, shards: dict[int, IpcPlacement]) -> None:
        """Tell where shards lie before `collect` is called for them, if the server wants to know.

        All together have a few thousand tensors at most, to fit one message.
        """
        if shards and "lying" in self._knows:
            told = {index: _told(where) for index, where in shards.items()}
            self._ask({"op": "lying", "shards": told})

    def collect(self, shard: int, where: IpcPlacement) -> str:
        """Have the server copy a shard from a GPU; return why it declines, else "".

        The tensors must stay as they are until `collected` returns. Their memory may be freed once
        it has for all shards, or the connection has ended.
        """
        told = {"header": where.header.hex(), **_told(where)}
        told |= {"replicas": where.replicas.hex(), "digests": where.digests}
        return str(self._ask({"op": "collect", "shard": shard, **told}).get("declined", ""))

    def collected(self, shard: int) -> bytes:
        """Return the joined digests that the server computed of a shard, once it was copied."""
        return bytes.fromhex(str(self._ask({"op": "collected", "shard": shard})["digests"]))

    def alive(self) -> None:
        """Give a sign of life."""
        self._ask({"op": "alive"})


def _told(where: IpcPlacement) -> dict[str, Any]:
    return {
        "device": where.device.hex(),
        "handles": [handle.hex() for handle in where.handles],
        "places": where.places,
    }


def map_lease(lease: WriteLease, size: int) -> MemoryMapping:
    """Return the first `size` bytes of lent memory, mapped; no child that is forked has them."""
    with NO_FORK:
        mapping = MemoryMapping(lease.fd, size)
        try:
            mapping.keep_from_children()
        except BaseException:
            mapping.close()
            raise
        return mapping
