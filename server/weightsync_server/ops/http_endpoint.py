"""The one HTTP server of the process, bounded in bytes and seconds, and the metrics on it."""

from __future__ import annotations

import asyncio
import re
import socket
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from prometheus_client.exposition import choose_encoder

from weightsync_server.ops.http_stream import ByteStream, send_stream, until_left

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Mapping

    from prometheus_client import CollectorRegistry

__all__ = ["HttpEndpoint", "HttpReply", "HttpRequest", "MetricsEndpoint"]

#: Longest head in bytes; seconds from a connection to the last byte of its request, TLS included,
#: and as many for its answer.
_MAX_REQUEST, _REQUEST_S = 16 << 10, 5.0
#: Connections at once; the next ones are dropped until one has ended.
_MOST = 512
#: RFC 9110, sections 5.6.2 and 5.5.
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(r"[\x00-\x08\n-\x1f\x7f]")


class HttpRequest(NamedTuple):
    """One request.

    Attributes:
        method: In capitals, as it came.
        path: Decoded, without the query.
        query: What follows the first question mark, as it came.
        headers: Names in lower case, and values, in order.
        body: At most as many bytes as the endpoint takes.
        peer: Address of the other end, in the form of gRPC.
        certificate: Of the client, as `ssl.SSLSocket.getpeercert` tells it; empty: none.
    """

    method: str
    path: str
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    peer: str = ""
    certificate: Mapping[str, Any] = MappingProxyType({})

    def values(self, name: str) -> list[str]:
        """Return the values of a header, whose name is in lower case."""
        return [value for key, value in self.headers if key == name]


class HttpReply(NamedTuple):
    """What is answered.

    Attributes:
        status: HTTP status.
        body: All of it.
        kind: Its Content-Type.
        headers: More headers.
        stream: In place of the body: its parts, as they come; closed when the client leaves.
    """

    status: int
    body: bytes = b""
    kind: str = "text/plain"
    headers: tuple[tuple[str, str], ...] = ()
    stream: ByteStream | None = None


def _plain(_: HttpRequest, status: HTTPStatus, sentence: str) -> HttpReply:
    return HttpReply(status, f"{sentence}\n".encode())


class HttpEndpoint:
    """Serves HTTP/1.1 from the event loop, one request a connection.

    A request gets 5 s to come and its answer 5 s to go, each part of a stream anew; between them
    `answer` takes what it needs. Where that may be long, a client that leaves cancels it: the end
    of what it sends, or of its connection, is that.

    Args:
        answer: Answers a request. What it raises ends the connection.
        host: Address to bind.
        port: TCP port; 0: any free one, see `port`.
        name: Of its task, for people.
        max_body: Most bytes of the body that follows a head; one with more is answered with 413.
        refuse: Answers a head whose body is not read, with a status and a sentence that says why.
        is_long: Whether a request is one whose answer may take long.
        tls: What connections are encrypted with; None: they are not.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(
        self,
        answer: Callable[[HttpRequest], Awaitable[HttpReply]],
        host: str,
        port: int,
        *,
        name: str,
        max_body: Callable[[HttpRequest], int] = lambda _: 0,
        refuse: Callable[[HttpRequest, HTTPStatus, str], HttpReply] = _plain,
        is_long: Callable[[HttpRequest], bool] = lambda _: False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._answer = answer
        self._is_long = is_long
        self._max_body = max_body
        self._refuse = refuse
        self._tls = tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host.strip("[]"), port), family=family, backlog=64)
        self.port: int = self._socket.getsockname()[1]
        self._clients: set[asyncio.Task[None]] = set()
        self._task = asyncio.get_running_loop().create_task(self._serve(), name=name)
        self._task.add_done_callback(lambda _: self._socket.close())

    def close(self) -> None:
        """Stop listening."""
        self._task.cancel()

    async def drain(self, grace_s: float) -> None:
        """Stop listening; requests under way get so many seconds to be answered, then they end."""
        self.close()
        clients = set(self._clients)
        if clients:
            await asyncio.wait(clients, timeout=grace_s)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _serve(self) -> None:
        # Serving only inside the block, which ends it: else a close that comes early is half one.
        seconds = _REQUEST_S if self._tls else None
        server = await asyncio.start_server(
            self._accept,
            sock=self._socket,
            limit=_MAX_REQUEST,
            ssl=self._tls,
            ssl_handshake_timeout=seconds,
            ssl_shutdown_timeout=seconds,
            start_serving=False,
        )
        async with server:
            await server.serve_forever()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= _MOST:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._client(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # One that sends or reads slowly, or not at all, is dropped; so is one that sends nonsense.
        try:
            async with asyncio.timeout(_REQUEST_S):
                request = await self._read(reader, writer)
            if isinstance(request, HttpReply):
                reply = request
            elif self._is_long(request):
                reply = await until_left(reader, self._answer(request))
            else:
                reply = await self._answer(request)
            without_body = isinstance(request, HttpRequest) and request.method == "HEAD"
            # So that a drain waits for all of it; with 0, TLS of asyncio stays paused when it has.
            writer.transport.set_write_buffer_limits(1)
            writer.write(_encoded(reply, without_body=without_body))
            if reply.stream is not None and without_body:
                await reply.stream.aclose()
            elif reply.stream is not None:
                await send_stream(reader, writer, reply.stream, _REQUEST_S)
            async with asyncio.timeout(_REQUEST_S):
                await writer.drain()
        except (TimeoutError, OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            writer.close()

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpRequest | HttpReply:
        """Return a request, or why it is not even looked at."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request = _parsed(head)._replace(
            peer=_peer(writer), certificate=writer.get_extra_info("peercert") or {}
        )
        if wrong := _malformed(head):
            return self._refuse(request, HTTPStatus.BAD_REQUEST, wrong)
        if request.values("transfer-encoding"):
            sentence = "send the body whole, with its Content-Length, not in chunks"
            return self._refuse(request, HTTPStatus.LENGTH_REQUIRED, sentence)
        lengths = set(request.values("content-length")) or {"0"}
        length = lengths.pop()
        if lengths or not (length.isascii() and length.isdecimal()):
            return self._refuse(
                request, HTTPStatus.BAD_REQUEST, "Content-Length must be one number"
            )
        most = self._max_body(request)
        if len(length) > len(str(most)) or int(length) > most:
            sentence = f"the body is too large; send at most {most} bytes"
            return self._refuse(request, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)
        return request._replace(body=await reader.readexactly(int(length)))


class MetricsEndpoint(HttpEndpoint):
    """Serves a registry over HTTP from the event loop.

    The gauges that `Metrics.track` adds are so read on the loop, where what they tell changes.

    Args:
        registry: What to serve.
        host: Address to bind; loopback unless the operator chose otherwise.
        port: TCP port; 0: any free one, see `port`.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        super().__init__(self._scrape, host, port, name="metrics")
        self._registry = registry

    async def _scrape(self, request: HttpRequest) -> HttpReply:
        if request.method not in ("GET", "HEAD"):
            return HttpReply(HTTPStatus.METHOD_NOT_ALLOWED, b"GET /metrics\n")
        if request.path not in ("/metrics", "/"):
            return HttpReply(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
        encode, kind = choose_encoder(", ".join(request.values("accept")).lower())
        return HttpReply(HTTPStatus.OK, encode(self._registry), kind)


def _parsed(head: str) -> HttpRequest:
    """Return what a head says; of one that is none what there is, which no path matches.

    Raises:
        ValueError: Its target is none.
    """
    first, *lines = head.split("\r\n")
    method, target, *_ = [*first.split(" "), "", ""]
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    headers = tuple((name.strip().lower(), value.strip()) for name, value in pairs)
    parts = urlsplit(target)
    return HttpRequest(method, unquote(parts.path), parts.query, headers)


def _malformed(head: str) -> str:
    """Return what is wrong with the headers of a request; empty: nothing.

    A proxy may read such a line otherwise than this does: RFC 9112, sections 2.2, 5 and 5.1.
    """
    for line in head.removesuffix("\r\n\r\n").split("\r\n")[1:]:
        if line.startswith((" ", "\t")):
            return "a header goes on in a second line; send it in one"
        name, colon, value = line.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name):
            return "a header needs a name of letters and a colon right behind it"
        if _CONTROL.search(value):
            return "the value of a header holds a control character; leave it out"
    return ""


def _peer(writer: asyncio.StreamWriter) -> str:
    host, port, *_ = writer.get_extra_info("peername") or ("", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _encoded(reply: HttpReply, *, without_body: bool) -> bytes:
    status = HTTPStatus(reply.status)
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {reply.kind}",
        "Transfer-Encoding: chunked" if reply.stream else f"Content-Length: {len(reply.body)}",
        *(f"{name}: {value}" for name, value in reply.headers),
        "Connection: close",
    ]
    body = b"" if without_body or reply.stream else reply.body
    return "\r\n".join([*lines, "", ""]).encode() + body
