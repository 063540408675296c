"""Deltas between the real client and the real server: chosen, cut, refused, and always right."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support import trained
from tests.support.server_fixtures import RETRY, Relay, every_kind, ingested
from tests.support.trained import Tensors, step
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, Fallback, PushKind, Retry, UnavailableError

model = partial(trained.model, count=6, elements=700_000)

# Six modules may share two cores, with other work beside.
pytestmark = pytest.mark.timeout(180)


def check(client: Client, version: int, tensors: Tensors) -> None:
    """Compare what the server gives back with the trainer's tensors, bit by bit."""
    seen = set()
    for pulled in client.tensors(version):
        mine = tensors[pulled.name].contiguous().reshape(-1).view(torch.uint8)
        assert bytes(pulled.data) == mine.numpy().tobytes(), pulled.name
        seen.add(pulled.name)
    assert seen == tensors.keys()


@every_kind
def test_ten_steps(client: Client) -> None:
    tensors = model()
    kinds = []
    for number in range(10):
        result = client.push(tensors, shard_bytes=3_000_000, metadata={"run_id": "a"})
        kinds.append(result.kind)
        if number:
            assert result.sent_bytes < 0.03 * result.dense_bytes
            told = client.get_version(result.version)
            assert told.content_digest == result.content_digest
            assert told.changed_fraction == pytest.approx(result.changed_fraction, rel=1e-6)
        if number % 3 == 0:
            check(client, result.version, tensors)
        step(tensors, number)
    assert kinds == [PushKind.FULL] + 9 * [PushKind.DELTA]


@ingested
def test_zstd_and_plain_make_the_same_version(client: Client) -> None:
    tensors = model()
    client.push(tensors)
    step(tensors, 1, 0.05)
    result = client.push(tensors, compress="always")
    assert result.kind is PushKind.DELTA
    check(client, result.version, tensors)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_cut_delta_is_taken_up(relay: Relay, server: WeightSyncServer, streams: int) -> None:
    tensors = model()
    with Client(relay.address, model="default", retry=RETRY) as client:
        client.push(tensors)
        step(tensors, 1, 0.4)
        passed = relay._passed
        relay.cut_after = [passed + 300_000, passed + 900_000]
        result = client.push(tensors, streams=streams, chunk_bytes=1 << 16)
        assert relay.cuts == 2
        assert result.kind is PushKind.DELTA
    with Client(server.address, model="default") as direct:
        check(direct, result.version, tensors)


def test_a_server_that_lost_the_base_gets_everything(folder: Path) -> None:
    server = WeightSyncServer(folder / "run", folder / "state", store="memory://")
    server.start()
    try:
        tensors = model()
        with Client(server.address, model="default", retry=RETRY) as client:
            client.push(tensors)
            server.kill()
            server.start()
            step(tensors, 1)
            result = client.push(tensors)
            assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.BASE_MISMATCH)
            check(client, result.version, tensors)
            step(tensors, 2)
            assert client.push(tensors).kind is PushKind.DELTA
    finally:
        server.stop()


def test_a_delta_outlives_a_crash_of_the_server(file_server: WeightSyncServer) -> None:
    tensors = model(count=20)
    reached = threading.Event()

    def progress(_done: int, _total: int) -> None:
        reached.set()

    with Client(file_server.address, model="default", retry=RETRY) as client:
        client.push(tensors)
        step(tensors, 1, 0.3)
        handle = client.push_async(tensors, chunk_bytes=1 << 14, on_progress=progress)
        assert reached.wait(60)
        file_server.kill()
        file_server.start()
        result = handle.committed.result(60)
        assert result.kind is PushKind.DELTA
        check(client, result.version, tensors)


def test_a_new_run_and_a_new_layout_begin_in_full(client: Client) -> None:
    tensors = model(count=2)
    client.push(tensors, metadata={"run_id": "a"})
    result = client.push(tensors, metadata={"run_id": "b"})
    assert result.fallback_reason is Fallback.NEW_RUN
    tensors["another"] = torch.ones(3)
    result = client.push(tensors, metadata={"run_id": "b"})
    assert result.fallback_reason is Fallback.LAYOUT_CHANGED
    check(client, result.version, tensors)


def test_the_same_content_as_delta_and_in_full_is_one_version(client: Client) -> None:
    tensors = model(count=2)
    client.push(tensors)
    step(tensors, 1)
    delta = client.push(tensors)
    full = client.push(tensors, version=delta.version, delta="never")
    assert (full.already, full.content_digest) == (True, delta.content_digest)


@every_kind
def test_two_clients_take_turns_on_one_model(server: WeightSyncServer) -> None:
    mine, theirs = model(1, count=2), model(2, count=2)
    with (
        Client(server.address, model="default", retry=RETRY) as first,
        Client(server.address, model="default", retry=RETRY) as second,
    ):
        for number in range(3):
            for client, tensors in ((first, mine), (second, theirs)):
                result = client.push(tensors)
                # A base need not be the newest version.
                assert result.kind is (PushKind.DELTA if number else PushKind.FULL)
                check(client, result.version, tensors)
                step(tensors, number)


def test_a_key_outlives_the_trainer_that_sent_a_delta(
    relay: Relay, server: WeightSyncServer
) -> None:
    tensors = model()

    def end(done: int, _total: int) -> None:
        if done > 300_000:
            relay.close()
            relay.cut_after = 100 * [0]

    with Client(relay.address, model="default", retry=Retry(2, 0.01, 0.02)) as client:
        client.push(tensors)
        step(tensors, 1, 0.4)
        with pytest.raises(UnavailableError):
            client.push(tensors, idempotency_key="outlives", chunk_bytes=1 << 16, on_progress=end)
    with Client(server.address, model="default", retry=RETRY) as restarted:
        assert len(restarted.status().models[0].pushes) == 1
        result = restarted.push(tensors, idempotency_key="outlives")
        assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.FIRST)
        check(restarted, result.version, tensors)
        assert restarted.push(tensors, idempotency_key="outlives").version == result.version


def test_a_checkpoint_that_the_server_holds_can_be_the_first_base(client: Client) -> None:
    tensors = model(count=2)
    with Client(client._link.address, model="default") as another:
        another.push(tensors)
    client.hold(tensors)
    step(tensors, 1)
    result = client.push(tensors)
    assert result.kind is PushKind.DELTA
    check(client, result.version, tensors)
