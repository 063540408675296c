"""A server hangs up on whoever pings it too often: our clients do not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from weightsync.wire.keepalive import CLIENT_KEEPALIVE, SERVER_KEEPALIVE, keepalive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LEAST_MS = dict(SERVER_KEEPALIVE)["grpc.http2.min_ping_interval_without_data_ms"]
#: It does so at the third ping that comes too soon; this is one more.
PINGS = 4


def test_a_client_pings_no_faster_than_a_server_takes() -> None:
    assert dict(CLIENT_KEEPALIVE)["grpc.keepalive_time_ms"] > LEAST_MS


async def test_a_server_takes_the_pings_of_a_quiet_stream() -> None:
    """The server's own pings, which keep a client from pinging at all, are left out."""
    silence_s = LEAST_MS // 1000 + 1

    async def stream(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b"begin"
        await asyncio.sleep((PINGS + 0.5) * silence_s)
        yield b"end"

    handler: Any = grpc.unary_stream_rpc_method_handler(stream)
    server = grpc.aio.server(
        options=[pair for pair in SERVER_KEEPALIVE if pair[0] != "grpc.keepalive_time_ms"]
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pinging = [("grpc.http2.max_pings_without_data", 0), *keepalive(silence_s, 5)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", pinging) as channel:
        method: Any = channel.unary_stream("/s/m")
        assert [message async for message in method(b"")] == [b"begin", b"end"]
    await server.stop(0)
