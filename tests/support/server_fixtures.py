"""Real servers without an engine, which the tests of a module share, and a link that can be cut."""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.object_servers import ObjectServer, moto
from tests.support.weightsync_server import WeightSyncServer, short_server
from weightsync_client import Client, Retry

RETRY = Retry(attempts=10, initial_s=0.05, max_s=1.0)


#: Store and ingest processes of the servers that tests share.
_KINDS = {"memory": ("memory://", 0), "file": ("", 0), "ingest": ("", 2)}

#: For a test of what may depend on where versions are kept, or on the way that they take in.
every_kind = pytest.mark.parametrize("server", _KINDS, indirect=True)
#: For a test whose push goes through an ingest process.
ingested = pytest.mark.parametrize("server", ["ingest"], indirect=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short: unix sockets allow 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="wsc"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """An S3 server of the module."""
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], WeightSyncServer]]:
    """Return what gives the module's server of a kind, which its first test starts."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(kind: str) -> WeightSyncServer:
            store, ingest = _KINDS[kind]
            server = short_server(store=store, flags=("--slots", "4"), ingest=ingest)
            return stack.enter_context(server)

        yield start


@pytest.fixture
def server(
    request: pytest.FixtureRequest, servers: Callable[[str], WeightSyncServer]
) -> Iterator[WeightSyncServer]:
    """A server without an engine that has versions of other tests, and no push."""
    server = servers(getattr(request, "param", "file"))
    yield server
    with Client(server.address, model="default", retry=RETRY) as client:
        status = client.status()
        for push in status.models[0].pushes:
            client.abort(push.push_id)
        assert not any(status.invariant_violations.values())


@pytest.fixture
def file_server(folder: Path) -> Iterator[WeightSyncServer]:
    """A server of this test alone, which may kill it."""
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
