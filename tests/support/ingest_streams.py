"""Streams to ingest processes, one message at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from tests.support.weightsync_server import WeightSyncServer
    from tests.unit.server.world import Shard
    from weightsync.v1 import weightsync_pb2_grpc

__all__ = ["CHUNK", "half_sent", "joined", "processes", "received"]

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


def received(stub: weightsync_pb2_grpc.WeightSyncStub, push_id: str) -> int:
    """Return how many bytes of a push are here."""
    answer = stub.GetPush(pb.GetPushRequest(push_id=push_id), timeout=5)
    return sum(shard.received_bytes for shard in answer.shards)
