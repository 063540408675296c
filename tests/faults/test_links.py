"""Links that are cut, lose replies, crawl or damage bytes: pushes end whole, and resend little."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import torch
from safetensors.torch import save_file

from tests.support.bounds import within
from tests.support.proxy import FaultProxy, Faults
from tests.support.weightsync_server import WeightSyncServer
from tests.unit.server.world import chunk, make_shard
from weightsync import failpoints
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client, Durability, Reason, Retry, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RETRY = Retry(attempts=60, initial_s=0.02, max_s=0.2)
CHUNK = 64 << 10
#: Begin, layout, digests, commit, status, and what HTTP/2 adds to each connection.
OVERHEAD = 24 << 10


@pytest.fixture(scope="module", params=[0, 2], ids=["one", "ingest"])
def server(request: pytest.FixtureRequest) -> Iterator[WeightSyncServer]:
    folder = Path(tempfile.mkdtemp(prefix="wsl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, f"@{folder / 'plan'}")
        server = WeightSyncServer(folder / "run", folder / "state", flags=("--slots", "3"))
        server.ingest = request.param
        yield server.start()
        server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def plan(server: WeightSyncServer) -> Path:
    return server.run_dir.parent / "plan"


@pytest.fixture
def proxy(server: WeightSyncServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.address)
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[Client]:
    with Client(proxy.address, model="default", retry=RETRY) as client:
        client.status()
        yield client


@pytest.fixture
def direct(server: WeightSyncServer) -> Iterator[Client]:
    with Client(server.address, model="default", retry=RETRY) as client:
        yield client


def tensors(seed: int, size: int = 8 * CHUNK) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)}


def check(client: Client, version: int, expected: dict[str, torch.Tensor]) -> None:
    pulled = {tensor.name: tensor.torch() for tensor in client.tensors(version)}
    assert pulled.keys() == expected.keys()
    assert all(torch.equal(pulled[name], expected[name]) for name in expected)


RANDOM = random.Random(7)
CUTS = [*range(CHUNK, 9 * CHUNK, CHUNK), *(RANDOM.randrange(1, 9 * CHUNK) for _ in range(8))]


@pytest.mark.parametrize("linger_s", [0.0, 0.3], ids=["at_once", "after_a_moment"])
def test_a_link_cut_anywhere_resends_little(
    proxy: FaultProxy, direct: Client, linger_s: float
) -> None:
    for number, place in enumerate(CUTS):
        expected = tensors(number)
        with Client(proxy.address, model="default", retry=RETRY) as client:
            begun, cuts = proxy.passed, proxy.cuts
            proxy.faults = Faults(cut_after=begun + place, linger_s=linger_s)
            result = client.push(expected, chunk_bytes=CHUNK)
            proxy.faults = Faults()
        check(direct, result.version, expected)
        if proxy.cuts > cuts and linger_s:
            # What was read off the link before it was cut is not sent again, but for one chunk.
            assert proxy.passed - begun <= result.size_bytes + CHUNK + OVERHEAD
    assert direct.status().models[0].pushes == ()


def test_a_commit_whose_answer_is_lost_is_one_commit(
    proxy: FaultProxy, client: Client, direct: Client, plan: Path
) -> None:
    expected = tensors(100)
    before = direct.push(tensors(99)).version
    with ThreadPoolExecutor(1) as pool:
        plan.write_text("commit.reply=sleep(1)")
        pushing = pool.submit(client.push, expected, chunk_bytes=CHUNK, idempotency_key="lost")
        within(
            20,
            lambda: (
                direct.versions()[0].version > before
                and direct.versions()[0].durability is Durability.COMMITTED
            ),
        )
        assert not pushing.done()
        proxy.cut()
        plan.unlink()
        result = pushing.result(20)
    check(direct, result.version, expected)
    again = direct.push(expected, chunk_bytes=CHUNK, idempotency_key="lost")
    assert (again.version, again.already, again.sent_bytes) == (result.version, True, 0)
    assert len([v for v in direct.versions() if v.content_digest == result.content_digest]) == 1


def test_a_begin_whose_answer_is_lost_is_one_push(
    proxy: FaultProxy, client: Client, direct: Client
) -> None:
    expected = tensors(101)
    proxy.faults.lose_replies = True
    with ThreadPoolExecutor(1) as pool:
        # It asks for nothing before it begins.
        pushing = pool.submit(client.push, expected, dtype="keep")
        within(20, lambda: len(direct.status().models[0].pushes) == 1)
        (opened,) = direct.status().models[0].pushes
        # Before that the push is there, and ends with the call that is opening it.
        within(20, lambda: opened.push_id.encode() in proxy.lost)
        proxy.faults = Faults()
        proxy.cut()
        assert pushing.result(20).version == opened.version
    assert direct.status().models[0].pushes == ()


@pytest.mark.parametrize(
    "faults",
    [Faults(latency_s=0.05), Faults(slice_bytes=1, latency_s=0.0)],
    ids=["latency", "slices"],
)
def test_a_crawling_link_is_only_slow(
    proxy: FaultProxy, client: Client, direct: Client, faults: Faults
) -> None:
    expected = tensors(102, CHUNK)
    proxy.faults = faults
    check(direct, client.push(expected, chunk_bytes=CHUNK // 4).version, expected)


def test_a_flipped_bit_on_the_way_is_no_version(
    proxy: FaultProxy, client: Client, direct: Client
) -> None:
    expected = tensors(103)
    before = {info.version for info in direct.versions()}
    proxy.faults.flip_at = proxy.passed + 3 * CHUNK + 8000
    with pytest.raises(WeightSyncError) as caught:
        client.push(expected, chunk_bytes=CHUNK)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert {info.version for info in direct.versions()} == before
    check(direct, client.push(expected, chunk_bytes=CHUNK).version, expected)


def test_chunks_twice_reordered_overlapping_and_with_a_gap(server: WeightSyncServer) -> None:
    data = bytes(i % 251 for i in range(10_000))
    shard = make_shard(0, [("a", "U8", (len(data),), data)])
    stub = server.stub
    begun = stub.BeginPush(pb.BeginPushRequest(model="default", shard_count=1), timeout=5)
    size = len(shard.data)

    def send(chunks: Sequence[tuple[int, int]]) -> None:
        join = pb.PushWeightsRequest(join=pb.JoinPush(push_id=begun.push_id))
        parts = [chunk(0, begin, shard.data[begin:end]) for begin, end in chunks]
        stub.PushWeights(iter([join, *shard.layout(), *parts]), timeout=5)

    def offset() -> int:
        (progress,) = stub.GetPush(pb.GetPushRequest(push_id=begun.push_id), timeout=5).shards
        return int(progress.received_bytes)

    send([(0, 3000), (0, 3000), (2000, 5000)])  # Twice, overlapping: skipped.
    assert offset() == 5000
    for chunks in ([(6000, 7000), (5000, 6000)], [(9000, size)]):  # Reordered; a gap.
        with pytest.raises(grpc.RpcError) as caught:
            send(chunks)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert offset() == 5000
    send([(5000, size)])
    stub.CommitPush(pb.CommitPushRequest(push_id=begun.push_id), timeout=10)


_PUSHER = """
import os, signal, sys
from weightsync_client import Client
stop = len(sys.argv) > 3
def progress(done, total):
    if stop and done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
with Client(sys.argv[1], model="default") as client:
    result = client.push(sys.argv[2], idempotency_key="killed", on_progress=progress)
print(result.sent_bytes, result.size_bytes)
"""


def test_a_push_of_a_killed_client_is_taken_up_by_its_next_life(
    server: WeightSyncServer, direct: Client, tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(tensors(104, 32 << 20), path)
    command = [sys.executable, "-c", _PUSHER, server.address, str(path)]
    first = subprocess.run([*command, "die"], check=False)
    assert first.returncode == -signal.SIGKILL
    (push,) = direct.status().models[0].pushes
    within(20, lambda: direct.status().models[0].pushes[0].streams == 0)
    held = direct.status().models[0].pushes[0].received_bytes
    assert held > 0
    second = subprocess.run(command, check=True, capture_output=True, text=True)
    sent, size = map(int, second.stdout.split())
    assert sent == size - held
    info = direct.get_version(push.version)
    assert info.durability is Durability.COMMITTED
