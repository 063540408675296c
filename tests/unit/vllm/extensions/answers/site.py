"""A real ASGI application over a stand-in engine, behind the middleware that names versions."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.unit.vllm.extensions.processor import Llm
from weightsync.vllm.bridge.live_versions import KeptKeys, LiveVersions
from weightsync.vllm.extensions.answers import AnswerVersions
from weightsync.vllm.extensions.answers.request_bounds import read_bounds
from weightsync.vllm.extensions.answers.request_versions import RequestVersions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["DONE", "Site", "answer_of", "events_of", "turns"]

applications = pytest.importorskip("starlette.applications")
responses = pytest.importorskip("starlette.responses")
routing = pytest.importorskip("starlette.routing")

DONE = "data: [DONE]\n\n"
#: From a step's end until the application has sent what it made.
_TURNS = 20


class Site:
    """An application over a stand-in engine; a test decides when it samples and what it serves.

    Attributes:
        sent: What reached the network so far, of the request under way.
        bodies: Of requests with JSON, as the application got them.
        lengths: What their headers say.
    """

    def __init__(self, *, labels: bool = True, on: bool = True) -> None:
        self.llm = Llm(labels=labels)
        self.live = LiveVersions(labelled=labels)
        self.go(41)
        self.steps: asyncio.Queue[Callable[[], None] | None] = asyncio.Queue()
        self.llm.on_abort = lambda: self.steps.put_nowait(lambda: None)
        self.sent: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.lengths: list[str | None] = []
        state = AnswerVersions()
        self.app = applications.Starlette(
            routes=[
                routing.Route("/plain", self._plain),
                routing.Route("/stream", self._stream),
                routing.Route("/created", self._created),
                routing.Route("/zipped", self._zipped),
                routing.Route("/sized", self._sized),
                routing.Route("/models", self._models),
                routing.Route("/v1/completions", self._completions, methods=["POST"]),
                routing.Route("/v1/messages", self._stream, methods=["POST"]),
            ]
        )
        self.app.add_middleware(state.wrap)
        if on:
            state.follow(self.llm, self.live)

    def go(self, version: int, kept: KeptKeys = KeptKeys.NONE) -> None:
        """Serve a version."""
        self.live.begin(version, kept)
        self.live.confirm()
        self.llm.label = str(version)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """Return the whole answer to a request."""
        transport = httpx.ASGITransport(app=self.app)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.get(path, headers=named)

    def versions(self, **named: Any) -> RequestVersions:
        """Return what a request with these headers is to the engine, and nothing around it."""
        headers = [
            (name.replace("_", "-").encode(), str(value).encode()) for name, value in named.items()
        ]
        return RequestVersions(self.live, read_bounds(headers, {}), self.llm)

    async def post_raw(self, body: bytes, **headers: str) -> httpx.Response:
        """Return the whole answer to a request with this body, called JSON."""
        transport = httpx.ASGITransport(app=self.app)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named["content-type"] = "application/json"
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.post("/v1/completions", content=body, headers=named)

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> Any:
        """Return the whole answer to a request with JSON; a field names what it streams."""
        transport = httpx.ASGITransport(app=self.app)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.post(path, json=body, headers=named)

    def watched(self, path: str, **named: str) -> asyncio.Task[None]:
        """Begin a request whose messages are in `sent` as they come."""
        headers = [(n.replace("_", "-").encode(), value.encode()) for n, value in named.items()]
        scope = {
            "type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b"",
            "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("t", 80),
        }  # fmt: skip

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)

        return asyncio.create_task(self.app(scope, receive, send))

    async def step(self, *versions: int) -> None:
        """Sample a token with each version, and give the application time for what it makes."""
        for version in versions:
            if version != self.live.version:
                self.go(version)
            await self.steps.put(lambda: self.llm.token(*self.llm.output_processor.request_states))
            await turns()

    async def end(self) -> None:
        """End the engine's request."""
        await self.steps.put(None)
        await turns()

    async def _tokens(self) -> AsyncIterator[int]:
        count = 0
        self.llm.ask("a")
        # As vLLM's queue of outputs, which has the end of one that was aborted.
        while "a" in self.llm.output_processor.request_states:
            step = await self.steps.get()
            if step is None:
                self.llm.end("a")
            elif "a" in self.llm.output_processor.request_states:
                step()
                count += 1
                yield count

    async def _plain(self, request: Any) -> Any:
        return responses.JSONResponse({"tokens": [count async for count in self._tokens()]})

    async def _events(self, *before: str) -> AsyncIterator[str]:
        for event in before:
            yield event
        async for count in self._tokens():
            yield f'data: {{"n":{count}}}\n\n'
        yield 'data: {"finish_reason":"stop"}\n\n'
        yield 'data: {"choices":[],"usage":{"n":3}}\n\n'
        yield DONE

    async def _stream(self, request: Any) -> Any:
        return responses.StreamingResponse(self._events(), media_type="text/event-stream")

    async def _created(self, request: Any) -> Any:
        events = self._events('event: response.created\ndata: {"n":0}\n\n')
        return responses.StreamingResponse(events, media_type="text/event-stream")

    async def _zipped(self, request: Any) -> Any:
        zipped = {"content-encoding": "gzip"}
        return responses.StreamingResponse(
            self._events(), media_type="text/event-stream", headers=zipped
        )

    async def _sized(self, request: Any) -> Any:
        text = "".join([event async for event in self._events()])
        return responses.Response(text, media_type="text/event-stream")

    async def _completions(self, request: Any) -> Any:
        self.bodies.append(await request.body())
        self.lengths.append(request.headers.get("content-length"))
        if "stream" in json.loads(self.bodies[-1]):
            return await self._stream(request)
        return await self._plain(request)

    async def _models(self, request: Any) -> Any:
        return responses.JSONResponse({"data": []})


async def turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def answer_of(site: Site, path: str, *versions: int, **headers: str) -> httpx.Response:
    """Return the answer to a request that got a token of each version."""
    asking = asyncio.create_task(site.get(path, **headers))
    await site.step(*versions)
    await site.end()
    return await asking


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the JSON of a stream's events."""
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]
