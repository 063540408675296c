"""Several processes push some tensors of a version to a real server; the others stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.server_fixtures import RETRY
from tests.support.weightsync_server import WeightSyncServer, short_server
from weightsync_client import Client, ClientError, PushResult, Reason, ShardedTensor, TransferPath
from weightsync_client.types import PushKind

ROWS, COLUMNS, WRITERS = 64, 96, 4

State = dict[str, NDArray[np.float32]]


@pytest.fixture(name="roomy_server", scope="module")
def _roomy_server() -> Iterator[WeightSyncServer]:
    with short_server(flags=("--same-host", "--slots", "3")) as server:
        yield server


@pytest.fixture(name="clients")
def _clients(request: pytest.FixtureRequest) -> Iterator[list[Client]]:
    server = request.getfixturevalue("roomy_server")
    with ExitStack() as stack:
        yield [stack.enter_context(Client(server.address, retry=RETRY)) for _ in range(WRITERS)]


def state(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {f"layer.{at}": rng.random((ROWS, COLUMNS), np.float32) for at in range(4)}


def strips(whole: State, names: Sequence[str], writer: int) -> dict[str, Any]:
    each = ROWS // WRITERS
    return {
        name: ShardedTensor(
            whole[name].shape,
            "F32",
            [((writer * each, 0), whole[name][writer * each : (writer + 1) * each])],
        )
        for name in names
    }


def together(
    clients: Sequence[Client], sources: Sequence[dict[str, Any]], key: str, **options: Any
) -> list[Any]:
    """Push from as many threads; return results and errors."""

    def one(writer: int) -> Any:
        named: dict[str, Any] = {"idempotency_key": key, "writers": WRITERS, "writer": writer}
        try:
            return clients[writer].push(sources[writer], **named, **options)
        except ClientError as error:
            return error

    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(one, range(WRITERS)))


def whole_digest(server: WeightSyncServer, content: State) -> str:
    with Client(server.address, retry=RETRY) as client:
        return client.push(content, delta="never").content_digest


@pytest.mark.parametrize("same_host", ["auto", "never"])
def test_the_last_version_is_the_base_again_and_again(
    roomy_server: WeightSyncServer, clients: list[Client], same_host: str
) -> None:
    content = state(1)
    every, key = list(content), f"chain/{same_host}"
    results = together(clients, [strips(content, every, w) for w in range(WRITERS)], f"{key}/0")
    for step in range(1, 4):
        before: PushResult = results[0]
        names = every[step - 1 : step + 1]
        content = content | {name: state(10 + step)[name] for name in names}
        sources = [strips(content, names, writer) for writer in range(WRITERS)]
        options = {"partial": True, "same_host": same_host}
        results = together(clients, sources, f"{key}/{step}", **options)
        for result in results:
            assert isinstance(result, PushResult), result
            assert (result.kind, result.base_version) == (PushKind.DELTA, before.version)
            assert result.way is (
                TransferPath.SAME_HOST if same_host == "auto" else TransferPath.STREAM
            )
        assert sum(result.sent_bytes for result in results) == 2 * ROWS * COLUMNS * 4
    assert results[0].content_digest == whole_digest(roomy_server, content)
    # It is read from what the store keeps of it as well.
    with Client(roomy_server.address, retry=RETRY) as client:
        for tensor in client.tensors(results[0].version):
            assert np.array_equal(np.asarray(tensor.torch()), content[tensor.name])


def test_whoever_names_another_base_is_named_to_all(
    roomy_server: WeightSyncServer, clients: list[Client]
) -> None:
    content = state(2)
    every = list(content)
    together(clients, [strips(content, every, w) for w in range(WRITERS)], "other/0")
    # One that has pushed something else meanwhile, as no rank should.
    clients[2].push(state(3), delta="never")
    sources = [strips(state(4), every[:1], writer) for writer in range(WRITERS)]
    errors = together(clients, sources, "other/1", partial=True)
    for error in errors:
        assert isinstance(error, ClientError), error
        assert error.reason is Reason.LAYOUT_INVALID
        assert "all writers of a push name one base" in str(error)
        assert error.metadata["writer"] in str(error)
    base = clients[0].status().models[0].newest_version
    # They name one, and go on.
    results = together(clients, sources, "other/2", partial=True, base=base)
    assert {result.base_version for result in results} == {base}
    content = state(3) | {every[0]: state(4)[every[0]]}
    assert results[0].content_digest == whole_digest(roomy_server, content)


def test_a_snapshot_and_a_part_do_not_mix(
    roomy_server: WeightSyncServer, clients: list[Client]
) -> None:
    content = state(5)
    every = list(content)
    for step in range(2):
        content["layer.0"] = content["layer.0"] + 1
        sources = [strips(content, every, writer) for writer in range(WRITERS)]
        together(clients, sources, f"mixed/{step}")
    content["layer.1"] = content["layer.1"] + 1
    sources = [strips(content, every[1:2], writer) for writer in range(WRITERS)]
    together(clients, sources, "mixed/2", partial=True)
    # What each keeps of the step before the part is no base of this one's bytes.
    content["layer.2"] = content["layer.2"] + 1
    sources = [strips(content, every, writer) for writer in range(WRITERS)]
    results = together(clients, sources, "mixed/3")
    assert results[0].content_digest == whole_digest(roomy_server, content)
