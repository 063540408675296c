"""What an idempotency key finds on a real server, and what it refuses."""

from __future__ import annotations

import re
import urllib.request
from typing import TYPE_CHECKING

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
    serving,
)
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import from_rpc

if TYPE_CHECKING:
    from tests.support.weightsync_server import WeightSyncServer
    from weightsync.v1 import weightsync_pb2_grpc
    from weightsync_client import WeightSyncError

#: More than the ended pushes that a server remembers.
MANY = 257


def refusal(stub: weightsync_pb2_grpc.WeightSyncStub, **fields: object) -> WeightSyncError:
    with pytest.raises(grpc.RpcError) as caught:
        stub.BeginPush(begin(**fields), timeout=5)
    return from_rpc(caught.value, method="BeginPush", address="")


def received(server: WeightSyncServer) -> tuple[float, float]:
    """Return how many pushes the server has observed as received, and their seconds in all."""
    address = re.findall(r"metrics on (http://\S+)", server.log)[-1]
    with urllib.request.urlopen(address, timeout=5) as answer:
        text = answer.read().decode()
    found = dict(
        re.findall(r"^weightsync_receive_duration_seconds_(count|sum)\S* (\S+)", text, re.MULTILINE)
    )
    return float(found["count"]), float(found["sum"])


def test_a_key_finds_its_version_for_as_long_as_it_exists_and_no_longer() -> None:
    with serving("--retain-versions", str(2 * MANY), store="") as server:
        stub = server.stub
        first = stub.PushWeights(push_messages(one_shard(), idempotency_key="k"), timeout=10)
        for seed in range(MANY):
            stub.PushWeights(push_messages(one_shard(seed=seed)), timeout=10)
        again = stub.BeginPush(begin(idempotency_key="k"), timeout=5)
        assert (again.push_id, again.committed.version) == (first.push_id, FIRST)
        assert stub.CommitPush(pb.CommitPushRequest(push_id=first.push_id), timeout=5).already
        stub.DeleteVersion(pb.DeleteVersionRequest(model=MODEL, version=FIRST), timeout=5)
        last = stub.PushWeights(push_messages(one_shard(), idempotency_key="last"), timeout=10)
        stub.DeleteVersion(pb.DeleteVersionRequest(model=MODEL, version=last.version), timeout=5)
        for key in ("k", "last"):
            anew = stub.BeginPush(begin(idempotency_key=key), timeout=5)
            assert not anew.HasField("committed")
            assert anew.version > last.version
            stub.AbortPush(pb.AbortPushRequest(push_id=anew.push_id), timeout=5)


def test_a_key_of_something_else_is_refused_open_committed_and_after_a_restart() -> None:
    shard, told = one_shard(), {"step": "1"}
    size = len(shard.data)
    with serving(store="") as server:
        stub = server.stub
        opened = stub.BeginPush(
            begin(idempotency_key="k", metadata=told, total_bytes=size), timeout=5
        )
        other = refusal(stub, idempotency_key="k", metadata={"step": "2"}, total_bytes=size)
        assert other.reason is Reason.VERSION_CONFLICT
        assert "choose another key" in other.message
        # A client drops an open try with other bytes by its id, and begins again.
        other = refusal(stub, idempotency_key="k", metadata=told, total_bytes=size + 1)
        assert other.metadata == {"push_id": opened.push_id}
        joined = stub.BeginPush(begin(idempotency_key="k", metadata=told), timeout=5)
        assert joined.push_id == opened.push_id
        rest = [
            Message(join=pb.JoinPush(push_id=opened.push_id)),
            *shard.all(),
            Message(commit=pb.CommitPushRequest()),
        ]
        stub.PushWeights(iter(rest), timeout=10)
        for _ in range(2):
            stub = server.stub
            for fields in (
                {"metadata": {}, "total_bytes": size},
                {"metadata": {"step": "2"}, "total_bytes": size},
                {"metadata": told, "total_bytes": size + 1},
            ):
                other = refusal(stub, idempotency_key="k", **fields)
                assert other.reason is Reason.VERSION_CONFLICT
                assert other.metadata == {}
            fields = {"metadata": told, "total_bytes": size}
            same = stub.BeginPush(begin(idempotency_key="k", **fields), timeout=5)
            assert same.committed.version == FIRST
            assert model_status(stub).pushes == []
            server.kill()
            server.start()


def test_a_push_that_only_had_to_be_committed_after_a_restart_received_nothing() -> None:
    with serving(store="") as server:
        shard = one_shard(1 << 20)
        first = [Message(begin=begin(idempotency_key="k", shard_count=1)), *shard.all()]
        push_id = server.stub.PushWeights(iter(first), timeout=10).push_id
        durable = 0
        while durable < len(shard.data):
            told = server.stub.GetPush(pb.GetPushRequest(push_id=push_id), timeout=5)
            durable = told.shards[0].durable_bytes
        server.kill()
        server.start()
        server.stub.CommitPush(pb.CommitPushRequest(push_id=push_id), timeout=10)
        assert received(server) == (0, 0)
        server.stub.PushWeights(push_messages(one_shard(seed=1)), timeout=10)
        count, seconds = received(server)
        assert count == 1
        assert seconds < 10
