"""Pushes whose streams go through both ends of what an ingest process does, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ingest.connection import Connection
from weightsync_server.ingest.relay import RawMessage, Relay
from weightsync_server.push import ChunkView, PushService, RemoteStream
from weightsync_server.workers.runtime.mappings import Maps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from weightsync_server.push import Message

__all__ = ["DistantPushes"]


class DistantPushes(PushService):
    """Serves every stream as one that an ingest process has."""

    async def stream(
        self,
        requests: AsyncIterator[Message] | RemoteStream,
        deadline_s: float | None = None,
        who: str = "",
    ) -> pb.PushWeightsResponse:
        """Serve one stream over a connection, then tell its end over it as well."""
        assert not isinstance(requests, RemoteStream)
        there, here = socket.socketpair()
        there.setblocking(False)
        here.setblocking(False)
        connection, maps = Connection(here, _kill), Maps()
        cut = asyncio.create_task(connection.cut())
        relay = Relay(there, maps)
        relaying = asyncio.create_task(relay.run({"op": "call"}, _forwarded(requests)))
        try:
            await connection.open()
            serving = asyncio.create_task(super().stream(connection, deadline_s, who))
            cut.add_done_callback(lambda _: serving.cancel())
            await _first_of(serving, relaying)
            response = await serving
            connection.done({"code": 0}, response.SerializeToString())
            assert (await relaying).response == response.SerializeToString()
            return response
        except WeightSyncError:
            connection.done({"code": 1})
            await relaying
            raise
        finally:
            cut.cancel()
            relaying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([relaying])
            await connection.close()


def _kill() -> None:
    msg = "it was to let go by itself"
    raise AssertionError(msg)


async def _first_of(
    serving: asyncio.Task[pb.PushWeightsResponse], relaying: asyncio.Task[object]
) -> None:
    """Wait for the end of either; a caller who leaves takes the process's end along."""
    try:
        await asyncio.wait([serving, relaying], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        relaying.cancel()
        await asyncio.wait([serving])
        raise
    if relaying.done() and relaying.exception() is not None:
        # What reading the messages raised.
        await asyncio.wait([serving])
        relaying.result()


async def _forwarded(requests: AsyncIterator[Message]) -> AsyncIterator[ChunkView | RawMessage]:
    async for message in requests:
        yield message if isinstance(message, ChunkView) else RawMessage(message.SerializeToString())
