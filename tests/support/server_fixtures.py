"""Real servers, without an engine, and a link that can be cut."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, Retry

RETRY = Retry(attempts=10, initial_s=0.05, max_s=1.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short: unix sockets allow 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="wsc"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=[("memory://", 0), ("", 0), ("", 2)], ids=["memory", "file", "ingest"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[WeightSyncServer]:
    store, ingest = request.param
    server = WeightSyncServer(
        folder / "run", folder / "state", store=store, flags=("--slots", "4"), ingest=ingest
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture
def file_server(folder: Path) -> Iterator[WeightSyncServer]:
    server = WeightSyncServer(folder / "run", folder / "state")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: WeightSyncServer) -> Iterator[Client]:
    with Client(server.address, retry=RETRY) as client:
        yield client


class Relay:
    """Passes connections on to a server and can cut them after some bytes."""

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("unix:")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_after: list[int] = []
        self.cuts = 0
        self._passed = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                try:
                    far.connect(self._target)
                except OSError:
                    near.close()
                    continue
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    self._passed += len(data)
                    cut = bool(self.cut_after) and self._passed >= self.cut_after[0]
                    if cut:
                        self.cut_after.pop(0)
                        self.cuts += 1
                if cut:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def relay(server: WeightSyncServer) -> Iterator[Relay]:
    relay = Relay(server.address)
    yield relay
    relay.close()
