"""What a real gRPC server hands to the servicer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync.wire.named_methods import generic_only
from weightsync_server.ops.metrics import Metrics
from weightsync_server.push.messages import ChunkView
from weightsync_server.rpc import add_service
from weightsync_server.rpc.status_interceptor import GuardInterceptor, RpcMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Keeps(weightsync_pb2_grpc.WeightSyncServicer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def PushWeights(  # noqa: N802 - the name in the proto
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> Any:
        async for message in request_iterator:
            self.messages.append(message)
        return pb.PushWeightsResponse(version=7)


async def test_chunks_come_as_views_of_their_messages_and_the_rest_as_messages() -> None:
    join = pb.PushWeightsRequest(join=pb.JoinPush(push_id="p"))
    chunk = pb.PushWeightsRequest(chunk=pb.Chunk(shard=1, offset=2, data=b"abc"))
    servicer = Keeps()  # type: ignore[abstract] # the methods that are not called
    # As in the app: it wraps handlers, and must keep how they read.
    guard = GuardInterceptor(RpcMetrics(Metrics("m").registry), lambda: None)
    server = generic_only(grpc.aio.server(interceptors=[guard]))
    add_service(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = weightsync_pb2_grpc.WeightSyncStub(channel)
            reply = await stub.PushWeights(iter([join, chunk]))
    finally:
        await server.stop(None)
    first, second = servicer.messages
    assert reply.version == 7
    assert first == join
    assert isinstance(second, ChunkView)
    assert (second.shard, second.offset, bytes(second.data)) == (1, 2, b"abc")
