"""The one HTTP server of the process, bounded in bytes and seconds, and the metrics on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

from prometheus_client.exposition import choose_encoder

from weightsync.log_lines import event
from weightsync_server.http.known_hosts import KnownHosts

if TYPE_CHECKING:
    import ssl

    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)


_T = TypeVar("_T")

_END = b"0\r\n\r\n"
#: Bytes of what a client sends after its request that are thrown away at once.
_USELESS = 4096


class ByteStream(Protocol):
    """The parts of an answer."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """End what makes them."""


async def until_left(reader: asyncio.StreamReader, work: Awaitable[_T]) -> _T:
    """Return the result of `work`, which is cancelled if the client of `reader` leaves.

    What the client still sends is dropped. Raises EOFError when it has left and the work has ended.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_end(reader))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise EOFError
        return await doing
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _send(writer: asyncio.StreamWriter, parts: ByteStream, *, chunked: bool) -> None:
    async for part in parts:
        # An empty chunk would be the end.
        if part:
            chunk = b"%x\r\n%b\r\n" % (len(part), part) if chunked else part
            await _write(writer, chunk)
    if chunked:
        await _write(writer, _END)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(_REQUEST_S):
        await writer.drain()


async def _wait_end(reader: asyncio.StreamReader) -> None:
    while await reader.read(_USELESS):
        pass


#: Longest head in bytes; seconds for the handshake of TLS, from there to the last byte of a
#: request, and for its answer.
_MAX_REQUEST, _REQUEST_S = 16 << 10, 5.0
#: Connections at once, those in their handshake included: the buffers of each take 0.3 MB. For the
#: next one the one that has been silent longest is dropped, or, if all have asked, the next one.
_MOST = 512
#: Names that were refused of which each is logged once; of more, none is.
_MOST_NAMES = 16
#: Seconds until the next connection is let in where the process may open no more files.
_FULL_S = 0.1
#: RFC 9112, section 3: a path and a query, behind a host or not.
_FIRST_LINE = re.compile(
    r"([!-~]+) (?:(?i:https?)://[!-.0->@-~]+)?(/[!->@-~]*)(?:\?([!-~]*))? HTTP/(1\.[01])"
)
#: RFC 9110, sections 5.6.2 and 5.5.
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(r"[\x00-\x08\n-\x1f\x7f]")


class HttpRequest(NamedTuple):
    """One request.

    `path` is decoded, without the query, which is what follows the first question mark, as it was
    sent. Names of `headers` are in lower case. `peer` is in the form of gRPC, and `certificate` as
    `ssl.SSLSocket.getpeercert` tells it; empty: none. `version` of HTTP is 1.0 or 1.1.
    """

    method: str
    path: str
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    peer: str = ""
    certificate: Mapping[str, Any] = MappingProxyType({})
    version: str = "1.1"

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class HttpReply(NamedTuple):
    """An answer; `stream`, in place of the body, is closed when the client leaves."""

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
    `answer` takes what it needs. Where that may be long (`is_long`), a client that leaves cancels
    it. What `answer` raises ends the connection. A body of more than `max_body` bytes is answered
    with 413, and `refuse` answers a head whose body is not read. A `port` of 0 is any free one.

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
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._clients: set[asyncio.Task[None]] = set()
        #: Those whose request has not come, or that were answered and stay; the oldest first.
        self._silent: dict[asyncio.Task[None], None] = {}
        self._task = asyncio.get_running_loop().create_task(self._serve(), name=name)
        self._task.add_done_callback(lambda _: self._socket.close())

    def close(self) -> None:
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
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(_FULL_S)
                continue
            if len(self._clients) >= _MOST and self._silent:
                oldest = next(iter(self._silent))
                oldest.cancel()
                self._forget(oldest)
            if len(self._clients) < _MOST:
                task = loop.create_task(self._client(connection))
                self._clients.add(task)
                self._silent[task] = None
                task.add_done_callback(self._forget)
            else:
                connection.close()
            # Accepting what waits already gives nobody else a turn.
            await asyncio.sleep(0)

    def _note_silent(self, *, silent: bool) -> None:
        if task := asyncio.current_task():
            self._silent.pop(task, None)
            if silent and task in self._clients:
                self._silent[task] = None

    def _forget(self, client: asyncio.Task[None]) -> None:
        self._clients.discard(client)
        self._silent.pop(client, None)

    async def _client(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_REQUEST)
        protocol = asyncio.StreamReaderProtocol(reader)
        seconds = _REQUEST_S if self._tls else None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )
        except OSError:
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        # One that sends or reads slowly, or not at all, is dropped; so is one that sends nonsense.
        try:
            async with asyncio.timeout(_REQUEST_S):
                request = await self._read(reader, writer)
            self._note_silent(silent=False)
            if isinstance(request, HttpReply):
                reply = request
            elif self._is_long(request):
                reply = await until_left(reader, self._answer(request))
            else:
                reply = await self._answer(request)
            without_body = isinstance(request, HttpRequest) and request.method == "HEAD"
            chunked = isinstance(request, HttpReply) or request.version != "1.0"
            # So that a drain waits for all of it; with 0, TLS of asyncio stays paused when it has.
            writer.transport.set_write_buffer_limits(1)
            writer.write(_encoded(reply, without_body=without_body, chunked=chunked))
            if reply.stream is not None:
                try:
                    if not without_body:
                        await until_left(reader, _send(writer, reply.stream, chunked=chunked))
                finally:
                    await reply.stream.aclose()
            async with asyncio.timeout(_REQUEST_S):
                await writer.drain()
                # Answered: whoever only stays now gives way as one that says nothing.
                self._note_silent(silent=True)
                if isinstance(request, HttpReply):
                    # Closed before the body has come, its sender sees a reset and no answer.
                    if writer.can_write_eof():
                        writer.write_eof()
                    await _wait_end(reader)
        except (TimeoutError, OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            writer.transport.abort()
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()
        # With TLS it is there until its client says that it has heard of that.
        try:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        except asyncio.CancelledError:
            writer.transport.abort()
            raise

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpRequest | HttpReply:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request = _parsed(head)._replace(
            peer=_peer(writer), certificate=writer.get_extra_info("peercert") or {}
        )
        if wrong := _malformed(head):
            return self._refuse(request, HTTPStatus.BAD_REQUEST, wrong)
        if request.values("transfer-encoding"):
            sentence = "send the body in one piece, with its Content-Length, not in chunks"
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
        if (
            request.version != "1.0"
            and int(length)
            and "100-continue" in map(str.lower, request.values("expect"))
        ):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return request._replace(body=await reader.readexactly(int(length)))


class MetricsEndpoint(HttpEndpoint):
    """Serves a registry over HTTP from the event loop, on which the gauges' values change.

    A scrape by a name that is not among the `hosts` is refused, and logged once for each name, for
    Prometheus does not show the sentence that it is answered.
    """

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, hosts: KnownHosts | None = None
    ) -> None:
        super().__init__(self._scrape, host, port, name="metrics")
        self._registry = registry
        self._hosts = hosts or KnownHosts()
        self._refused: set[str] = set()

    async def _scrape(self, request: HttpRequest) -> HttpReply:
        if name := self._hosts.unknown(request.values("host")):
            return self._refusal(name)
        if request.method not in ("GET", "HEAD"):
            return HttpReply(HTTPStatus.METHOD_NOT_ALLOWED, b"GET /metrics\n")
        if request.path not in ("/metrics", "/"):
            return HttpReply(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
        encode, kind = choose_encoder(", ".join(request.values("accept")).lower())
        return HttpReply(HTTPStatus.OK, encode(self._registry), kind)

    def _refusal(self, name: str) -> HttpReply:
        if name not in self._refused and len(self._refused) < _MOST_NAMES:
            self._refused.add(name)
            logger.warning(
                "scrape the metrics by an IP address, or start this server with --host-names NAME "
                "if %r is its name: a request for /metrics by that name was refused",
                name,
                extra=event("metrics.refused"),
            )
        sentence = (
            f"ask for the metrics by an IP address or as localhost, not as {name!r}; if that is a "
            "name of this server, start it with --host-names NAME"
        )
        return HttpReply(HTTPStatus.FORBIDDEN, f"{sentence}\n".encode())


def _parsed(head: str) -> HttpRequest:
    """Return what a head says; one whose first line others may read otherwise has no path."""
    first, *lines = head.split("\r\n")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    headers = tuple((name.strip().lower(), value.strip()) for name, value in pairs)
    found = _FIRST_LINE.fullmatch(first)
    if found is None:
        return HttpRequest(first.partition(" ")[0], "", "", headers)
    method, path, query, version = found.groups("")
    return HttpRequest(method, unquote(path), query, headers, version=version)


def _malformed(head: str) -> str:
    """Return what is wrong with the headers of a request; empty: nothing.

    A proxy may read such a line otherwise than this does: RFC 9112, sections 2.2, 5 and 5.1.
    """
    for line in head.removesuffix("\r\n\r\n").split("\r\n")[1:]:
        if line.startswith((" ", "\t")):
            return "send each header on one line: one continues on a second line"
        name, colon, value = line.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name):
            return "a header needs a name of letters directly followed by a colon"
        if _CONTROL.search(value):
            return "the value of a header holds a control character; leave it out"
    return ""


def _peer(writer: asyncio.StreamWriter) -> str:
    host, port, *_ = writer.get_extra_info("peername") or ("", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _encoded(reply: HttpReply, *, without_body: bool, chunked: bool) -> bytes:
    status = HTTPStatus(reply.status)
    marked = ["Transfer-Encoding: chunked"] if chunked else []
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {reply.kind}",
        *(marked if reply.stream else [f"Content-Length: {len(reply.body)}"]),
        *(f"{name}: {value}" for name, value in reply.headers),
        "Connection: close",
    ]
    body = b"" if without_body or reply.stream else reply.body
    return "\r\n".join([*lines, "", ""]).encode() + body
