"""The way from a gRPC server to the servicer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_server.ingest import read_message

if TYPE_CHECKING:
    from weightsync_server.service.servicer import WeightSyncServicer

__all__ = ["add_service"]


def add_service(servicer: WeightSyncServicer, server: grpc.aio.Server) -> None:
    """Serve every method as the generated code does, but read PushWeights without copies."""
    push = grpc.stream_unary_rpc_method_handler(
        servicer.PushWeights, read_message, pb.PushWeightsResponse.SerializeToString
    )
    name = pb.DESCRIPTOR.services_by_name["WeightSync"].full_name
    # Of two that know a method, gRPC takes the one that came first.
    first = grpc.method_handlers_generic_handler(name, {"PushWeights": push})
    server.add_generic_rpc_handlers((first,))
    weightsync_pb2_grpc.add_WeightSyncServicer_to_server(servicer, server)
