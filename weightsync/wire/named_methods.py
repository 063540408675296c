"""gRPC servers whose calls are all found by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

__all__ = ["generic_only"]


def generic_only(server: grpc.aio.Server) -> grpc.aio.Server:
    """Return the server, which is not told of registered methods; its generic handlers serve them.

    For each registered method grpcio 1.85 keeps a call that waits for a caller. When a path that is
    no text ends its accept loop, it frees these waiting calls and has its core write into them
    after that, by which a process was seen to end with SIGSEGV. Generated code adds both kinds.
    """
    server.add_registered_method_handlers = _nothing  # type: ignore[method-assign]  # as told above
    return server


def _nothing(
    service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
) -> None:
    """Leave them to the generic handlers."""
