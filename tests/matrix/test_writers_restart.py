"""A server is killed in the middle of a push by four processes, which goes on in its next life."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.weightsync_server import WeightSyncServer, short_server
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import AbortedError, Client, ClientError, PushResult, Retry, ShardedTensor
from weightsync_client.types import PushKind

pytestmark = pytest.mark.timeout(180)

#: Longer than a server takes to start on a busy machine.
RETRY = Retry(attempts=200, initial_s=0.05, max_s=0.5)
WRITERS, SHARDS, ROWS, COLUMNS = 4, 6, 256, 512
SHARD_BYTES = ROWS * COLUMNS * 4

Matrix = NDArray[np.float32]


def state(seed: int) -> dict[str, Matrix]:
    rng = np.random.default_rng(seed)
    return {f"layer.{at}": rng.random((ROWS, COLUMNS), np.float32) for at in range(SHARDS)}


def strips(whole: dict[str, Matrix], writer: int, along: int) -> dict[str, Any]:
    each = (ROWS, COLUMNS)[along] // WRITERS
    offsets = (writer * each, 0) if along == 0 else (0, writer * each)
    places = range(writer * each, (writer + 1) * each)
    return {
        name: ShardedTensor(
            tensor.shape, "F32", [(offsets, np.ascontiguousarray(tensor.take(places, along)))]
        )
        for name, tensor in whole.items()
    }


class Stop:
    """Holds a push once it has sent so many bytes, until it may go on."""

    def __init__(self, after: int) -> None:
        self.reached, self.gone_on = threading.Event(), threading.Event()
        self._after = after

    def __call__(self, sent: int, _: int) -> None:
        if sent >= self._after and not self.reached.is_set():
            self.reached.set()
            assert self.gone_on.wait(60)


class Pushing:
    """Four processes' pushes, of which the last one stands still after a third of its bytes."""

    def __init__(self, server: WeightSyncServer) -> None:
        self.stop = Stop(0)
        self._pool = ThreadPoolExecutor(WRITERS)
        self.clients = [Client(server.address, retry=RETRY) for _ in range(WRITERS)]
        self._options: dict[str, Any] = {}
        self.waiting: list[Future[Any]] = []

    def begin(
        self,
        whole: dict[str, Matrix],
        *,
        along: int = 0,
        after: int = 2 * SHARD_BYTES // WRITERS + 1000,
        **options: Any,
    ) -> Pushing:
        """Begin; the last process stands still after so many bytes."""
        self.stop = Stop(after)
        self._options = {"idempotency_key": secrets.token_hex(4), "writers": WRITERS, **options}
        self.waiting = [
            self._pool.submit(self._push, writer, strips(whole, writer, along))
            for writer in range(WRITERS)
        ]
        return self

    def _push(self, writer: int, source: dict[str, Any]) -> Any:
        # Each tensor is a shard of its own.
        options: dict[str, Any] = {"shard_bytes": 1, "chunk_bytes": 10_000}
        options |= {"delta": "never", "writer": writer, **self._options}
        if writer == WRITERS - 1:
            options["on_progress"] = self.stop
        try:
            return self.clients[writer].push(source, **options)
        except ClientError as error:
            return error

    def results(self) -> list[Any]:
        return [waiting.result(60) for waiting in self.waiting]

    def close(self) -> None:
        self.stop.gone_on.set()
        self._pool.shutdown()
        for client in self.clients:
            client.close()


def kept(server: WeightSyncServer) -> int:
    """Return how many shards of the push are durable, all boxes of them."""
    stub = server.stub
    (push,) = stub.GetStatus(pb.GetStatusRequest(), timeout=5).models[0].pushes
    answer = stub.GetPush(pb.GetPushRequest(push_id=push.push_id, writer=0), timeout=5)
    return sum(shard.durable_bytes == shard.size_bytes for shard in answer.shards)


def wait_kept(server: WeightSyncServer, count: int) -> None:
    end = time.monotonic() + 30
    while kept(server) < count:
        assert time.monotonic() < end, "the shards were not made durable"
        time.sleep(0.01)


def restarted(server: WeightSyncServer, pushing: Pushing) -> list[Any]:
    """Kill the server in the middle of a push, and return what each writer got in the end."""
    server.kill()
    server.start()
    pushing.stop.gone_on.set()
    return pushing.results()


@pytest.fixture(scope="module")
def plain() -> Iterator[WeightSyncServer]:
    with short_server(flags=("--same-host", "--slots", "3"), ingest=0) as server:
        yield server


@pytest.fixture(scope="module")
def ingest() -> Iterator[WeightSyncServer]:
    with short_server(flags=("--same-host", "--slots", "3"), ingest=2) as server:
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest) -> WeightSyncServer:
    found: WeightSyncServer = request.getfixturevalue(request.param)
    assert found.process is not None
    if found.process.poll() is not None:
        # A test failed that had killed it.
        found.start()
    return found


on_plain = pytest.mark.parametrize("server", ["plain"], indirect=True)


@pytest.mark.parametrize(
    ("server", "same_host", "along"),
    [
        # Each two of these meet.
        ("plain", "never", 0),
        ("plain", "auto", 1),
        ("ingest", "never", 1),
        ("ingest", "auto", 0),
        pytest.param("plain", "never", 1, marks=pytest.mark.battery),
        pytest.param("plain", "auto", 0, marks=pytest.mark.battery),
        pytest.param("ingest", "never", 0, marks=pytest.mark.battery),
        pytest.param("ingest", "auto", 1, marks=pytest.mark.battery),
    ],
    indirect=["server"],
)
def test_it_goes_on_where_it_was(server: WeightSyncServer, same_host: str, along: int) -> None:
    whole = state(1)
    pushing = Pushing(server).begin(whole, same_host=same_host, along=along)
    try:
        assert pushing.stop.reached.wait(30)
        wait_kept(server, 2)
        for result in (results := restarted(server, pushing)):
            assert isinstance(result, PushResult), results
            assert result.durable
        with Client(server.address, retry=RETRY) as client:
            unsharded = client.push(whole, delta="never")
        assert {result.content_digest for result in results} == {unsharded.content_digest}
        # The shards that were whole were not sent again.
        sent = sum(result.sent_bytes for result in results)
        assert sent <= (2 * SHARDS - 2) * SHARD_BYTES
    finally:
        pushing.close()


def test_one_that_does_not_come_back_ends_it_for_all(folder: Path) -> None:
    # Within it the others come back, who ask twice a second.
    variables = {"WEIGHTSYNC_PUSH_WRITER_TIMEOUT_S": "5"}
    server = WeightSyncServer(folder / "run", folder / "state", variables=variables)
    server.start()
    pushing = Pushing(server).begin(state(2))
    try:
        assert pushing.stop.reached.wait(30)
        wait_kept(server, 2)
        server.kill()
        server.start()
        for result in [waiting.result(60) for waiting in pushing.waiting[:-1]]:
            assert isinstance(result, AbortedError), result
            assert "writer 3 of 4 did not arrive" in str(result)
            assert result.metadata["writer"] == "3"
        # It is told as well, and the next push is another one.
        pushing.stop.gone_on.set()
        late = pushing.waiting[-1].result(60)
        assert isinstance(late, ClientError)
        assert "writer 3 of 4 did not arrive" in str(late)
        with Client(server.address, retry=RETRY) as client:
            assert client.status().models[0].pushes == ()
            client.push(state(2))
    finally:
        pushing.close()
        server.stop()


def test_what_is_not_kept_begins_again(folder: Path) -> None:
    server = WeightSyncServer(folder / "run", folder / "state", store="memory://")
    server.start()
    try:
        begins_again(server, state(3), {})
    finally:
        server.stop()


@on_plain
def test_what_is_pushed_in_part_begins_again(server: WeightSyncServer) -> None:
    frozen = {"frozen": state(3)["layer.0"]}
    with Client(server.address, retry=RETRY) as client:
        base = client.push(state(3) | frozen, delta="never")
    begins_again(server, state(4), frozen, partial=True, base=base.version)


def begins_again(
    server: WeightSyncServer, whole: dict[str, Matrix], kept: dict[str, Matrix], **options: Any
) -> None:
    pushing = Pushing(server).begin(whole, same_host="never", **options)
    try:
        assert pushing.stop.reached.wait(30)
        for result in (results := restarted(server, pushing)):
            assert isinstance(result, PushResult), results
        with Client(server.address, retry=RETRY) as client:
            unsharded = client.push(whole | kept, delta="never")
        assert {result.content_digest for result in results} == {unsharded.content_digest}
    finally:
        pushing.close()


@on_plain
def test_changes_go_whole_where_the_base_has_left_memory(server: WeightSyncServer) -> None:
    pushing = Pushing(server)
    whole = state(5)
    streamed: dict[str, Any] = {"same_host": "never", "delta": "auto"}
    try:
        first = pushing.begin(whole, after=1 << 40, **streamed).results()
        assert all(isinstance(result, PushResult) for result in first), first
        for tensor in whole.values():
            tensor[::7, ::11] += 1
        pushing.begin(whole, after=1, chunk_bytes=400, **streamed)
        assert pushing.stop.reached.wait(30)
        for result in (results := restarted(server, pushing)):
            assert isinstance(result, PushResult), results
            assert (result.kind, result.fallback_reason) == (PushKind.FULL, "base_mismatch")
        with Client(server.address, retry=RETRY) as client:
            unsharded = client.push(whole, delta="never")
        assert {result.content_digest for result in results} == {unsharded.content_digest}
    finally:
        pushing.close()
