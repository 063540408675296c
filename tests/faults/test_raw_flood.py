"""Floods of raw HTTP/2 frames: what they may take, and that all of it comes back."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest

from benchmarks.servers import free_port
from tests.support.bounds import within
from tests.support.census import Census, same_again, settled
from tests.support.raw_flood import KINDS, called, half_open
from tests.support.raw_http2 import PREFACE, connect, settings_frame
from tests.support.weightsync_server import WeightSyncServer
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(240)

CODE = grpc.StatusCode
#: Longest wait for what comes at once, on a machine with other work to do.
SOON_S = 60.0
#: What a flooded door answers: gRPC cancels calls at random when more than 1000 wait for its accept
#: loop, and refuses them beyond `max_calls`; a link may break or time out on a machine without
#: processor time to spare.
FLOODED = {
    CODE.OK,
    CODE.CANCELLED,
    CODE.RESOURCE_EXHAUSTED,
    CODE.UNAVAILABLE,
    CODE.DEADLINE_EXCEEDED,
}


def _ask(address: str, seconds: float) -> Counter[grpc.StatusCode]:
    """Return the statuses of GetStatus, asked again and again on one channel."""
    codes: Counter[grpc.StatusCode] = Counter()
    end = time.monotonic() + seconds
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = weightsync_pb2_grpc.WeightSyncStub(channel)
        while time.monotonic() < end or not codes:
            codes[_status(stub)] += 1
            time.sleep(0.02)  # as somebody asks who floods nobody
    return codes


def _status(stub: weightsync_pb2_grpc.WeightSyncStub) -> grpc.StatusCode:
    try:
        stub.GetStatus(pb.GetStatusRequest(), timeout=20)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return CODE.OK


@pytest.fixture(scope="module")
def tcp() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(tcp: str) -> Iterator[WeightSyncServer]:
    with tempfile.TemporaryDirectory(prefix="wsf") as folder:
        server = WeightSyncServer(Path(folder, "run"), Path(folder, "state"), store="memory://")
        doors = [server.address, tcp, f"{_reader(server)}?role=read"]
        server.flags = ["--listen", json.dumps(doors)]
        server.start()
        yield server
        assert server.stop() == 0, server.log


def _reader(server: WeightSyncServer) -> str:
    return f"unix:{server.run_dir}/read.sock"


def test_one_connection_does_not_take_every_call(server: WeightSyncServer, tcp: str) -> None:
    with connect(tcp) as link:
        link.sendall(PREFACE + settings_frame(1 << 16))
        # More than `max_calls`.
        link.sendall(b"".join(half_open(2 * index + 1) for index in range(2000)))
        assert set(_ask(server.address, 3)) == {CODE.OK}


def _cost(server: WeightSyncServer, address: str, make: Callable[[int], bytes]) -> float:
    """Return the seconds of processor that 100,000 frames and a call after them take the server."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    with connect(address) as link, ThreadPoolExecutor(1) as sending:

        def send() -> None:
            link.sendall(PREFACE + settings_frame(1 << 16))
            for first in range(0, 100_000, 1000):
                link.sendall(b"".join(make(index) for index in range(first, first + 1000)))
            link.sendall(called(1))

        sent = sending.submit(send)
        link.settimeout(SOON_S)
        answer = b""
        while b"grpc-status" not in answer:
            part = link.recv(1 << 20)
            assert part, "it was hung up on"
            answer = answer[-20:] + part
        sent.result()
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


def test_pings_cost_as_little_as_other_frames(server: WeightSyncServer, tcp: str) -> None:
    others = _cost(server, tcp, KINDS["settings"])
    assert _cost(server, tcp, KINDS["pings"]) < 10 * others + 1


def test_a_call_whose_request_never_comes_is_ended(server: WeightSyncServer) -> None:
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait(SOON_S)
        yield b""

    with grpc.insecure_channel(server.address) as channel:
        call: Any = channel.stream_unary("/weightsync.v1.WeightSync/GetStatus")
        begun = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            call(nothing(), timeout=SOON_S)
        over.set()
    assert time.monotonic() - begun > 9
    assert caught.value.code() is CODE.DEADLINE_EXCEEDED
    assert "no request arrived within 10 s" in str(caught.value.details())


@contextlib.contextmanager
def _flooded(address: str, seconds: float) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.support.raw_flood", address, str(seconds), "50"]
    with subprocess.Popen(command) as foe, contextlib.ExitStack() as stack:
        stack.callback(foe.kill)
        yield
        assert foe.wait(seconds + SOON_S) == -signal.SIGALRM


@pytest.mark.parametrize("seconds", [5, pytest.param(30, marks=pytest.mark.battery)])
def test_after_a_flood_all_is_as_before(server: WeightSyncServer, tcp: str, seconds: float) -> None:
    take = partial(Census.take, server)
    before = settled(take, SOON_S)
    with _flooded(tcp, seconds):
        codes = _ask(server.address, seconds)
    assert set(codes) <= FLOODED, codes
    assert server.process is not None
    assert server.process.poll() is None
    # What waits for the accept loop is worked off first.
    within(SOON_S, lambda: set(_ask(tcp, 0.5)) == {CODE.OK})
    same_again(take, before, SOON_S)
    assert set(_ask(server.address, 1)) == {CODE.OK}
    assert len(server.log) < 1 << 20


def test_a_socket_with_a_role_has_a_queue_of_its_own(server: WeightSyncServer, tcp: str) -> None:
    with _flooded(tcp, 5):
        codes = _ask(_reader(server), 5)
    # Slow perhaps, on a machine without processor time to spare, but neither cancelled nor refused.
    assert set(codes) <= {CODE.OK, CODE.DEADLINE_EXCEEDED, CODE.UNAVAILABLE}, codes
    assert codes[CODE.OK]
    within(SOON_S, lambda: set(_ask(tcp, 0.5)) == {CODE.OK})


def test_one_that_is_flooded_stops_when_it_is_told_to() -> None:
    with tempfile.TemporaryDirectory(prefix="wsf") as folder:
        server = WeightSyncServer(Path(folder, "run"), Path(folder, "state"), store="memory://")
        own = f"127.0.0.1:{free_port()}"
        doors = json.dumps([server.address, own])
        server.flags = ["--listen", doors, "--drain-timeout-s", "2"]
        server.start()
        try:
            with _flooded(own, 5):
                _ask(server.address, 4)
                # Of its own, and not because its time was over.
                assert server.stop() == 0, server.log
        finally:
            server.stop()
