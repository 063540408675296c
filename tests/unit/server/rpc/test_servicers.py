"""What a real gRPC server hands to the servicer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync.wire.grpc_channels import generic_only
from weightsync_server.auth import PUSH_WEIGHTS, Caller, Endpoint, Role
from weightsync_server.auth.admission import Admission
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.auth_interceptor import AuthorityInterceptor
from weightsync_server.ops.metrics import Metrics
from weightsync_server.push.messages import ChunkView
from weightsync_server.rpc import add_calls
from weightsync_server.rpc.status_interceptor import GuardInterceptor
from weightsync_server.usecases.guard import CallGuard, RpcMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def test_chunks_come_as_views_of_their_messages_and_the_rest_as_messages() -> None:
    join = pb.PushWeightsRequest(join=pb.JoinPush(push_id="p"))
    chunk = pb.PushWeightsRequest(chunk=pb.Chunk(shard=1, offset=2, data=b"abc"))
    messages: list[Any] = []

    async def push_weights(_: Caller, requests: AsyncIterator[Any]) -> pb.PushWeightsResponse:
        messages.extend([message async for message in requests])
        return pb.PushWeightsResponse(version=7)

    # As in the app: they wrap handlers, and must keep how they read.
    metrics = Metrics("m")
    admission = Admission(Endpoint("unix:x", Role.ADMIN), None, "m", Audit("m", metrics))
    guard = GuardInterceptor(CallGuard(RpcMetrics(metrics.registry), lambda: None))
    interceptors = [AuthorityInterceptor(admission), guard]
    server = generic_only(grpc.aio.server(interceptors=interceptors))
    add_calls({PUSH_WEIGHTS: push_weights}, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = weightsync_pb2_grpc.WeightSyncStub(channel)
            reply = await stub.PushWeights(iter([join, chunk]))
    finally:
        await server.stop(None)
    first, second = messages
    assert reply.version == 7
    assert first == join
    assert isinstance(second, ChunkView)
    assert (second.shard, second.offset, bytes(second.data)) == (1, 2, b"abc")
