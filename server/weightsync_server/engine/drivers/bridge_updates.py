"""What a vLLM behind a bridge receives by itself, as its server sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never, TypeVar

import grpc

from weightsync.engine import WaitingUpdate
from weightsync.engine.v1 import engine_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

__all__ = ["BridgeUpdates"]

_T = TypeVar("_T")

#: Longest time in which the ranks send descriptors, and in which a trainer is answered, seconds.
_OFFER_S, _END_S = 90.0, 5.0


class BridgeUpdates:
    """Implements `weightsync.engine.UpdateFeed` over the bridge's socket.

    Args:
        stub: Of the bridge.
        server_id: Names this process in every call.
        refuse: Raises what a failed call means.
    """

    def __init__(
        self, stub: Any, server_id: str, refuse: Callable[[grpc.aio.AioRpcError], Never]
    ) -> None:
        self._stub = stub
        self._id = server_id
        self._refuse = refuse

    async def watch(self) -> AsyncGenerator[WaitingUpdate, None]:
        """Yield each update that waits; while nobody does this, the engine begins none."""
        call = self._stub.WatchUpdates(pb.WatchUpdatesRequest(server_id=self._id))
        try:
            async for answer in call:
                yield WaitingUpdate(answer.update_id, answer.backend, answer.label, answer.partial)
        except grpc.aio.AioRpcError as error:
            self._refuse(error)
        finally:
            call.cancel()

    async def offer(self, update_id: str, segment_socket: str, offer_id: str) -> list[str]:
        """Have an update's descriptors sent; the bridge looks for the socket beside its own."""
        del segment_socket
        request = pb.OfferUpdateRequest(update_id=update_id, offer_id=offer_id, server_id=self._id)
        return list((await self._call(self._stub.OfferUpdate(request, timeout=_OFFER_S))).files)

    async def end(self, update_id: str, version: int, error: str) -> None:
        """Answer the trainer that waits for an update."""
        request = pb.EndUpdateRequest(
            update_id=update_id, version=version, error=error, server_id=self._id
        )
        await self._call(self._stub.EndUpdate(request, timeout=_END_S))

    async def _call(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            self._refuse(error)
