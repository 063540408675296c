"""What gRPC calls to serve a method, read and replaced by interceptors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["behavior_of", "through", "with_behavior"]

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


async def through(
    interceptors: Sequence[grpc.aio.ServerInterceptor], handler: Any, method: str
) -> Any:
    """Return what serves calls that come in by another way than gRPC, behind interceptors.

    Args:
        interceptors: The first is outermost, as in a gRPC server.
        handler: What serves the method in the end.
        method: Its exact path.
    """
    details = _Details(method)
    for interceptor in reversed(interceptors):
        inner = handler

        async def give(_: grpc.HandlerCallDetails, inner: Any = inner) -> Any:
            return inner

        handler = await interceptor.intercept_service(give, details)
    return handler


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()
