"""The segment socket: hands descriptors of shared memory to other processes on this host.

Request and answer are one JSON object each, after a 4-byte little-endian length; descriptors follow
the answer in batches of `BATCH`, each with one byte of data (`SCM_RIGHTS`, unix(7)). The authority
to connect is the owner and mode of the socket file.

| op | request | answer | descriptors |
| --- | --- | --- | --- |
| map | ids | sizes in bytes | one per id: read-only for segments, writable for status pages |
| offer | id, files: [[name, size]] | {} | none; afterwards the client sends one per file |
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from weightsync.wire.documents import (
    TIMEOUT_S,
    receive,
    receive_fds,
    send,
    send_fds,
)
from weightsync.wire.socket_server import accept_each, listen

logger = logging.getLogger(__name__)

#: Name, size in bytes and open descriptor of a checkpoint file.
OfferedFile = tuple[str, int, int]


class SegmentServer:
    """Serves the segment socket from threads of its own; any thread may call its methods.

    `path` is a `claimed` one; REQUEST_INVALID if it is not free.
    """

    def __init__(self, path: str | Path, mode: int = 0o660) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._published: dict[str, tuple[int, int]] = {}
        self._offers: dict[str, Future[list[OfferedFile]]] = {}
        self._socket = listen(self.path, mode, "choose another --run-dir")
        self._thread = threading.Thread(
            target=accept_each,
            args=(self._socket, self._serve, "segment-peer"),
            name="segment-socket",
            daemon=True,
        )
        self._thread.start()

    def publish(self, name: str, fd: int, size: int) -> None:
        """Hand `fd`, and no earlier one, to whoever asks for `name`; `withdraw` closes it."""
        with self._lock:
            before = self._published.get(name)
            self._published[name] = (fd, size)
        if before is not None:
            os.close(before[0])

    def withdraw(self, name: str) -> None:
        """Hand it out no more. Mappings that exist stay."""
        with self._lock:
            entry = self._published.pop(name, None)
        if entry is not None:
            os.close(entry[0])

    def open(self, name: str) -> tuple[int, int] | None:
        """Return a descriptor, which the caller closes, and a size; None: nothing has the name."""
        with self._lock:
            found = self._published.get(name)
            return None if found is None else (os.dup(found[0]), found[1])

    def has(self, name: str) -> bool:
        return name in self._published

    def expect_offer(self, name: str) -> Future[list[OfferedFile]]:
        """Return a future of the files that a client will offer under `name`.

        Whoever takes the result closes the descriptors. Cancel it to stop expecting them.
        """
        future: Future[list[OfferedFile]] = Future()
        with self._lock:
            self._offers[name] = future
        future.add_done_callback(lambda _: self._offers.pop(name, None))
        return future

    def close(self) -> None:
        # While it still listens: afterwards the path may be the next server's.
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=5)
        for name in list(self._published):
            self.withdraw(name)

    def _serve(self, peer: socket.socket) -> None:
        peer.settimeout(TIMEOUT_S)
        with peer:
            try:
                while True:
                    self._answer(peer, receive(peer))
            except (EOFError, TimeoutError, ConnectionError):
                return
            except Exception as error:  # noqa: BLE001 - what a client sends ends only its connection
                logger.warning("segment socket: dropped a client: %s", error)
                with contextlib.suppress(OSError):
                    send(peer, {"error": f"not understood: {error}"})

    def _answer(self, peer: socket.socket, request: dict[str, Any]) -> None:
        if request["op"] == "map":
            self._hand_out(peer, [str(name) for name in request["ids"]])
        elif request["op"] == "offer":
            files = [(str(name), int(size)) for name, size in request["files"]]
            self._take_offer(peer, str(request["id"]), files)
        else:
            send(peer, {"error": f"unknown op {request['op']!r}"})

    def _hand_out(self, peer: socket.socket, names: list[str]) -> None:
        with contextlib.ExitStack() as stack:
            fds, sizes = [], []
            with self._lock:
                missing = [name for name in names if name not in self._published]
                for fd, size in [] if missing else map(self._published.__getitem__, names):
                    # A duplicate, so that a withdrawal meanwhile cannot close what is being sent.
                    fds.append(os.dup(fd))
                    sizes.append(size)
                    stack.callback(os.close, fds[-1])
            if missing:
                send(peer, {"error": f"no segment {missing[0]}"})
                return
            send(peer, {"sizes": sizes})
            send_fds(peer, fds)

    def _take_offer(self, peer: socket.socket, name: str, files: list[tuple[str, int]]) -> None:
        with self._lock:
            future = self._offers.pop(name, None)
        if future is None:
            send(peer, {"error": f"no offer {name} is expected"})
            return
        send(peer, {})
        try:
            fds = receive_fds(peer, len(files))
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            raise
        if not future.set_running_or_notify_cancel():
            for fd in fds:
                os.close(fd)
            return
        future.set_result([(*file, fd) for file, fd in zip(files, fds, strict=True)])


@contextlib.contextmanager
def file_of(name: str, data: bytes) -> Iterator[OfferedFile]:
    """Lend a file in memory that holds these bytes, to be offered."""
    fd = os.memfd_create("weightsync", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        yield name, len(data), fd
    finally:
        os.close(fd)


class SegmentClient:
    """One connection to a segment socket. Not for use by several threads at once."""

    def __init__(self, path: str | Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT_S)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def map(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Return a descriptor, which the caller closes, and a size in bytes for each name.

        Raises LookupError when the server lacks one.
        """
        answer = self._call({"op": "map", "ids": list(names)})
        fds = receive_fds(self._socket, len(names))
        return list(zip(fds, answer["sizes"], strict=True))

    def offer(self, name: str, files: Sequence[OfferedFile]) -> None:
        """Give the server descriptors of checkpoint files; the caller keeps and closes its own."""
        self._call({"op": "offer", "id": name, "files": [[n, size] for n, size, _ in files]})
        send_fds(self._socket, [fd for _, _, fd in files])

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        send(self._socket, request)
        answer = receive(self._socket)
        if "error" in answer:
            raise LookupError(answer["error"])
        return answer
