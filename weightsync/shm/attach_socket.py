"""The attach socket: hands an engine's live parameters to a trainer on this host. Both ends.

A worker opens no socket for trainers. It sends what opens its memory over the segment socket, to
the server, which knows who may call and hands it on over this one. What is handed out ends with one
connection: whatever becomes of the trainer, the kernel closes it.

It is not the lending socket, which is for the whole group: who attaches can write what is being
served. This one has mode 0600, and who connects must be the server's own user, by the kernel's
word.

Request and answer are documents of `weightsync.wire.documents`; an answer with `error` and
`reason` is a refusal.

| op | request | answer | descriptors |
| --- | --- | --- | --- |
| redeem | secret (first) | version, content_digest, ranks, attachment, guarded | as in ranks |
| write | transaction | ranks | as in ranks |
| alive | | {} | none |

`ranks` has for each rank its `files`, pairs of a name and a size in bytes, as `live_views` tells.
`attachment` names the attachment when a transaction begins. What is handed out to a `guarded` one
is written in a block only, with what `write` answers while the transaction is open. The trainer is
attached until it closes the connection.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.fork_guard import NO_FORK, close_in_children
from weightsync.shm.live_views import DOCUMENT, GATE, HANDLE_BYTES, HANDLES, MEMORY, LiveViews
from weightsync.shm.segments import MAP_NORESERVE, advise, map_at, reserve
from weightsync.wire.documents import receive, refusal, send, send_fds
from weightsync.wire.socket_client import SocketClient
from weightsync.wire.socket_server import PeerCredentials, PeerServer, peer_process

if TYPE_CHECKING:
    from weightsync.shm.segment_socket import OfferedFile

logger = logging.getLogger(__name__)


class MemoryAccess(enum.Enum):
    """What this process may do there, as protection and flags of mmap(2)."""

    NONE = (0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    """Nothing: whoever reads or writes there is ended by SIGSEGV. The memory is let go."""
    READ = (mmap.PROT_READ, mmap.MAP_SHARED)
    """Read what is live; whoever writes there is ended by SIGSEGV."""
    WRITE = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    """Write what is live."""
    COPY = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_NORESERVE)
    """Write a copy that nobody else sees."""


class _Reserved:
    """Addresses at which live memory is mapped, as long as something views them.

    In a child that was forked nothing of it is mapped there, and something else may be by and by,
    which the end of a view would unmap: these addresses are kept for ever there.
    """

    def __init__(self) -> None:
        self.places: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._of_parents: list[mmap.mmap] = []

    def leave_to_parent(self) -> None:
        self._of_parents += self.places


_RESERVED = _Reserved()
close_in_children(_RESERVED)


class LiveMapping:
    """The first `size` bytes behind a descriptor, which no child that is forked has.

    What is mapped is replaced as a whole, by one call of the kernel: no address is free meanwhile,
    and a thread that writes there has written either what is live or not. Through a descriptor for
    reading nothing can be written, whatever protection somebody gives the pages. The caller keeps
    `fd`; `size` is a multiple of the page size.
    """

    def __init__(self, fd: int, size: int, access: MemoryAccess = MemoryAccess.READ) -> None:
        self._place, offset, self._address = reserve(size)
        self._size = size
        try:
            with NO_FORK:
                _RESERVED.places.add(self._place)
                self.put(fd, access)
        except BaseException:
            self._place.close()
            raise
        self.view = memoryview(self._place)[offset : offset + size]

    def put(self, fd: int, access: MemoryAccess) -> None:
        """Have what lies behind a descriptor here, at once; after an OSError all is as it was.

        `fd` is of the same memory, or any descriptor if `access` is `NONE`; the caller closes it.
        """
        prot, flags = access.value
        where = -1 if access is MemoryAccess.NONE else fd
        map_at(self._address, self._size, prot, flags, where)
        advise(self._address, self._size, mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Let go of the memory; its addresses stay reserved until nothing views them any more."""
        self.put(-1, MemoryAccess.NONE)


#: Seconds in which a connection must redeem its secret.
_REDEEM_S = 5.0


class HandedOut(NamedTuple):
    """What a secret opens; the descriptors are closed once they were sent.

    `attachment` is empty for one that exists. `guarded` memory is written in blocks only.
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
        """Return the same with descriptors of its own; after an OSError none of them is open."""
        with contextlib.ExitStack() as undo:
            ranks: list[list[OfferedFile]] = [[] for _ in self.ranks]
            for files, copies in zip(self.ranks, ranks, strict=True):
                for name, size, fd in files:
                    copies.append((name, size, os.dup(fd)))
                    undo.callback(os.close, copies[-1][2])
            undo.pop_all()
        return self._replace(ranks=ranks)

    def close(self) -> None:
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
    """Listens for trainers at a `claimed` path, with a thread for each."""

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
        raise invalid_request("the first request must redeem a secret; call Attach for one")
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
            send(peer, refusal(error))
        else:
            _give(peer, found)
    elif request.get("op") == "alive":
        handler.check()
        send(peer, {})
    else:
        raise invalid_request(
            "install the same weightsync release in the trainer and for the server, which does not "
            f"know the request {str(request.get('op'))[:40]!r}"
        )


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
        send(peer, refusal(error))
    except OSError:
        logger.info(
            "attach socket: a trainer disconnected before it received the refusal: %s",
            error.message,
        )


#: Seconds of a trainer's patience. What is redeemed waits until nothing else has the engine.
_ANSWER_S, _REDEEMED_S = 60.0, 600.0

#: Name, size in bytes and descriptor.
_File = tuple[str, int, int]


class RankMemory(NamedTuple):
    """What one rank handed out; `handles` open its allocations on a GPU.

    `mappings`, its allocations in the host's memory, stay while something views them.
    """

    views: LiveViews
    mappings: tuple[LiveMapping, ...]
    handles: tuple[bytes, ...]


class AttachClient(SocketClient):
    """One attachment, until `close` or the end of this process; no child that is forked has it.

    Memory of the host can be written between `open_block` and `close_block` alone; a write at
    another time ends the process by SIGSEGV. `version` and `content_digest` are of what the
    parameters held when it was made. `attachment` is empty if the server knows no names.

    Raises:
        OSError: Nobody listens there, or not for us.
        WeightSyncError: The secret is not good any more, or this is another user.
    """

    def __init__(self, path: str | Path, secret: str) -> None:
        self._block = threading.Lock()
        # Of the memory of the host, and descriptors of it for reading.
        self._memory: list[tuple[LiveMapping, int]] = []
        self._gates: list[int] = []
        self._in_block = self._closed = False
        super().__init__(path, _REDEEMED_S, "the server has ended the connection; attach again")
        try:
            answer, files = self._ask_files({"op": "redeem", "secret": secret})
            self._socket.settimeout(_ANSWER_S)
            self.version = int(answer["version"])
            self.content_digest = str(answer["content_digest"])
            self.attachment = str(answer.get("attachment", ""))
            self._guarded = bool(answer.get("guarded", False))
            self.ranks = self._opened(files)
        except BaseException:
            self.close()
            raise

    @property
    def writable(self) -> bool:
        return self._in_block or not self._guarded

    def check(self) -> None:
        """Raise why what was handed out is not live any more; OSError: the server has ended."""
        self._ask({"op": "alive"})

    def open_block(self, transaction: str) -> None:
        """Have the memory writable, in the block of a transaction; raises as `check`."""
        if not self._guarded:
            return
        _, files = self._ask_files({"op": "write", "transaction": transaction})
        mine = [file for rank in files for file in rank]
        try:
            with self._block, NO_FORK:
                self._check_open()
                self._in_block = True
                self._gates += [fd for name, _, fd in mine if name == GATE]
                written = [fd for name, _, fd in mine if name == MEMORY]
                for (mapping, _), fd in zip(self._memory, written, strict=False):
                    mapping.put(fd, MemoryAccess.WRITE)
        except BaseException:
            self.close_block()
            raise
        finally:
            self._forget(fd for name, _, fd in mine if name != GATE)

    def close_block(self) -> None:
        """Have the memory readable only; also where no block is open."""
        with self._block, NO_FORK:
            if self._in_block:
                self._in_block = False
                for mapping, fd in self._memory:
                    mapping.put(fd, MemoryAccess.READ)
        self._leave()

    def revoke_block(self, *, settled: bool = False) -> None:
        """Let whoever writes in a block that the server has ended write what nobody serves.

        Memory of the host is let go of; that of a GPU cannot be, until nobody writes it. `settled`
        says that no process writes on a GPU any more; the block is closed there then.
        """
        with self._block, NO_FORK:
            if not self._in_block or not (self._memory or settled):
                return
            for mapping, fd in self._memory:
                mapping.put(fd, MemoryAccess.COPY)
            self._in_block = bool(self._memory)
        self._leave()

    def close(self) -> None:
        """End the attachment; its memory of the host is nobody's from now on."""
        with self._block, NO_FORK:
            self._closed, self._in_block = True, False
            memory, self._memory = self._memory, []
            for mapping, _ in memory:
                mapping.close()
        self._forget([*self._fds, *self._gates])
        super().close()

    def __del__(self) -> None:
        """Keep no descriptor of who has let go of this; what views the memory has it still."""
        self._forget([*self._fds])

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._block = threading.Lock()
        self._memory, self._gates = [], []
        self._closed, self._in_block = True, False

    def _leave(self) -> None:
        # Last: until then somebody may be writing.
        gates, self._gates = self._gates, []
        self._forget(gates)

    def _check_open(self) -> None:
        if self._closed:
            raise invalid_request("attach again: this attachment was closed")

    def _opened(self, files: Sequence[Sequence[_File]]) -> tuple[RankMemory, ...]:
        kept: set[int] = set()
        try:
            return tuple(self._rank(rank, kept) for rank in files)
        finally:
            self._forget(fd for rank in files for _, _, fd in rank if fd not in kept)

    def _rank(self, files: Sequence[_File], kept: set[int]) -> RankMemory:
        document, mappings, handles = b"", [], b""
        for name, size, fd in files:
            if name == MEMORY:
                with NO_FORK:
                    access = MemoryAccess.READ if self._guarded else MemoryAccess.WRITE
                    mappings.append(LiveMapping(fd, size, access))
                    self._memory.append((mappings[-1], fd))
                    kept |= {fd} if self._guarded else set()
            elif name == HANDLES:
                handles = _read(fd, size)
            elif name == DOCUMENT:
                document = _read(fd, size)
        each = range(0, len(handles), HANDLE_BYTES)
        opened = tuple(handles[at : at + HANDLE_BYTES] for at in each)
        return RankMemory(LiveViews.from_json(document), tuple(mappings), opened)

    def _ask_files(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[list[_File]]]:
        answer, fds = self._ask_fds(request, lambda found: sum(map(len, _named(found))))
        each = iter(fds)
        return answer, [[(*file, next(each)) for file in rank] for rank in _named(answer)]


def _named(answer: dict[str, Any]) -> list[list[tuple[str, int]]]:
    return [
        [(str(name), int(size)) for name, size in rank["files"]] for rank in answer.get("ranks", ())
    ]


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.pread(fd, size - len(data), len(data))
        if not part:
            raise EOFError
        data += part
    return data
