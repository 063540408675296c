"""Bytes below gRPC: a recorded connection played back, as it was and with a mistake in it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil
import pytest

from tests.soak.contents import MemoryContents
from tests.support.bounds import serving, within
from tests.support.census import Census, same_again, settled
from tests.support.stock import push_messages
from tests.support.weightsync_server import WeightSyncServer
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(180)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[WeightSyncServer]:
    root = Path(tempfile.mkdtemp(prefix="wsh"))
    run = root / "run"
    doors = f'["unix:{run}/server.sock", "unix:{run}/read.sock?role=read"]'
    server = WeightSyncServer(run, root / "state", flags=["--listen", doors]).start()
    shards = MemoryContents().shards(1)
    server.stub.PushWeights(push_messages(shards, 2), timeout=30)
    yield server
    server.kill()
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def recorded(server: WeightSyncServer) -> bytes:
    """Return what a client sends for a call."""

    def status(stub: weightsync_pb2_grpc.WeightSyncStub) -> None:
        stub.GetStatus(pb.GetStatusRequest(), timeout=10)

    return _record(server, status)


def _path(server: WeightSyncServer) -> str:
    return server.address.removeprefix("unix:")


def _record(
    server: WeightSyncServer, call: Callable[[weightsync_pb2_grpc.WeightSyncStub], None]
) -> bytes:
    """Return every byte that a gRPC client sends during a call."""
    taken = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        near, _ = listener.accept()
        with near, socket.socket(socket.AF_UNIX) as far:
            far.connect(_path(server))
            back = threading.Thread(target=_pass, args=(far, near, None))
            back.start()
            _pass(near, far, taken)
            back.join()

    relaying = threading.Thread(target=relay)
    relaying.start()
    with (
        listener,
        grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel,
    ):
        call(weightsync_pb2_grpc.WeightSyncStub(channel))
    relaying.join()
    assert taken.startswith(_PREFACE)
    return bytes(taken)


def _pass(source: socket.socket, sink: socket.socket, taken: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if taken is not None:
                taken += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


def _send(path: str, data: bytes) -> bytes:
    """Return what a server answers within 2 s."""
    answer = b""
    with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(OSError):
        link.settimeout(2)
        link.connect(path)
        link.sendall(data)
        while part := link.recv(1 << 16):
            answer += part
    return answer


def test_a_recorded_connection_without_a_mistake_is_served(
    server: WeightSyncServer, recorded: bytes
) -> None:
    assert b"default" in _send(_path(server), recorded)


@pytest.mark.parametrize("door", ["server.sock", "read.sock"])
def test_a_path_that_is_no_text_costs_a_restart_and_nothing_else(
    server: WeightSyncServer, recorded: bytes, door: str
) -> None:
    # It ends the accept loop of grpcio 1.85.
    path = b"/weightsync.v1.WeightSync/GetStatus"
    assert path in recorded, "it is sent as plain bytes"
    stub = server.stub
    push = stub.BeginPush(pb.BeginPushRequest(model="default"), timeout=10).push_id
    take = partial(Census.take, server)
    before = settled(take)
    stub = server.stub
    # Neither one who watches nor one who sends nothing holds it up.
    watch = stub.WatchVersions(pb.WatchVersionsRequest(model="default"))
    next(watch)
    over = threading.Event()
    stalled = stub.PushWeights.future(_stalls(push, over))
    _send(str(server.run_dir / door), recorded.replace(path, b"/w\xd2" + path[3:]))
    assert server.process is not None
    assert server.process.wait(10) == 3
    assert "CRITICAL" in server.log
    assert "no client can connect any more (UnicodeDecodeError" in server.log
    # Either is taken up again by a client: what gRPC cancelled, and what the end cut off.
    assert stalled.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    over.set()
    server.close_channels()
    server.start()
    assert b"default" in _send(str(server.run_dir / door), recorded)
    same_again(take, before)
    server.stub.AbortPush(pb.AbortPushRequest(push_id=push), timeout=10)


def _stalls(push: str, over: threading.Event) -> Iterator[pb.PushWeightsRequest]:
    yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=push))
    over.wait(30)


def test_it_costs_an_ingest_process_and_nothing_else(recorded: bytes) -> None:
    path = b"/weightsync.v1.WeightSync/GetStatus"
    with serving("--ingest=1") as server:
        (before,) = _ingest_processes(server)
        _send(f"{_path(server)}.1", recorded.replace(path, b"/w\xd2" + path[3:]))
        within(20, lambda: _ingest_processes(server) not in ([], [before]))
        assert "no client can connect any more (UnicodeDecodeError" in server.log
        stub = server.stub
        within(20, lambda: stub.GetStatus(pb.GetStatusRequest(), timeout=5).ingest_processes == 1)
        shards = MemoryContents().shards(1)
        with grpc.insecure_channel(f"{server.address}.1") as data:
            stub = weightsync_pb2_grpc.WeightSyncStub(data)
            assert stub.PushWeights(push_messages(shards, 2), timeout=10).commit.version


def _ingest_processes(server: WeightSyncServer) -> list[int]:
    assert server.process is not None
    children = psutil.Process(server.process.pid).children()
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            one.pid for one in children if "weightsync_server.ingest.ingest_main" in one.cmdline()
        ]
    return []
