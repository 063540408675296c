"""Several processes push one version to a real server, each the part that it holds."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.matrix.sharded_ranks import FORMS, RANKS, TRAINED, run, whole_model
from tests.support.following import until
from tests.support.ranks import run_ranks
from tests.support.scraped import scraped
from tests.support.server_fixtures import RETRY, Relay, every_kind
from tests.support.strips import COLUMNS, ROWS, matrix, part
from tests.support.weightsync_server import WeightSyncServer, short_server
from weightsync_client import (
    AbortedError,
    Client,
    ClientError,
    InvalidError,
    Reason,
    ShardedTensor,
    TransferPath,
)
from weightsync_client.rpc.retry import RetryingCalls

# Ranks need seconds of a processor that others may need as well.
pytestmark = pytest.mark.timeout(180)

#: Tensors of a model whose dtype is not that of the narrow engine: all but the head and a number.
CAST = 5
#: Of those who are waited for in vain; the others come well within the default of a minute.
WAIT_S = 3.0
#: Less than that minute.
TOLD_S = 30.0


@pytest.fixture(scope="module")
def host_server() -> Iterator[WeightSyncServer]:
    with short_server(flags=("--same-host",)) as server:
        yield server


@pytest.fixture(scope="module")
def hasty_server() -> Iterator[WeightSyncServer]:
    variables = {"WEIGHTSYNC_PUSH_WRITER_TIMEOUT_S": str(WAIT_S)}
    with short_server(flags=("--same-host",), variables=variables) as server:
        yield server


@pytest.fixture(scope="module", params=["memory", "file", "ingest"])
def server(request: pytest.FixtureRequest) -> Iterator[WeightSyncServer]:
    if request.param == "file":
        yield request.getfixturevalue("host_server")
        return
    options = {"ingest": 2} if request.param == "ingest" else {"store": "memory://"}
    with short_server(**options) as server:
        yield server


def push(
    server: WeightSyncServer,
    source: dict[str, Any],
    key: str,
    writer: int,
    count: int,
    **options: Any,
) -> Any:
    with Client(server.address, retry=RETRY) as client:
        return client.push(source, idempotency_key=key, writers=count, writer=writer, **options)


def together(
    server: WeightSyncServer, sources: list[dict[str, Any]], key: str, **options: Any
) -> list[Any]:
    """Push from as many threads; return results and errors."""

    def one(writer: int) -> Any:
        try:
            return push(server, sources[writer], key, writer, len(sources), **options)
        except ClientError as error:
            return error

    with ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(one, range(len(sources))))


@every_kind
@pytest.mark.parametrize("along", [0, 1])
def test_what_a_caller_describes_is_put_together(server: WeightSyncServer, along: int) -> None:
    parts = [part(1 + along, writer, 4, along=along) for writer in range(4)]
    results = together(server, parts, f"a/{along}", same_host="never")
    (version,) = {result.version for result in results}
    assert sum(result.sent_bytes for result in results) == ROWS * COLUMNS * 4 + COLUMNS * 4
    with Client(server.address, retry=RETRY) as client:
        tensors = {tensor.name: np.asarray(tensor.torch()) for tensor in client.tensors(version)}
        assert np.array_equal(tensors["strips"], matrix(1 + along))
    compare(server, 1 + along, results[0])


@every_kind
def test_a_cut_link_is_taken_up(server: WeightSyncServer, relay: Relay) -> None:
    relay.cut_after.append(9_000)
    with ThreadPoolExecutor(1) as pool:
        near = pool.submit(push, server, part(2, 0, 2), "b/1", 0, 2, same_host="never")
        with Client(relay.address, retry=RETRY) as far:
            options: dict[str, Any] = {"idempotency_key": "b/1", "writers": 2, "chunk_bytes": 1000}
            result = far.push(part(2, 1, 2), writer=1, same_host="never", **options)
        assert near.result().content_digest == result.content_digest
    assert relay.cuts == 1


@pytest.mark.parametrize("along", [0, 1])
def test_on_the_servers_host_they_write_into_its_memory(
    host_server: WeightSyncServer, along: int
) -> None:
    key = f"same-host/{along}"
    parts = [part(9 + along, writer, 4, along=along) for writer in range(4)]
    results = together(host_server, parts, key)
    assert {result.way for result in results} == {TransferPath.SAME_HOST}
    assert len({result.version for result in results}) == 1
    compare(host_server, 9 + along, results[0])


def test_one_on_the_host_writes_while_another_streams(host_server: WeightSyncServer) -> None:
    with ThreadPoolExecutor(1) as pool, Client(host_server.address, retry=RETRY) as far:
        near = pool.submit(push, host_server, part(12, 0, 2, along=1), "mix/1", 0, 2)
        options: dict[str, Any] = {"idempotency_key": "mix/1", "writers": 2, "chunk_bytes": 1000}
        streamed = far.push(part(12, 1, 2, along=1), writer=1, same_host="never", **options)
        written = near.result()
    assert (written.way, streamed.way) == (TransferPath.SAME_HOST, TransferPath.STREAM)
    compare(host_server, 12, streamed)


def until_open(server: WeightSyncServer) -> None:
    """Return when a push is open."""
    with Client(server.address, retry=RETRY) as client:
        until(lambda: bool(client.status().models[0].pushes), "a push is open")


def until_none_open(server: WeightSyncServer) -> None:
    """Return when none is: one that has failed is, until it has freed everything."""
    with Client(server.address, retry=RETRY) as client:
        until(lambda: not client.status().models[0].pushes, "no push is open")


def compare(server: WeightSyncServer, seed: int, result: Any) -> None:
    """Assert that a version is the one that a process with all of it would have pushed."""
    with Client(server.address, retry=RETRY) as client:
        whole = client.push({"strips": matrix(seed), "vector": matrix(seed)[0]}, delta="never")
    assert whole.content_digest == result.content_digest


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightSyncServer]:
    """A server whose engine has the tensors of the ranks, all floats as BF16."""
    path = tmp_path_factory.mktemp("narrow") / "model.safetensors"
    save_file(narrow_state(0), path)
    with short_server(flags=("--same-host", "--engine=memory", f"--model={path}")) as server:
        server.wait_serving()
        yield server


def narrow_state(seed: int) -> dict[str, torch.Tensor]:
    """Return all of a model as an engine has it."""
    state = whole_model(seed).state_dict()
    return {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


@pytest.fixture(name="ranks", scope="module")
def _ranks(host_server: WeightSyncServer, narrow_server: WeightSyncServer) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="wsr"))
    run_ranks(run, RANKS, str(folder), host_server.address, narrow_server.address)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    shutil.rmtree(folder)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_ranks_push_what_they_hold(
    host_server: WeightSyncServer, ranks: list[dict[str, Any]], form: str
) -> None:
    versions = {tuple(rank[form][:2]) for rank in ranks}
    assert len(versions) == 1, versions
    state = whole_model(FORMS[form][1]).state_dict()
    with Client(host_server.address, retry=RETRY) as client:
        whole = client.push(state, delta="never")
    assert versions.pop()[1] == whole.content_digest
    # Of replicas one rank sends the bytes.
    size = sum(tensor.nbytes for tensor in state.values())
    assert sum(rank[form][2] for rank in ranks) == size
    # Also of one that has replicas alone.
    assert {rank[form][3] for rank in ranks} == {TransferPath.SAME_HOST}


@pytest.mark.parametrize("form", FORMS)
def test_ranks_push_some_of_it(
    host_server: WeightSyncServer, ranks: list[dict[str, Any]], form: str
) -> None:
    state = dict(whole_model(FORMS[form][1]).state_dict())
    state |= {name: 2 * state[name] for name in TRAINED}
    with Client(host_server.address, retry=RETRY) as client:
        whole = client.push(state, delta="never")
    for rank in ranks:
        digest, base, way = rank[f"{form}_part"]
        assert (digest, base) == (whole.content_digest, rank[form][0])
        assert way == TransferPath.SAME_HOST


@pytest.mark.parametrize("form", FORMS)
def test_each_box_of_a_rank_is_cast_to_what_the_engine_has(
    narrow_server: WeightSyncServer, ranks: list[dict[str, Any]], form: str
) -> None:
    state = narrow_state(FORMS[form][1])
    with Client(narrow_server.address, retry=RETRY) as client:
        whole = client.push(state, delta="never", dtype="exact")
    found = [rank[f"{form}_cast"] for rank in ranks]
    assert {digest for digest, _, _ in found} == {whole.content_digest}
    # No box goes as it is: of replicas one rank sends the bytes.
    assert sum(sent for _, sent, _ in found) == sum(tensor.nbytes for tensor in state.values())
    assert {cast for _, _, cast in found} == {CAST}


def test_tensors_that_ranks_cast_together_are_counted_once(
    narrow_server: WeightSyncServer, ranks: list[dict[str, Any]]
) -> None:
    assert ranks
    counted = scraped(narrow_server.log, "weightsync_cast_tensors_total")
    assert counted == CAST * len(FORMS)


def test_a_rank_whose_replica_differs_is_named_to_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        reason, message = rank["differing"]
        assert reason == Reason.DIGEST_MISMATCH
        assert "writers 0 and 2" in message
        assert "norm.bias" in message


def test_a_step_that_failed_is_pushed_again_and_only_once(ranks: list[dict[str, Any]]) -> None:
    assert len({tuple(rank["again"][:2]) for rank in ranks}) == 1
    for rank in ranks:
        reason, message = rank["twice"]
        assert reason == Reason.VERSION_CONFLICT
        assert "has been pushed before" in message


def test_who_waits_for_one_that_never_comes_is_told(hasty_server: WeightSyncServer) -> None:
    began = time.monotonic()
    with pytest.raises(AbortedError, match="writer 1 of 2 did not arrive") as caught:
        push(hasty_server, part(3, 0, 2), "c/1", 0, 2)
    assert caught.value.metadata["writer"] == "1"
    assert time.monotonic() - began < TOLD_S


def test_one_with_another_layout_is_told_so_as_are_the_others(
    host_server: WeightSyncServer,
) -> None:
    mine, theirs = part(4, 0, 2), part(4, 1, 2)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(push, host_server, mine, "d/1", 0, 2)
        until_open(host_server)
        theirs["strips"] = part(4, 1, 2)["strips"]._replace(dtype="BF16", boxes=())
        with pytest.raises(ClientError):
            push(host_server, theirs, "d/1", 1, 2)
        error = waiting.exception()
    assert isinstance(error, ClientError)
    assert "writer" in str(error)
    assert time.monotonic() - began < TOLD_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_killed_or_stands_still_ends_it_for_all(
    hasty_server: WeightSyncServer, number: int
) -> None:
    key = f"e/{number}"
    program = (
        "from tests.support.strips import part\n"
        "from weightsync_client import Client\n"
        "import sys, time\n"
        "def slow(done, whole):\n"
        "    print('sent', flush=True)\n"
        "    time.sleep(60)\n"
        "with Client(sys.argv[1]) as client:\n"
        "    client.push(part(5, 1, 2), idempotency_key=sys.argv[2], writers=2, writer=1,\n"
        "                chunk_bytes=1000, on_progress=slow)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, hasty_server.address, key],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        process.send_signal(number)
        began = time.monotonic()
        with pytest.raises(AbortedError, match="writer 1 of 2 brought nothing more"):
            push(hasty_server, part(5, 0, 2), key, 0, 2)
        assert time.monotonic() - began < TOLD_S
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr] # as above
    # Nothing is left of it, and the next push is another one.
    until_none_open(hasty_server)
    if number == signal.SIGKILL:
        results = together(hasty_server, [part(5, writer, 2) for writer in range(2)], f"{key}/next")
        assert len({result.version for result in results}) == 1


def test_an_old_epoch_is_refused_to_all(host_server: WeightSyncServer) -> None:
    with Client(host_server.address, retry=RETRY) as client, ThreadPoolExecutor(1) as pool:
        old = client.acquire_epoch("first")
        waiting = pool.submit(push, host_server, part(6, 0, 2), "f/1", 0, 2)
        until_open(host_server)
        client.acquire_epoch("second")
        error = waiting.exception()
        assert isinstance(error, ClientError)
        assert error.reason is Reason.EPOCH_STALE
        with pytest.raises(ClientError) as caught:
            client.push(part(6, 1, 2), idempotency_key="f/1", writers=2, writer=1, epoch=old)
        assert caught.value.reason is Reason.EPOCH_STALE


def test_cancelling_one_ends_a_commit_that_waits_for_the_others(
    host_server: WeightSyncServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, commit = threading.Event(), RetryingCalls.commit

    def commits(*args: Any) -> Any:
        asked.set()
        return commit(*args)

    monkeypatch.setattr(RetryingCalls, "commit", commits)
    with Client(host_server.address, retry=RETRY) as client:
        handle = client.push_async(part(8, 0, 2), writer=0, idempotency_key="h/1", writers=2)
        assert asked.wait(30)
        began = time.monotonic()
        handle.cancel()
        with pytest.raises(AbortedError):
            handle.committed.result(60)
        assert time.monotonic() - began < TOLD_S
    until_none_open(host_server)


def test_cancelling_one_tells_the_others(host_server: WeightSyncServer) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def wait(*_: int) -> None:
        begun.set()
        assert cancelled.wait(30)

    with Client(host_server.address, retry=RETRY) as client:
        options: dict[str, Any] = {"idempotency_key": "g/1", "writers": 2}
        handle = client.push_async(
            part(7, 0, 2), writer=0, on_progress=wait, chunk_bytes=1000, **options
        )
        assert begun.wait(30)
        handle.cancel()
        cancelled.set()
        with pytest.raises(AbortedError, match="writer 0 gave the push up for all"):
            client.push(part(7, 1, 2), writer=1, **options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "writers=, writer= and idempotency_key="),
        ({"writers": 2}, "writers=, writer= and idempotency_key="),
        ({"writers": 2, "writer": 0}, "idempotency_key="),
        ({"writers": 2, "writer": 2, "idempotency_key": "k"}, "number them from 0"),
        ({"writers": 1}, "held in part"),
        (
            {"writers": 2, "writer": 0, "idempotency_key": "k", "partial": True, "base": 10**6},
            "keeps the tensors of version 1000000, which the server does not have",
        ),
        (
            {"writers": 2, "writer": 0, "idempotency_key": "k", "base": 1},
            "but partial=True is not",
        ),
        (
            {"writers": 2, "writer": 0, "idempotency_key": "k", "delta": "require"},
            "use delta='auto'",
        ),
    ],
)
def test_what_cannot_be_says_what_to_do(
    host_server: WeightSyncServer, options: dict[str, Any], word: str
) -> None:
    with Client(host_server.address, retry=RETRY) as client:
        before = client.status().models[0].newest_version
        with pytest.raises(ClientError, match=word):
            client.push(part(8, 0, 2), **options)
        assert client.status().models[0].newest_version == before
    until_none_open(host_server)


def test_a_box_of_another_dtype_is_refused(host_server: WeightSyncServer) -> None:
    wrong = ShardedTensor((4, 4), "F32", [((0, 0), np.zeros((4, 2), np.int32))])
    with pytest.raises(InvalidError, match="give boxes of its dtype"):
        push(host_server, {"x": wrong}, "h/1", 0, 2)
