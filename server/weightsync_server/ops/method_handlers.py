"""What gRPC calls to serve a method, read and replaced by interceptors."""

from __future__ import annotations

from typing import Any

import grpc

__all__ = ["behavior_of", "with_behavior"]

#: By whether requests and responses are streams.
_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def behavior_of(handler: grpc.RpcMethodHandler[Any, Any]) -> Any:
    """Return the function that serves a method, of whichever kind it is."""
    return (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )


def with_behavior(
    handler: grpc.RpcMethodHandler[Any, Any], behavior: Any
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind and messages that another function serves."""
    make: Any = _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: grpc.RpcMethodHandler[Any, Any] = make(
        behavior, handler.request_deserializer, handler.response_serializer
    )
    return made
