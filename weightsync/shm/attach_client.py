"""A trainer's end of the attach socket, whose requests `attach_server` describes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.fork_guard import NO_FORK, close_in_children
from weightsync.shm.live_mapping import LiveMapping, MemoryAccess
from weightsync.shm.live_views import DOCUMENT, GATE, HANDLE_BYTES, HANDLES, MEMORY, LiveViews
from weightsync.wire.fd_passing import receive, receive_fds, send

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["AttachClient", "RankMemory"]

#: Seconds of a trainer's patience. What is redeemed waits until nothing else has the engine.
_ANSWER_S, _REDEEMED_S = 60.0, 600.0

#: Name, size in bytes and descriptor.
_File = tuple[str, int, int]


class RankMemory(NamedTuple):
    """What one rank handed out.

    Attributes:
        views: What lies where.
        mappings: Its allocations in the host's memory, which stay as long as something views them.
        handles: What opens its allocations on a GPU.
    """

    views: LiveViews
    mappings: tuple[LiveMapping, ...]
    handles: tuple[bytes, ...]


class AttachClient:
    """One attachment, until `close` or the end of this process; no child that is forked has it.

    Memory of the host can be written between `open_block` and `close_block` alone; whoever writes
    there at another time is ended by SIGSEGV.

    Args:
        path: Socket file.
        secret: From Attach.

    Attributes:
        version: What the parameters held then.
        content_digest: Its content digest.
        attachment: Names this when a transaction begins; "": the server knows no names.
        ranks: What each rank handed out.

    Raises:
        OSError: Nobody listens there, or not for us.
        WeightSyncError: The secret is not good any more, or this is another user.
    """

    def __init__(self, path: str | Path, secret: str) -> None:
        self._lock = threading.Lock()
        self._block = threading.Lock()
        self._fds: list[int] = []
        # Of the memory of the host, and descriptors of it for reading.
        self._memory: list[tuple[LiveMapping, int]] = []
        self._gates: list[int] = []
        self._in_block = self._closed = False
        with NO_FORK:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            close_in_children(self)
        try:
            self._socket.settimeout(_REDEEMED_S)
            self._socket.connect(str(path))
            answer, files = self._ask({"op": "redeem", "secret": secret})
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
        """Whether the memory may be written now."""
        return self._in_block or not self._guarded

    def check(self) -> None:
        """Return if what was handed out is still live.

        Raises:
            OSError: The server has ended.
            WeightSyncError: Why it is not.
        """
        self._ask({"op": "alive"})

    def open_block(self, transaction: str) -> None:
        """Have the memory writable, in the block of a transaction.

        Raises:
            OSError: The server has ended.
            WeightSyncError: The transaction is not open.
        """
        if not self._guarded:
            return
        _, files = self._ask({"op": "write", "transaction": transaction})
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

        Memory of the host is let go of; that of a GPU cannot be, until nobody writes it.

        Args:
            settled: Whether nobody writes on a GPU any more; the block is closed there.
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
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __del__(self) -> None:
        """Keep no descriptor of who has let go of this; what views the memory has it still."""
        self._forget([*self._fds])

    def leave_to_parent(self) -> None:
        """In a child that was forked: close what only its parent should have."""
        for fd in [*self._fds, self._socket.detach()]:
            with contextlib.suppress(OSError):
                os.close(fd)
        # Nothing of it is mapped here, and something else may be by and by.
        # Nor does the thread run here that may have locked this.
        self._lock, self._block = threading.Lock(), threading.Lock()
        self._fds, self._memory, self._gates = [], [], []
        self._closed, self._in_block = True, False

    def _leave(self) -> None:
        # Last: until then somebody may be writing.
        gates, self._gates = self._gates, []
        self._forget(gates)

    def _check_open(self) -> None:
        if self._closed:
            raise WeightSyncError(Reason.REQUEST_INVALID, "this was closed; attach again")

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

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[list[_File]]]:
        """Return an answer, and the files of each rank that came with it."""
        try:
            with self._lock:
                send(self._socket, request)
                answer = receive(self._socket)
                if "error" in answer:
                    raise _refusal(answer)
                return answer, self._received(answer.get("ranks", ()))
        except EOFError:
            raise ConnectionError("the server has ended the connection; attach again") from None

    def _received(self, ranks: Iterable[dict[str, Any]]) -> list[list[_File]]:
        named = [[(str(name), int(size)) for name, size in rank["files"]] for rank in ranks]
        count = sum(map(len, named))
        if not count:
            return []
        # Waited for here, so that no fork waits for a server.
        self._socket.recv(1, socket.MSG_PEEK)
        with NO_FORK:
            fds = receive_fds(self._socket, count)
            self._fds += fds
        each = iter(fds)
        return [[(*file, next(each)) for file in rank] for rank in named]

    def _forget(self, fds: Iterable[int]) -> None:
        with NO_FORK:
            for fd in list(fds):
                if fd in self._fds:
                    self._fds.remove(fd)
                    os.close(fd)


def _refusal(answer: dict[str, Any]) -> WeightSyncError:
    reason = Reason.__members__.get(str(answer.get("reason")), Reason.NOT_SUPPORTED)
    return WeightSyncError(reason, str(answer["error"]))


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.pread(fd, size - len(data), len(data))
        if not part:
            raise EOFError
        data += part
    return data
