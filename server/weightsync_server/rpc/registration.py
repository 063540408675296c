"""The way from a gRPC server to the servicer."""

from __future__ import annotations

import grpc

from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_server.push import read_message

__all__ = ["add_service"]


def add_service(servicer: weightsync_pb2_grpc.WeightSyncServicer, server: grpc.aio.Server) -> None:
    """Serve every method as the generated code does, but read PushWeights without copies.

    Args:
        servicer: Has the methods.
        server: A `generic_only` one: it would prefer the generated handler of a registered method.
    """
    push = grpc.stream_unary_rpc_method_handler(
        servicer.PushWeights, read_message, pb.PushWeightsResponse.SerializeToString
    )
    name = pb.DESCRIPTOR.services_by_name["WeightSync"].full_name
    # Of two generic handlers that have a method, gRPC takes the earlier one.
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {"PushWeights": push}),)
    )
    weightsync_pb2_grpc.add_WeightSyncServicer_to_server(servicer, server)
