"""Servers with ingest processes: how they start and end, and what bounds all streams together."""

from __future__ import annotations

import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from benchmarks.servers import free_port
from tests.support.bounds import begin, model_status, one_shard, serving, within
from tests.support.ingest_streams import CHUNK, half_sent, joined, processes, received
from tests.support.leftovers import Mark
from tests.support.processes import descriptors
from tests.support.refusals import refusal
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

CODE = grpc.StatusCode

pytestmark = pytest.mark.timeout(120)


def _received(data: weightsync_pb2_grpc.WeightSyncStub, messages: list[Any]) -> int:
    """Send a shard; -1 while the server still ends the stream that it has turned away."""
    try:
        return data.PushWeights(iter(messages), timeout=20).received_bytes
    except grpc.RpcError as error:
        if error.code() is not CODE.ABORTED:
            raise
        return -1


def test_a_stream_is_turned_away_where_no_descriptor_is_left() -> None:
    with serving("--ingest=1") as server:
        assert server.process is not None
        stub, shard = server.stub, one_shard()
        push_id = stub.BeginPush(begin(shard_count=1), timeout=5).push_id
        with grpc.insecure_channel(f"{server.address}.1") as channel:
            data = weightsync_pb2_grpc.WeightSyncStub(channel)
            messages = [joined(push_id), *shard.all()]
            pid = server.process.pid
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) - 1, before[1]))
            try:
                told = refusal(lambda: data.PushWeights(iter(messages), timeout=20))
                assert told == (CODE.UNAVAILABLE, Reason.SERVER_AWAY)
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            within(20.0, lambda: _received(data, messages) == len(shard.data))


def test_silence_ends_a_stream_and_all_streams_count_together() -> None:
    flags = ("--push-idle-timeout-s=1", "--max-streams=2", "--max-pushes=1", "--ingest=2")
    with serving(*flags) as server:
        stub, rest = server.stub, threading.Event()
        begun = stub.BeginPush(begin(shard_count=1), timeout=5)
        addresses = [server.address, f"{server.address}.1", f"{server.address}.2"]
        channels = [grpc.insecure_channel(address) for address in addresses]
        calls = [weightsync_pb2_grpc.WeightSyncStub(channel).PushWeights for channel in channels]
        shard = one_shard(16 * CHUNK)
        open_streams = [call.future(silent(begun.push_id, rest), timeout=20) for call in calls[1:]]
        within(10, lambda: model_status(stub).pushes[0].streams == 2)
        for call in calls:
            one_more = partial(call, iter([joined(begun.push_id)]), timeout=5)
            told = refusal(one_more)
            assert told == (CODE.RESOURCE_EXHAUSTED, Reason.LIMIT_EXCEEDED)
        for stream in open_streams:
            told = refusal(stream.result)
            assert told == (CODE.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED)
        rest.set()
        messages = [joined(begun.push_id), *shard.all(CHUNK)]
        assert calls[1](iter(messages), timeout=10).received_bytes == len(shard.data)
        for channel in channels:
            channel.close()


def silent(push_id: str, rest: threading.Event) -> Iterator[pb.PushWeightsRequest]:
    yield joined(push_id)
    rest.wait(30)


def test_a_server_that_stops_lets_streams_end() -> None:
    with serving("--drain-timeout-s=20", "--ingest=2", store="") as server:
        assert server.process is not None
        stub, shard, rest = server.stub, one_shard(16 * CHUNK), threading.Event()
        begun = stub.BeginPush(begin(shard_count=1), timeout=5)
        with (
            grpc.insecure_channel(f"{server.address}.2") as data,
            ThreadPoolExecutor(1) as pool,
        ):
            call = weightsync_pb2_grpc.WeightSyncStub(data).PushWeights
            sending = pool.submit(call, half_sent(shard, begun.push_id, rest), timeout=30)
            within(10, lambda: received(stub, begun.push_id) == CHUNK)
            server.process.send_signal(signal.SIGTERM)
            within(10, lambda: "calls get" in server.log)
            time.sleep(0.5)  # so that the drain is under way, of which nobody tells
            rest.set()
            assert sending.result(20).received_bytes == len(shard.data)
        assert server.process.wait(20) == 0


def test_none_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    mark = Mark()
    folder = Path(tempfile.mkdtemp(prefix="wsi"))
    server = WeightSyncServer(
        folder / "run", tmp_path, store="memory://", ingest=2, variables=mark.variables
    ).start()
    try:
        # Server, two fetchers, two ingest processes.
        assert len(mark.alive()) == 5
        server.kill()
        assert mark.left_after(5) == []
        # What the dead left at its sockets is in nobody's way.
        server.start()
        assert processes(server) == 2
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("whose", ["the server's", "an ingest process's"])
def test_a_port_that_is_taken_is_named_and_nothing_stays(tmp_path: Path, whose: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="wsi"))
    mark = Mark()
    first = free_port(2)
    port = first if whose == "the server's" else first + 1
    with socket.create_server(("127.0.0.1", port)):
        server = WeightSyncServer(
            folder / "run",
            tmp_path,
            ingest=1,
            flags=(f'--listen=["unix:{folder}/run/server.sock", "127.0.0.1:{first}"]',),
            variables=mark.variables,
        )
        with pytest.raises(RuntimeError):
            server.start()
    assert server.process is not None
    assert server.process.wait(10) == 1
    assert f": 127.0.0.1:{port} is in use, or is not an address of this host; choose" in server.log
    assert ("an ingest process cannot listen" in server.log) == (port != first)
    assert mark.left_after(5) == []
    server.close_channels()
    shutil.rmtree(folder, ignore_errors=True)
