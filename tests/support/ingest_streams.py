"""Streams to ingest processes, one message at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from weightsync.rpc_status import from_call
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from tests.support.weightsync_server import WeightSyncServer
    from tests.unit.server.versions.world import Shard
    from weightsync.errors import Reason
    from weightsync.v1 import weightsync_pb2_grpc

__all__ = ["CHUNK", "half_sent", "joined", "processes", "received", "refusal"]

CHUNK = 64 << 10


def processes(server: WeightSyncServer) -> int:
    """Return how many ingest processes listen."""
    return int(server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).ingest_processes)


def joined(push_id: str) -> pb.PushWeightsRequest:
    """Return the first message of a stream of a push."""
    return pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))


def half_sent(shard: Shard, push_id: str, rest: threading.Event) -> Iterator[pb.PushWeightsRequest]:
    """Yield one chunk, and the others when they are asked for."""
    yield joined(push_id)
    yield from shard.layout()
    first, *others = shard.chunks(CHUNK)
    yield first
    rest.wait(60)
    yield from others


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, Reason]:
    """Return how a call was refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    told = from_call(caught.value)
    assert told is not None, caught.value
    return caught.value.code(), told.reason


def received(stub: weightsync_pb2_grpc.WeightSyncStub, push_id: str) -> int:
    """Return how many bytes of a push are here."""
    answer = stub.GetPush(pb.GetPushRequest(push_id=push_id), timeout=5)
    return sum(shard.received_bytes for shard in answer.shards)
