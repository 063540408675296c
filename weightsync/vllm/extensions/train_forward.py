"""Requests for the trainer that come to vLLM's port, passed on to weightsync-server.

The caller's Authorization goes on, and nothing of this process is added but where the request came
from, which has the server ask for a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import Reason
from weightsync.vllm.bridge.extension_points import AsgiApp
from weightsync.vllm.bridge.live_versions import LiveVersions
from weightsync.vllm.bridge.readiness_gate import send_json

if TYPE_CHECKING:
    from weightsync.vllm.env import EngineSettings


_CONNECT_S = 5.0


class UpstreamError(Exception):
    """The server did not answer, or its answer broke off; the message says why."""


class Upstream(NamedTuple):
    """Where the server is; an empty `ca`, a PEM file of authorities, means those of this host."""

    url: str
    ca: str = ""

    @contextlib.asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        silence_s: float,
    ) -> AsyncIterator[Any]:
        """Yield the answer as aiohttp has it; leaving the block ends it.

        `path` includes the query, and `headers` are all but those that HTTP needs. `silence_s` is
        the longest time without a byte of the answer. Raises UpstreamError if the server does not
        answer, or not to the end.
        """
        import aiohttp
        from yarl import URL

        limits = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=silence_s)
        try:
            # One a request: requests are few, and none finds a connection of another.
            async with (
                aiohttp.ClientSession(auto_decompress=False, timeout=limits) as session,
                session.request(
                    method,
                    URL(self.url + path, encoded=True),
                    headers=headers,
                    data=body,
                    ssl=self._context(),
                    allow_redirects=False,
                ) as answer,
            ):
                yield answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamError(str(error) or type(error).__name__) from error

    def _context(self) -> ssl.SSLContext | bool:
        # Read for each request, so that the file may be replaced.
        return ssl.create_default_context(cafile=self.ca) if self.ca else True


#: Seconds that the server may be silent, by path. A stream has a sign of life every 10 s; a
#: checkpoint waits for the job that runs.
_SILENCE_S = {
    "/v1/weightsync/train": 60.0,
    "/v1/weightsync/train/status": 60.0,
    "/v1/weightsync/train/cancel": 60.0,
    "/v1/weightsync/checkpoint": 86400.0,
}
#: Bytes of a body, as the server takes them.
_MOST_BYTES = 1 << 20
_BODY_S = 30.0
#: Requests at once to each path: those that wait leave room to ask how things stand, and to cancel.
_MOST = 64

_REQUEST_HEADERS = frozenset({b"authorization", b"content-type", b"accept", b"origin"})
#: Where vLLM wants its own key in Authorization, the server's token is in this header.
_TOKEN = b"x-weightsync-token"
#: Those of HTTP's connection stay where they are.
_ANSWER_HEADERS = frozenset(
    {"content-type", "cache-control", "x-accel-buffering", "retry-after", "www-authenticate"}
    | {"allow"}
)
_NO_UPSTREAM = (
    "this vLLM does not know where its weightsync-server is; set WEIGHTSYNC_HTTP to its --http "
    "address, such as http://127.0.0.1:8551, in vLLM's environment"
)


class TrainForward:
    """ASGI middleware that passes requests for the trainer on, in every state of the engine.

    Without an `upstream` it is not known where they go.
    """

    def __init__(self) -> None:
        self.upstream: Upstream | None = None
        self._running = dict.fromkeys(_SILENCE_S, 0)

    def start(self, llm: Any, live: LiveVersions, settings: EngineSettings) -> None:
        del llm, live
        if settings.server_url:
            self.upstream = Upstream(settings.server_url, settings.server_ca)

    def wrap(self, app: AsgiApp) -> AsgiApp:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
            if scope["type"] != "http" or path not in _SILENCE_S:
                await app(scope, receive, send)
            elif self.upstream is None:
                await _refuse(send, 501, Reason.NOT_SUPPORTED, _NO_UPSTREAM)
            elif self._running[path] >= _MOST:
                sentence = f"send this request later: {_MOST} to {path} are running"
                await _refuse(send, 503, Reason.LIMIT_EXCEEDED, sentence)
            else:
                self._running[path] += 1
                try:
                    await _Exchange(self.upstream, path, scope, send).run(receive)
                finally:
                    self._running[path] -= 1

        return answer


class _Exchange:
    """One request and its answer; `path` is without what vLLM is mounted below."""

    def __init__(self, upstream: Upstream, path: str, scope: Any, send: Any) -> None:
        self._upstream = upstream
        self._path = path
        self._scope = scope
        self._send = send
        self._begun = self._streams = False

    async def run(self, receive: Any) -> None:
        """Return when it is over: answered, or left by its sender, which ends it at the server."""
        try:
            async with asyncio.timeout(_BODY_S):
                body = await _body(receive)
        except TimeoutError:
            sentence = f"the body did not arrive within {_BODY_S:g} s; send it again"
            await _refuse(self._send, 408, Reason.DEADLINE_EXCEEDED, sentence)
            return
        if body is None:
            return
        if len(body) > _MOST_BYTES:
            sentence = f"the body is too large; send at most {_MOST_BYTES} bytes"
            await _refuse(self._send, 413, Reason.REQUEST_INVALID, sentence)
            return
        answering = asyncio.ensure_future(self._answer(body))
        leaving = asyncio.ensure_future(_wait_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, body: bytes) -> None:
        query = self._scope["query_string"].decode("latin-1")
        path = f"{self._path}?{query}" if query else self._path
        method, silence_s = self._scope["method"], _SILENCE_S[self._path]
        headers = _request_headers(self._scope)
        try:
            async with self._upstream.ask(method, path, headers, body, silence_s) as answer:
                await self._pass(answer)
        except UpstreamError as error:
            await self._fail(str(error))

    async def _pass(self, answer: Any) -> None:
        self._streams = answer.content_type == "text/event-stream"
        if not self._streams:
            # All of it, so that what breaks off is told as what it is.
            whole = await answer.read()
            await self._begin(answer)
            await self._send({"type": "http.response.body", "body": whole})
            return
        await self._begin(answer)
        async for part in answer.content.iter_any():
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, answer: Any) -> None:
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in answer.headers.items()
            if name.lower() in _ANSWER_HEADERS
        ]
        self._begun = True
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await self._send(start)

    async def _fail(self, why: str) -> None:
        if self._begun and self._streams:
            document = {
                "error": f"the stream of weightsync-server broke off ({why}); ask for the status",
                "reason": Reason.SERVER_AWAY.value,
            }
            event = b"data: " + json.dumps(document).encode() + b"\n\n"
            await self._send({"type": "http.response.body", "body": event})
        if self._begun:
            return
        sentence = (
            f"no answer from weightsync-server at {self._upstream.url} ({why}); check that it runs "
            "with --http, that WEIGHTSYNC_HTTP names that address, and with https that "
            "WEIGHTSYNC_TLS_CA has the CA of its certificate"
        )
        await _refuse(self._send, 503, Reason.SERVER_AWAY, sentence)


async def _body(receive: Any) -> bytes | None:
    """Return the body, or what is too much of it; None: its sender has left."""
    body, more = b"", True
    while more and len(body) <= _MOST_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _wait_left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_headers(scope: Any) -> list[tuple[str, str]]:
    given = [(name.lower(), value) for name, value in scope["headers"]]
    tokens = [value for name, value in given if name == _TOKEN]
    if tokens:
        given = [(name, value) for name, value in given if name != b"authorization"]
        given += [(b"authorization", b"Bearer " + token) for token in tokens]
    passed = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in given
        if name in _REQUEST_HEADERS
    ]
    return [*passed, ("accept-encoding", "identity"), ("forwarded", _forwarded(scope))]


def _forwarded(scope: Any) -> str:
    """Return where a request came from, as RFC 7239 writes it."""
    client = scope.get("client")
    if not client:
        return "for=unknown"
    host = f"[{client[0]}]" if ":" in client[0] else client[0]
    return f'for="{host}:{client[1]}"'


async def _refuse(send: Any, status: int, reason: Reason, sentence: str) -> None:
    body = json.dumps({"error": sentence, "reason": reason.value}).encode() + b"\n"
    await send_json(send, status, body)
