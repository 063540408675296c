from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from tests.support.certificates import Authority
from weightsync_server.http import http_server
from weightsync_server.http.http_server import HttpEndpoint, HttpReply, HttpRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_MOST = 1000


class _Parts:
    """A stream to order."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = asyncio.Event()

    def __aiter__(self) -> _Parts:
        return self

    async def __anext__(self) -> bytes:
        part = await self.parts.get()
        if part is None:
            raise StopAsyncIteration
        return part

    async def aclose(self) -> None:
        self.closed.set()


class _Site:
    """An endpoint and what it was asked."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.asked: asyncio.Queue[HttpRequest] = asyncio.Queue()
        self.wait = asyncio.Event()
        self.wait.set()
        self.stream: _Parts | None = None
        self.endpoint = HttpEndpoint(
            self._answer, "127.0.0.1", 0, name="test", max_body=lambda _: _MOST
        )

    async def _answer(self, request: HttpRequest) -> HttpReply:
        self.requests.append(request)
        self.asked.put_nowait(request)
        await self.wait.wait()
        return HttpReply(200, request.body + b"!", headers=(("X-Here", "yes"),), stream=self.stream)

    async def ask(self, *parts: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.endpoint.port)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def site() -> AsyncIterator[_Site]:
    made = _Site()
    yield made
    made.wait.set()
    await made.endpoint.drain(5)


async def test_a_body_in_pieces(site: _Site) -> None:
    head = b"POST /a%20b?x=%31&y HTTP/1.1\r\nAuthorization: Bearer t\r\nCONTENT-length: 6\r\n\r\n"
    answer = await site.ask(head[:30], head[30:] + b"abc", b"def")
    (request,) = site.requests
    assert (request.method, request.path, request.query) == ("POST", "/a b", "x=%31&y")
    assert request.values("authorization") == ["Bearer t"]
    assert request.body == b"abcdef"
    assert request.peer.startswith("ipv4:127.0.0.1:")
    assert request.certificate == {}
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nX-Here: yes\r\n" in answer
    assert answer.endswith(b"\r\n\r\nabcdef!")


async def test_a_header_that_comes_twice_is_seen_twice(site: _Site) -> None:
    await site.ask(b"GET / HTTP/1.1\r\nAuthorization: a\r\nauthorization:b\r\n\r\n")
    assert site.requests[0].values("authorization") == ["a", "b"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Transfer-Encoding: chunked", b"411"),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"411"),
        (b"Content-Length: 5\r\nContent-Length: 6", b"400"),
        (b"Content-Length: -1", b"400"),
        (b"Content-Length: +5", b"400"),
        (b"Content-Length: 0x5", b"400"),
        (b"Content-Length: 1_0", b"400"),
        (b"Content-Length: 5, 5", b"400"),
        (b"Content-Length:", b"400"),
        (b"Content-Length: \xb2", b"400"),
        (b"Content-Length: 1001", b"413"),
        (b"Content-Length: " + b"9" * 5000, b"413"),
    ],
)
async def test_a_body_that_cannot_be_taken(site: _Site, headers: bytes, status: bytes) -> None:
    answer = await site.ask(b"POST / HTTP/1.1\r\n" + headers + b"\r\n\r\n")
    assert answer.split(b" ")[1] == status
    assert not site.requests


@pytest.mark.parametrize(
    "headers",
    [
        b"X-Here: a\r\n b",
        b"X-Here: a\r\n\tContent-Length: 5",
        b" X-Here: a",
        b"Content-Length : 5",
        b"Content-Length\t: 5",
        b"Authorization : Bearer x",
        b"Transfer-Encoding : chunked",
        b": a",
        b"nothing",
        b"X Here: a",
        b"X-Here\x00: a",
        b"X-Here: a\x00b",
        b"X-Here: a\nContent-Length: 5",
        b"X-Here: a\rContent-Length: 5",
        b"X-H\xe9re: a",
    ],
)
async def test_a_header_that_others_may_read_otherwise_is_refused(
    site: _Site, headers: bytes
) -> None:
    for more in (b"", b"\r\nHost: x"):
        answer = await site.ask(b"POST / HTTP/1.1\r\n" + headers + more + b"\r\n\r\n")
        assert answer.split(b" ")[1] == b"400", answer
        assert b"header" in answer
    assert not site.requests
    await site.ask(b"GET / HTTP/1.1\r\nX-Here:a\r\nY:\r\nZ:  b\tc \r\n\r\n")
    assert site.requests[0].headers == (("x-here", "a"), ("y", ""), ("z", "b\tc"))


@pytest.mark.parametrize(
    "line",
    [
        b"GET //x/a HTTP/1.1",
        b"GET ///a HTTP/1.1",
        b"GET /a /b HTTP/1.1",
        b"GET  /a HTTP/1.1",
        b" GET /a HTTP/1.1",
        b"GET /\ta HTTP/1.1",
        b"GET \x00/a HTTP/1.1",
        b"GET /a\x00 HTTP/1.1",
        b"GET /\xe9 HTTP/1.1",
        b"GET x:/a HTTP/1.1",
        b"GET http:///a HTTP/1.1",
        b"GET http://x y/a HTTP/1.1",
        b"GET /a#b HTTP/1.1",
        b"GET a HTTP/1.1",
        b"GET * HTTP/1.1",
        b"GET /a HTTP/1.1\nContent-Length: 5",
        b"GET /a HTTP/1.1 ",
        b"GET /a HTTP/9.9",
        b"GET /a http/1.1",
        b"GET /a",
        b"PRI * HTTP/2.0",
        b"CONNECT a:1 HTTP/1.1",
    ],
)
async def test_a_first_line_that_others_may_read_otherwise_is_for_no_path(
    site: _Site, line: bytes
) -> None:
    await site.ask(line + b"\r\n\r\n")
    assert [request.path for request in site.requests if request.path in ("/a", "/")] == []


async def test_a_target_may_name_the_host(site: _Site) -> None:
    for line in (b"GET http://x:1/a?b=/c?d HTTP/1.1", b"GET HTTPS://[::1]/a?b=/c?d HTTP/1.0"):
        await site.ask(line + b"\r\n\r\n")
    assert [request[1:3] for request in site.requests] == [("/a", "b=/c?d")] * 2


async def test_who_waits_to_be_told_sends_the_body_then(site: _Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.endpoint.port)
    writer.write(b"POST / HTTP/1.1\r\nExpect: 100-Continue\r\nContent-Length: 3\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"abc")
    assert (await reader.read()).endswith(b"\r\n\r\nabc!")
    writer.close()


async def test_who_sends_too_much_is_told(site: _Site) -> None:
    length = 16 << 20
    reader, writer = await asyncio.open_connection("127.0.0.1", site.endpoint.port)
    writer.write(f"POST / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
    writer.write(bytes(length))
    await writer.drain()
    assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_a_body_that_cannot_be_taken_is_refused_as_the_owner_says() -> None:
    def refuse(head: HttpRequest, status: int, sentence: str) -> HttpReply:
        return HttpReply(status, f"<{head.path}: {sentence}>".encode(), "application/x-ours")

    async def answer(_: HttpRequest) -> HttpReply:
        return HttpReply(200)

    endpoint = HttpEndpoint(answer, "127.0.0.1", 0, name="test", refuse=refuse)
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(b"POST /a HTTP/1.1\r\nContent-Length: 1\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nContent-Type: application/x-ours\r\n" in head
    assert body == b"</a: the body is too large; send at most 0 bytes>"
    writer.close()
    await endpoint.drain(5)


async def test_the_largest_body(site: _Site) -> None:
    head = f"POST / HTTP/1.1\r\nContent-Length: {_MOST}\r\n\r\n".encode()
    assert (await site.ask(head + b"a" * _MOST)).endswith(b"a!")


async def test_a_body_that_does_not_come_is_dropped(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 0.5)
    with contextlib.suppress(ConnectionError):
        assert await site.ask(b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcd") == b""
    assert not site.requests


async def test_an_answer_may_take_longer_than_a_request(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 0.2)
    site.wait.clear()
    asking = asyncio.ensure_future(site.ask(b"GET / HTTP/1.1\r\n\r\n"))
    await asyncio.sleep(0.5)
    assert not asking.done()
    site.wait.set()
    assert (await asking).endswith(b"!")


async def test_more_connections_than_there_may_be(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_MOST", 2)
    site.wait.clear()
    asking = [asyncio.ensure_future(site.ask(b"GET / HTTP/1.1\r\n\r\n")) for _ in range(2)]
    await site.asked.get()
    await site.asked.get()
    with contextlib.suppress(ConnectionError):
        assert await site.ask(b"GET / HTTP/1.1\r\n\r\n") == b""
    assert len(site.requests) == 2
    site.wait.set()
    assert all(answer.endswith(b"!") for answer in await asyncio.gather(*asking))
    assert (await site.ask(b"GET / HTTP/1.1\r\n\r\n")).endswith(b"!")


def _patient(
    site: _Site, folder: Path, monkeypatch: pytest.MonkeyPatch, *, encrypted: bool
) -> tuple[HttpEndpoint, ssl.SSLContext | None]:
    """Return an endpoint that waits longer than a test for who is silent, and what trusts it."""
    monkeypatch.setattr(http_server, "_REQUEST_S", 60.0)
    if not encrypted:
        return site.endpoint, None
    endpoint, authority = _encrypted(site, folder)
    return endpoint, ssl.create_default_context(cafile=authority.ca)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_silent_connections_keep_nobody_out(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, encrypted: bool
) -> None:
    monkeypatch.setattr(http_server, "_MOST", 3)
    endpoint, trusting = _patient(site, tmp_path, monkeypatch, encrypted=encrypted)
    site.wait.clear()
    asked = await asyncio.open_connection("localhost", endpoint.port, ssl=trusting)
    asked[1].write(b"GET /first HTTP/1.1\r\n\r\n")
    await site.asked.get()
    silent = [await asyncio.open_connection("localhost", endpoint.port) for _ in range(4)]
    for reader, _ in silent[:2]:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
    late = await asyncio.open_connection("localhost", endpoint.port, ssl=trusting)
    late[1].write(b"GET /late HTTP/1.1\r\n\r\n")
    await site.asked.get()
    site.wait.set()
    for reader, _ in (asked, late):
        assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"!")
    for _, one in (*silent, asked, late):
        one.close()
    await endpoint.drain(0)


@pytest.mark.parametrize("encrypted", [False, True], ids=["malformed", "tls"])
async def test_who_was_answered_and_stays_keeps_nobody_out(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, encrypted: bool
) -> None:
    monkeypatch.setattr(http_server, "_MOST", 2)
    endpoint, trusting = _patient(site, tmp_path, monkeypatch, encrypted=encrypted)
    head = b"GET / HTTP/1.1\r\n\r\n" if encrypted else b"GET / HTTP/1.1\r\nbad\r\n\r\n"
    staying = []
    for _ in range(2):
        sock = socket.create_connection(("localhost", endpoint.port), timeout=20)
        if trusting is not None:
            # It says nothing of the end, which TLS would be told of.
            sock = trusting.wrap_socket(
                sock, server_hostname="localhost", do_handshake_on_connect=False
            )
            await asyncio.to_thread(sock.do_handshake)
        staying.append(sock)
        await asyncio.to_thread(sock.sendall, head)
        status = b"HTTP/1.1 200" if encrypted else b"HTTP/1.1 400"
        assert (await asyncio.to_thread(sock.recv, 1000)).startswith(status)
    reader, writer = await asyncio.open_connection("localhost", endpoint.port, ssl=trusting)
    writer.write(b"GET /late HTTP/1.1\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"!")
    writer.close()
    for one in staying:
        one.close()
    await endpoint.drain(0)


async def test_a_drain_waits_for_answers_and_then_no_longer(site: _Site) -> None:
    site.wait.clear()
    asking = asyncio.ensure_future(site.ask(b"GET / HTTP/1.1\r\n\r\n"))
    await site.asked.get()
    draining = asyncio.ensure_future(site.endpoint.drain(30))
    await asyncio.sleep(0.05)
    with pytest.raises(ConnectionError):
        await site.ask(b"GET / HTTP/1.1\r\n\r\n")
    site.wait.set()
    assert (await asking).endswith(b"!")
    await draining


async def test_a_drain_ends_what_takes_too_long(site: _Site) -> None:
    site.wait.clear()
    asking = asyncio.ensure_future(site.ask(b"GET / HTTP/1.1\r\n\r\n"))
    await site.asked.get()
    await site.endpoint.drain(0.05)
    with contextlib.suppress(ConnectionError):
        assert await asking == b""


_ASK = b"POST / HTTP/1.1\r\n\r\n"


async def test_a_stream_goes_part_by_part(site: _Site) -> None:
    site.stream = stream = _Parts()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.endpoint.port)
    writer.write(_ASK)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked\r\n" in head
    assert b"Content-Length" not in head
    stream.parts.put_nowait(b"first")
    assert await reader.readexactly(10) == b"5\r\nfirst\r\n"
    stream.parts.put_nowait(b"")
    stream.parts.put_nowait(b"x" * 17)
    stream.parts.put_nowait(None)
    assert await reader.read() == b"11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n"
    await asyncio.wait_for(stream.closed.wait(), 20)
    writer.close()


async def test_http_1_0_gets_a_stream_as_it_is(site: _Site) -> None:
    site.stream = stream = _Parts()
    for part in (b"first", b"", b"x" * 17, None):
        stream.parts.put_nowait(part)
    head, _, body = (await site.ask(b"POST / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert b"Content-Length" not in head
    assert body == b"first" + b"x" * 17


async def test_a_stream_whose_reader_leaves_is_closed(site: _Site) -> None:
    site.stream = stream = _Parts()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.endpoint.port)
    # What comes after the request means nothing, and is no end.
    writer.write(_ASK + b"GET / HTTP/1.1\r\n\r\n")
    stream.parts.put_nowait(b"first")
    await reader.readuntil(b"first\r\n")
    assert not stream.closed.is_set()
    writer.close()
    await asyncio.wait_for(stream.closed.wait(), 20)


async def test_a_stream_that_nobody_reads_is_closed(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 0.3)
    site.stream = stream = _Parts()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.endpoint.port)
    writer.write(_ASK)
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket
    for _ in range(64):
        stream.parts.put_nowait(b"x" * (1 << 20))
    await asyncio.wait_for(stream.closed.wait(), 20)
    writer.transport.abort()


async def test_a_drain_ends_a_stream(site: _Site) -> None:
    site.stream = stream = _Parts()
    asking = asyncio.ensure_future(site.ask(_ASK))
    await site.asked.get()
    stream.parts.put_nowait(b"first")
    await site.endpoint.drain(0.2)
    assert stream.closed.is_set()
    with contextlib.suppress(ConnectionError):
        assert not (await asking).endswith(b"0\r\n\r\n"), "an end that is none"


async def test_a_head_has_no_stream(site: _Site) -> None:
    site.stream = stream = _Parts()
    answer = await site.ask(b"HEAD / HTTP/1.1\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert stream.closed.is_set()


def _encrypted(site: _Site, folder: Path) -> tuple[HttpEndpoint, Authority]:
    authority = Authority(folder)
    pair = authority.sign("server", "localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    return HttpEndpoint(site._answer, "127.0.0.1", 0, name="tls", tls=context), authority


async def test_a_handshake_is_a_connection_and_ends(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_MOST", 2)
    monkeypatch.setattr(http_server, "_REQUEST_S", 1.0)
    endpoint, authority = _encrypted(site, tmp_path)
    silent = [await asyncio.open_connection("localhost", endpoint.port) for _ in range(3)]
    for reader, _ in silent:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
    trusting = ssl.create_default_context(cafile=authority.ca)
    asking = await asyncio.open_connection("localhost", endpoint.port, ssl=trusting)
    asking[1].write(b"GET / HTTP/1.1\r\n\r\n")
    assert (await asking[0].read()).endswith(b"!")
    for _, one in (*silent, asking):
        one.close()
    await endpoint.drain(5)


async def test_a_stream_over_tls(site: _Site, tmp_path: Path) -> None:
    site.stream = stream = _Parts()
    endpoint, authority = _encrypted(site, tmp_path)
    trusting = ssl.create_default_context(cafile=authority.ca)
    reader, writer = await asyncio.open_connection("localhost", endpoint.port, ssl=trusting)
    writer.write(_ASK)
    for _ in range(3):
        stream.parts.put_nowait(b"x")
        async with asyncio.timeout(20):
            await reader.readuntil(b"1\r\nx\r\n")
    stream.parts.put_nowait(None)
    assert await reader.read() == b"0\r\n\r\n"
    writer.close()
    await endpoint.drain(5)
