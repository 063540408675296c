"""Answers that are streams, read as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from weightsync_client.errors import from_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from weightsync_client.rpc.calls import Call

__all__ = ["read_stream", "read_stream_async"]

T = TypeVar("T")


def read_stream(sent: Any, call: Call[T], address: str) -> Generator[T, None, None]:
    """Yield what comes; however this is left, the call has ended then.

    Args:
        sent: The call under way.
        call: What was sent.
        address: Where to, for errors.

    Raises:
        ClientError: The call failed.
    """
    try:
        for message in sent:
            yield call.read(message)
    except grpc.RpcError as error:
        raise from_rpc(error, method=call.method, address=address) from None
    finally:
        sent.cancel()


async def read_stream_async(sent: Any, call: Call[T], address: str) -> AsyncGenerator[T, None]:
    """Do the same as `read_stream` on the event loop."""
    try:
        async for message in sent:
            yield call.read(message)
    except grpc.RpcError as error:
        raise from_rpc(error, method=call.method, address=address) from None
    finally:
        sent.cancel()
