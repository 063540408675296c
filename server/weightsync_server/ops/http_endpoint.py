"""The one HTTP server of the process, bounded in bytes and seconds: it serves the metrics."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MetricsEndpoint"]

#: Longest request in bytes, and seconds from its connection to the last byte of its answer.
_MAX_REQUEST, _REQUEST_S = 16 << 10, 5.0


class MetricsEndpoint:
    """Serves a registry over HTTP from the event loop; a request gets 5 s in all.

    The gauges that `Metrics.track` adds are so read on the loop, where what they tell changes.

    Args:
        registry: What to serve.
        host: Address to bind; loopback unless the operator chose otherwise.
        port: TCP port; 0: any free one, see `port`.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._registry = registry
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host.strip("[]"), port), family=family, backlog=64)
        self.port: int = self._socket.getsockname()[1]
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="metrics")
        self._task.add_done_callback(lambda _: self._socket.close())

    def close(self) -> None:
        """Stop serving."""
        self._task.cancel()

    async def _serve(self) -> None:
        # Serving only inside the block, which ends it: else a close that comes early is half one.
        server = await asyncio.start_server(
            self._client, sock=self._socket, limit=_MAX_REQUEST, start_serving=False
        )
        async with server:
            await server.serve_forever()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # One that sends or reads slowly, or not at all, is dropped; so is one that sends nonsense.
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.transport.set_write_buffer_limits(0)
                writer.write(self._answer(head.decode("latin-1")))
                await writer.drain()
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            writer.close()

    def _answer(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, target, *_ = [*request.split(" "), "", ""]
        headers = dict(line.lower().split(":", 1) for line in lines if ":" in line)
        status, kind, body = "404 Not Found", "text/plain", b"metrics are at /metrics\n"
        if method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", b"GET /metrics\n"
        elif target.partition("?")[0] in ("/metrics", "/"):
            encode, kind = choose_encoder(headers.get("accept", ""))
            status, body = "200 OK", encode(self._registry)
        answer = (
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return answer.encode() + (b"" if method == "HEAD" else body)
