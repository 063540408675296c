"""Two servers on one store: neither takes, overwrites or removes what is pushed to the other."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.bounds import (
    FIRST,
    MODEL,
    Message,
    begin,
    model_status,
    one_shard,
    push_messages,
    within,
)
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import from_rpc

HALF = 1 << 19
SHARD = one_shard(2 * HALF)


class Pair:
    """Two servers with states of their own."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.one, self.other = (
            WeightSyncServer(
                folder / name,
                folder / f"{name}-state",
                store=self.store.as_uri(),
                flags=("--push-resume-timeout-s", "60" if name == "one" else "0.5"),
            )
            for name in ("one", "other")
        )

    @property
    def versions(self) -> list[str]:
        return sorted(path.name for path in (self.store / MODEL).glob("v*"))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="wss") as folder:
        pair = Pair(Path(folder))
        try:
            yield pair
        finally:
            for server in (pair.one, pair.other):
                server.stop()


def half(server: WeightSyncServer) -> str:
    """Leave a push of which half is here, and durable after a restart."""
    messages = [
        Message(begin=begin(idempotency_key="k", shard_count=1)),
        *SHARD.layout(),
        *SHARD.chunks(HALF)[:1],
    ]
    return server.stub.PushWeights(iter(messages), timeout=10).push_id


def goes_on(server: WeightSyncServer, push_id: str) -> None:
    joined = server.stub.BeginPush(begin(idempotency_key="k", shard_count=1), timeout=10)
    assert joined.push_id == push_id
    at = joined.shards[0].received_bytes if joined.shards else 0
    rest = [
        Message(join=pb.JoinPush(push_id=push_id)),
        *(SHARD.layout() if not joined.shards else []),
        *SHARD.chunks(HALF, at),
        Message(commit=pb.CommitPushRequest()),
    ]
    assert server.stub.PushWeights(iter(rest), timeout=10).commit.version == FIRST
    request = pb.PullWeightsRequest(model=MODEL, version=FIRST)
    pulled = server.stub.PullWeights(request, timeout=10)
    assert b"".join(message.chunk.data for message in pulled) == SHARD.data


@pytest.mark.parametrize("alive", [True, False])
def test_a_push_to_one_server_is_left_alone_by_the_other(pair: Pair, alive: bool) -> None:
    push_id = half(pair.one.start())
    if not alive:
        pair.one.kill()
    pair.other.start()
    assert model_status(pair.other.stub).pushes == []
    with pytest.raises(grpc.RpcError) as caught:
        pair.other.stub.GetPush(pb.GetPushRequest(push_id=push_id), timeout=5)
    error = from_rpc(caught.value, method="GetPush", address="")
    assert error.reason is Reason.PUSH_UNKNOWN
    # It would have been dropped by now as idle.
    time.sleep(1)
    assert pair.versions == [f"v{FIRST}"]
    if not alive:
        pair.one.start()
    goes_on(pair.one, push_id)


def test_the_same_number_is_refused_before_anything_is_overwritten(pair: Pair) -> None:
    push_id = half(pair.one.start())
    stub = pair.other.start().stub
    # Open, then committed: the other server knows of neither.
    for state in ("open", "committed"):
        if state == "committed":
            goes_on(pair.one, push_id)
        with pytest.raises(grpc.RpcError) as caught:
            stub.PushWeights(push_messages(one_shard(seed=1), version=FIRST), timeout=10)
        error = from_rpc(caught.value, method="PushWeights", address="")
        assert error.reason is Reason.VERSION_CONFLICT
        assert "another server" in error.message
        assert pair.versions == [f"v{FIRST}"]
    stub.PushWeights(push_messages(one_shard(seed=1), version=FIRST + 1), timeout=10)


def test_a_push_of_a_server_that_is_gone_is_removed_after_a_day(pair: Pair) -> None:
    half(pair.one.start())
    pair.one.kill()
    folder = pair.store / MODEL / f"v{FIRST}"
    for path in (*folder.iterdir(), folder):
        os.utime(path, (0, time.time() - 2 * 86_400))
    pair.other.start()
    within(5, lambda: pair.versions == [])


def test_an_identity_that_is_damaged_costs_open_pushes_only(pair: Pair) -> None:
    half(pair.one.start())
    pair.one.kill()
    (pair.one.state_dir / "identity.json").write_bytes(b"{")
    pair.one.start()
    assert "identity.json is damaged" in pair.one.log
    assert model_status(pair.one.stub).pushes == []
    later = push_messages(SHARD, version=FIRST + 1)
    assert pair.one.stub.PushWeights(later, timeout=10).commit.version == FIRST + 1
