"""A server hangs up on nobody for pinging often: neither on our clients nor on others'."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from weightsync.wire.grpc_channels import SERVER_KEEPALIVE, keepalive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: gRPC by itself hangs up at the third ping that comes too soon; this is one more.
PINGS = 4


async def test_a_server_takes_the_pings_of_a_quiet_stream() -> None:
    """The server's own pings, which keep a client from pinging at all, are left out."""

    async def stream(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b"begin"
        await asyncio.sleep(PINGS + 0.5)  # longer than so many pings take
        yield b"end"

    handler: Any = grpc.unary_stream_rpc_method_handler(stream)
    server = grpc.aio.server(
        options=[pair for pair in SERVER_KEEPALIVE if pair[0] != "grpc.keepalive_time_ms"]
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pinging = [("grpc.http2.max_pings_without_data", 0), *keepalive(1, 30)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", pinging) as channel:
        method: Any = channel.unary_stream("/s/m")
        assert [message async for message in method(b"")] == [b"begin", b"end"]
    await server.stop(0)
