"""Ingest processes that die, stand still or are cut off in the midst of pushes.

The push then goes on over the server's own address, or is refused with a reason; no byte of one
push ever lands in another's memory, and the process is there again.
"""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from tests.support.bounds import begin, model_status, one_shard, within
from tests.support.ingest_streams import CHUNK, half_sent, joined, processes, received
from tests.support.proxy import FaultProxy, Faults
from tests.support.refusals import refusal
from tests.support.weightsync_server import WeightSyncServer
from tests.unit.server.world import chunk
from weightsync import failpoints
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_client import Client, Retry
from weightsync_client.rpc.channels import Link

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Tensors = dict[str, npt.NDArray[np.uint8]]

CODE = grpc.StatusCode
RETRY = Retry(attempts=60, initial_s=0.02, max_s=0.2)
#: As in test_links.py.
OVERHEAD = 24 << 10

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server() -> Iterator[WeightSyncServer]:
    folder = Path(tempfile.mkdtemp(prefix="wsi"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, f"@{folder / 'plan'}")
        server = WeightSyncServer(folder / "run", folder / "state", ingest=2)
        yield server.start()
        server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def plan(server: WeightSyncServer) -> Iterator[Path]:
    path = server.run_dir.parent / "plan"
    yield path
    path.unlink(missing_ok=True)
    Path(f"{path}.hits").unlink(missing_ok=True)
    within(30, lambda: processes(server) == 2)


@pytest.fixture
def client(server: WeightSyncServer) -> Iterator[Client]:
    with Client(server.address, model="default", retry=RETRY) as client:
        yield client


def hits(plan: Path) -> list[list[str]]:
    path = Path(f"{plan}.hits")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def tensors(seed: int, count: int = 4, size: int = 16 * CHUNK) -> Tensors:
    generator = np.random.default_rng(seed)
    return {f"t{i}": generator.integers(0, 256, size, dtype=np.uint8) for i in range(count)}


def push(client: Client, expected: Tensors, **options: object) -> int:
    """Push one shard for each tensor, compare what comes back, return the bytes that were sent."""
    result = client.push(
        expected,
        chunk_bytes=CHUNK,
        shard_bytes=16 * CHUNK,
        delta="never",
        **options,  # type: ignore[arg-type]
    )
    pulled = {tensor.name: tensor.numpy() for tensor in client.tensors(result.version)}
    assert pulled.keys() == expected.keys()
    assert all(np.array_equal(pulled[name], expected[name]) for name in expected)
    return result.sent_bytes


@pytest.mark.parametrize("point", ["ingest.chunk", "ingest.copied"])
def test_a_process_that_dies_is_replaced_and_its_push_goes_on(
    server: WeightSyncServer, client: Client, plan: Path, point: str
) -> None:
    before = processes(server)
    plan.write_text(f"{point}=9>panic")
    push(client, tensors(1))
    dead = {int(pid) for _, _, pid in hits(plan)}
    assert dead
    plan.unlink()
    within(30, lambda: processes(server) == before)
    assert not any(Path(f"/proc/{pid}").exists() for pid in dead)
    assert model_status(server.stub).pushes == []
    # And those in their place are as good.
    plan.write_text("ingest.chunk=1*sleep(0)")
    push(client, tensors(2))
    assert {int(pid) for _, action, pid in hits(plan) if action == "sleep"}.isdisjoint(dead)


@pytest.mark.parametrize("point", ["ingest.claim", "ingest.chunk", "ingest.copied", "ingest.wrote"])
@pytest.mark.parametrize("code", ["ENOMEM", "EIO"])
def test_an_error_in_it_is_told_or_made_good(
    server: WeightSyncServer, client: Client, plan: Path, point: str, code: str
) -> None:
    skip = {"ingest.claim": "", "ingest.wrote": "1>"}.get(point, "3>")
    plan.write_text(f"{point}={skip}1*error({code})")
    shard = one_shard(16 * CHUNK)
    stub = server.stub
    begun = stub.BeginPush(begin(shard_count=1), timeout=5)
    messages = [joined(begun.push_id), *shard.layout(), *shard.chunks(CHUNK)]
    told = refusal(lambda: stub.PushWeights(iter(messages), timeout=10))
    assert told in {
        (CODE.RESOURCE_EXHAUSTED, Reason.MEMORY_EXHAUSTED),
        (CODE.UNAVAILABLE, Reason.FAULT),
    }
    assert hits(plan)
    plan.unlink()
    if point in ("ingest.chunk", "ingest.copied"):
        # What a process lacks ends the push, as it does where there is none.
        assert model_status(stub).pushes == []
    stub.AbortPush(pb.AbortPushRequest(push_id=begun.push_id), timeout=10)
    push(client, tensors(3))


def test_a_link_that_is_cut_costs_at_most_a_chunk(
    server: WeightSyncServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, data = FaultProxy(server.address), FaultProxy(f"{server.address}.1")
    # As a forwarded port would: the client finds the ingest process behind the proxy.
    monkeypatch.setattr(Link, "endpoints", lambda _, told: [data.address] if told else [])
    try:
        for number, place in enumerate((CHUNK // 2, 2 * CHUNK, 5 * CHUNK + 7, 11 * CHUNK)):
            expected, begun, cuts = tensors(10 + number, 1), home.passed + data.passed, data.cuts
            with Client(home.address, model="default", retry=RETRY) as client:
                client.status()
                data.faults = Faults(cut_after=data.passed + place, linger_s=0.3)
                push(client, expected)
                data.faults = Faults()
            assert data.cuts == cuts + 1
            size = 16 * CHUNK + 4096
            assert home.passed + data.passed - begun <= size + CHUNK + OVERHEAD
    finally:
        home.close()
        data.close()


@pytest.mark.parametrize("listens", [False, True], ids=["nobody", "silence"])
def test_a_data_port_that_cannot_be_reached_is_done_without(
    client: Client, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    # Connects, and then nothing more comes: as a firewall that swallows, but for the first packet.
    with socket.create_server(("127.0.0.1", 0)) as trap:
        address = f"127.0.0.1:{trap.getsockname()[1]}"
        if not listens:
            trap.close()
        monkeypatch.setattr(Link, "endpoints", lambda *_: [address, address])
        begun = time.monotonic()
        push(client, tensors(20))
        assert time.monotonic() - begun < 15


@pytest.mark.parametrize("action", ["sleep(2)", "stop"])
def test_memory_of_an_aborted_push_is_not_used_before_its_writer_has_let_go(
    server: WeightSyncServer, plan: Path, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What comes next must not wait for that process.
    monkeypatch.setattr(Link, "endpoints", lambda *_: [])
    # The process stands between its last look whether it may write, and the write.
    stub, shard = server.stub, one_shard(16 * CHUNK, seed=99)
    begun = stub.BeginPush(begin(shard_count=1), timeout=5)
    plan.write_text(f"ingest.chunk=3>1*{action}")
    messages = iter([joined(begun.push_id), *shard.layout(), *shard.chunks(CHUNK)])
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(stub.PushWeights, messages, timeout=30)
        within(10, lambda: bool(hits(plan)))
        (pid,) = {int(pid) for _, _, pid in hits(plan)}
        stub.AbortPush(pb.AbortPushRequest(push_id=begun.push_id), timeout=20)
        assert model_status(stub).pushes == []
        # Same size, so that it lies where the other one lay.
        expected = {"weight": np.full(16 * CHUNK, 7, dtype=np.uint8)}
        with Client(server.address, model="default") as direct:
            version = direct.push(expected, streams=1, delta="never").version
            if action == "stop":
                assert not Path(f"/proc/{pid}").exists()
            time.sleep(2.5)  # until the process that slept would have written on
            (pulled,) = direct.tensors(version)
            assert np.array_equal(pulled.numpy(), expected["weight"])
        assert sending.exception() is not None


def test_a_stale_writer_is_told_at_once_and_at_its_next_chunk(
    server: WeightSyncServer, client: Client
) -> None:
    stub, shard, rest = server.stub, one_shard(16 * CHUNK), threading.Event()
    begun = stub.BeginPush(begin(shard_count=1), timeout=5)
    with ThreadPoolExecutor(1) as pool:
        messages = half_sent(shard, begun.push_id, rest)
        sending = pool.submit(stub.PushWeights, messages, timeout=30)
        within(10, lambda: received(stub, begun.push_id) == CHUNK)
        client.acquire_epoch("another")
        assert refusal(sending.result) == (CODE.FAILED_PRECONDITION, Reason.EPOCH_STALE)
        rest.set()
    messages = iter([joined(begun.push_id), *shard.chunks(CHUNK)])
    told = refusal(lambda: stub.PushWeights(messages, timeout=10))
    assert told == (CODE.FAILED_PRECONDITION, Reason.EPOCH_STALE)


def test_a_shard_belongs_to_one_stream_at_a_time(server: WeightSyncServer) -> None:
    stub, shard, rest = server.stub, one_shard(16 * CHUNK), threading.Event()
    begun = stub.BeginPush(begin(shard_count=1), timeout=5)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(stub.PushWeights, half_sent(shard, begun.push_id, rest), timeout=30)
        within(10, lambda: received(stub, begun.push_id) == CHUNK)
        with grpc.insecure_channel(f"{server.address}.2") as other:
            call = weightsync_pb2_grpc.WeightSyncStub(other).PushWeights
            again = [joined(begun.push_id), chunk(0, CHUNK, shard.data[CHUNK : 2 * CHUNK])]
            told = refusal(lambda: call(iter(again), timeout=10))
            assert told == (CODE.ABORTED, Reason.SHARD_BUSY)
            rest.set()
            assert first.result(20).received_bytes == len(shard.data)
    assert stub.CommitPush(pb.CommitPushRequest(push_id=begun.push_id), timeout=10).version


def test_a_stranger_is_not_heard_at_the_inner_socket(server: WeightSyncServer) -> None:
    path = server.run_dir / "ingest.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        stranger.connect(str(path))
        assert stranger.recv(1) == b""


@pytest.mark.parametrize("point", ["ingest.claim", "ingest.wrote"])
def test_a_push_outlives_the_server_with_its_processes(
    server: WeightSyncServer, plan: Path, point: str
) -> None:
    assert server.process is not None
    plan.write_text(f"{point}=3>panic")
    patient = Retry(attempts=400, initial_s=0.05, max_s=0.3)
    with (
        Client(server.address, model="default", retry=patient) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        pushing = pool.submit(push, client, tensors(30))
        assert server.process.wait(20) == -signal.SIGKILL
        plan.unlink()
        server.close_channels()
        server.start()
        pushing.result(60)
        assert client.status().models[0].pushes == ()
