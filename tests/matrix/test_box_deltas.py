"""Several processes push what changed in their parts of one version to a real server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.server_fixtures import RETRY, Relay
from tests.support.weightsync_server import WeightSyncServer, short_server
from weightsync import failpoints
from weightsync_client import Client, ClientError, Reason, ShardedTensor
from weightsync_client.types import PushKind

ROWS, COLUMNS, WRITERS = 256, 512, 4

Matrix = NDArray[np.float32]


@pytest.fixture(name="roomy_server", scope="module")
def _roomy_server() -> Iterator[WeightSyncServer]:
    """A server with memory for a version, its base and one that was pushed between."""
    with short_server(flags=("--same-host", "--slots", "3")) as server:
        yield server


def matrix(seed: int) -> Matrix:
    return np.random.default_rng(seed).random((ROWS, COLUMNS), np.float32)


def changed(whole: Matrix, seed: int) -> Matrix:
    """Return the matrix after a step that changes 1 % of it."""
    places = np.random.default_rng(seed).choice(whole.size, whole.size // 100, replace=False)
    after = whole.copy()
    after.reshape(-1)[places] += 1
    return after


def part(whole: Matrix, writer: int, along: int) -> dict[str, Any]:
    each = whole.shape[along] // WRITERS
    offsets = (writer * each, 0) if along == 0 else (0, writer * each)
    strip = np.take(whole, range(writer * each, (writer + 1) * each), axis=along)
    return {
        "strips": ShardedTensor(whole.shape, "F32", [(offsets, strip)]),
        "vector": whole[0].copy(),
        "quiet": ShardedTensor((WRITERS,), "F32", [((writer,), np.array([writer], np.float32))]),
    }


def everything(whole: Matrix) -> dict[str, Any]:
    return {
        "strips": whole,
        "vector": whole[0].copy(),
        "quiet": np.arange(WRITERS, dtype=np.float32),
    }


class Writers:
    """As many clients, each of which pushes its part."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.stack = ExitStack()
        self.clients = [
            self.stack.enter_context(Client(address, retry=RETRY)) for address in addresses
        ]

    def push(self, whole: Matrix, key: str, along: int = 0, **options: Any) -> list[Any]:
        def one(writer: int) -> Any:
            named = {"idempotency_key": key, "writers": WRITERS, "writer": writer, **options}
            try:
                return self.clients[writer].push(part(whole, writer, along), **named)
            except ClientError as error:
                return error

        with ThreadPoolExecutor(WRITERS) as pool:
            return list(pool.map(one, range(WRITERS)))

    def renew(self, writer: int, address: str) -> None:
        """Put a process that remembers nothing in the place of a writer."""
        self.clients[writer] = self.stack.enter_context(Client(address, retry=RETRY))


@pytest.fixture(name="writers")
def _writers(roomy_server: WeightSyncServer) -> Iterator[Writers]:
    made = Writers([roomy_server.address] * WRITERS)
    with made.stack:
        yield made


def compare(server: WeightSyncServer, whole: Matrix, results: list[Any]) -> None:
    """Assert that all made the version that one process with all of it would have pushed."""
    (version,) = {result.version for result in results}
    with Client(server.address, retry=RETRY) as client:
        tensors = {tensor.name: np.asarray(tensor.torch()) for tensor in client.tensors(version)}
        assert np.array_equal(tensors["strips"], whole)
        alone = client.push(everything(whole), delta="never")
    assert {result.content_digest for result in results} == {alone.content_digest}


def kinds(results: list[Any]) -> list[PushKind]:
    return [result.kind for result in results]


@pytest.mark.parametrize("along", [0, 1])
def test_each_sends_what_changed_in_its_boxes(
    roomy_server: WeightSyncServer, writers: Writers, along: int
) -> None:
    before = matrix(along)
    first = writers.push(before, f"delta/{along}/0", along)
    after = changed(before, 7)
    second = writers.push(after, f"delta/{along}/1", along)
    last = changed(after, 8)
    third = writers.push(last, f"delta/{along}/2", along)
    assert kinds(first) == [PushKind.FULL] * WRITERS
    assert kinds(second) == kinds(third) == [PushKind.DELTA] * WRITERS
    assert {result.base_version for result in third} == {second[0].version}
    assert sum(result.sent_bytes for result in third) < last.nbytes / 10
    compare(roomy_server, last, third)


def test_one_that_remembers_nothing_sends_its_boxes_whole(
    roomy_server: WeightSyncServer, writers: Writers
) -> None:
    before = matrix(3)
    writers.push(before, "mix/0")
    writers.renew(2, roomy_server.address)
    after = changed(before, 9)
    results = writers.push(after, "mix/1")
    full = PushKind.FULL
    assert kinds(results) == [PushKind.DELTA, PushKind.DELTA, full, PushKind.DELTA]
    compare(roomy_server, after, results)


def test_boxes_of_another_sharding_go_whole(
    roomy_server: WeightSyncServer, writers: Writers
) -> None:
    before = matrix(4)
    writers.push(before, "resharded/0", along=0)
    after = changed(before, 10)
    results = writers.push(after, "resharded/1", along=1)
    assert kinds(results) == [PushKind.FULL] * WRITERS
    assert {result.fallback_reason for result in results} == {"layout_changed"}
    compare(roomy_server, after, results)


def test_without_the_base_all_goes_whole_in_the_same_push(
    roomy_server: WeightSyncServer, writers: Writers
) -> None:
    before = matrix(5)
    writers.push(before, "lost/0")
    with Client(roomy_server.address, retry=RETRY) as other:
        for seed in range(6):
            other.push({"other": matrix(100 + seed)})
    after = changed(before, 11)
    results = writers.push(after, "lost/1")
    assert kinds(results) == [PushKind.FULL] * WRITERS
    assert {result.fallback_reason for result in results} == {"base_mismatch"}
    compare(roomy_server, after, results)


def test_one_that_holds_replicas_alone_has_nothing_to_compare(
    roomy_server: WeightSyncServer,
) -> None:
    vector = np.arange(1000, dtype=np.float32)
    made = Writers([roomy_server.address] * 2)

    def one(writer: int, key: str) -> Any:
        named: dict[str, Any] = {"idempotency_key": key, "writers": 2, "writer": writer}
        return made.clients[writer].push({"vector": vector}, **named)

    with made.stack, ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2), ["alike/0"] * 2))
        vector[3] = 9
        results = list(pool.map(one, range(2), ["alike/1"] * 2))
    assert kinds(results) == [PushKind.DELTA, PushKind.FULL]
    assert results[1].sent_bytes == 0


def test_what_changed_nowhere_is_said_in_a_few_bytes(
    roomy_server: WeightSyncServer, writers: Writers
) -> None:
    before = matrix(6)
    writers.push(before, "same/0")
    results = writers.push(before, "same/1")
    assert kinds(results) == [PushKind.DELTA] * WRITERS
    compare(roomy_server, before, results)


def test_a_cut_link_is_taken_up(roomy_server: WeightSyncServer) -> None:
    relay = Relay(roomy_server.address)
    made = Writers([roomy_server.address] * (WRITERS - 1) + [relay.address])
    with made.stack, contextlib.closing(relay):
        before = matrix(12)
        made.push(before, "cut/0")
        relay.cut_after.append(1_500)
        after = changed(before, 13)
        results = made.push(after, "cut/1", chunk_bytes=400)
        assert kinds(results) == [PushKind.DELTA] * WRITERS
        assert relay.cuts
    compare(roomy_server, after, results)


def test_a_failed_push_is_followed_by_a_whole_one(
    roomy_server: WeightSyncServer, writers: Writers
) -> None:
    before = matrix(14)
    writers.push(before, "failed/0")
    after = changed(before, 15)
    wrong = after.copy()
    wrong[0, 0] += 5

    def one(writer: int) -> Any:
        source = part(after, writer, 0)
        if writer == 3:
            source["vector"] = wrong[0]
        named: dict[str, Any] = {"idempotency_key": "failed/1", "writers": WRITERS}
        try:
            return writers.clients[writer].push(source, writer=writer, **named)
        except ClientError as error:
            return error

    with ThreadPoolExecutor(WRITERS) as pool:
        failed = list(pool.map(one, range(WRITERS)))
    assert {error.reason for error in failed} == {Reason.DIGEST_MISMATCH}
    assert all("writers 0 and 3" in str(error) for error in failed)
    results = writers.push(after, "failed/2")
    assert kinds(results) == [PushKind.FULL] * WRITERS
    compare(roomy_server, after, results)


@pytest.mark.parametrize("point", ["fetcher.task", "fetcher.reply"])
def test_a_fetcher_that_dies_at_it_is_replaced(tmp_path: Path, point: str) -> None:
    plan = tmp_path / "plan"
    plan.touch()
    variables = {failpoints.VARIABLE: f"@{plan}"}
    with short_server(flags=("--slots", "3"), variables=variables) as server:
        made = Writers([server.address] * WRITERS)
        with made.stack:
            before = matrix(16)
            made.push(before, "dies/0", along=1)
            # The first that is asked of one now is to lay a base and what changed.
            plan.write_text(f"{point}=panic")
            after = changed(before, 17)
            with ThreadPoolExecutor(1) as pool:
                pushing = pool.submit(made.push, after, "dies/1", along=1)
                hits = plan.with_name("plan.hits")
                while not hits.exists() and not pushing.done():
                    time.sleep(0.01)
                plan.unlink()
                results = pushing.result()
        assert kinds(results) == [PushKind.DELTA] * WRITERS
        assert f"{point} panic" in hits.read_text()
        compare(server, after, results)


@pytest.mark.parametrize("shard_bytes", [1 << 20, 1 << 14])
def test_a_shard_in_which_all_changes_is_no_more_than_a_large_delta(
    roomy_server: WeightSyncServer, writers: Writers, shard_bytes: int
) -> None:
    whole, norm = matrix(18), np.ones(64, np.float32)

    def one(writer: int, key: str) -> Any:
        source = part(whole, writer, 0)
        places = [((16 * writer,), norm[16 * writer : 16 * writer + 16].copy())]
        source["norm"] = ShardedTensor((64,), "F32", places)
        named: dict[str, Any] = {"idempotency_key": key, "writers": WRITERS, "writer": writer}
        return writers.clients[writer].push(source, shard_bytes=shard_bytes, **named)

    with ThreadPoolExecutor(WRITERS) as pool:
        for step in range(3):
            key = f"small/{shard_bytes}/{step}"
            results = list(pool.map(one, range(WRITERS), [key] * WRITERS))
            whole = changed(whole, 30 + step)
            norm = norm + np.float32(np.pi)
    assert kinds(results) == [PushKind.DELTA] * WRITERS


def test_a_server_without_memory_for_changes_gets_all_from_then_on() -> None:
    rows, columns, count = 2048, 2048, 2
    variables = {"WEIGHTSYNC_SLOTS": "2", "WEIGHTSYNC_MEMORY_BYTES": str(2 * 18_874_368)}
    whole = np.random.default_rng(1).random((rows, columns), np.float32)
    outcomes = []
    with short_server(variables=variables) as server:
        made = Writers([server.address] * count)

        def one(writer: int, key: str) -> Any:
            half = slice(writer * rows // count, (writer + 1) * rows // count)
            boxes = [((half.start, 0), whole[half].copy())]
            source = {"big": ShardedTensor(whole.shape, "F32", boxes)}
            named: dict[str, Any] = {"idempotency_key": key, "writers": count, "writer": writer}
            try:
                return made.clients[writer].push(source, **named)
            except ClientError as error:
                return error

        with made.stack, ThreadPoolExecutor(count) as pool:
            for step in range(4):
                outcomes.append(list(pool.map(one, range(count), [f"step/{step}"] * count)))
                whole.reshape(-1)[step::31] += 1
    first, second, *later = outcomes
    assert kinds(first) == [PushKind.FULL] * count
    assert {error.reason for error in second} == {Reason.MEMORY_EXHAUSTED}
    for results in later:
        assert {result.fallback_reason for result in results} == {"no_room"}
