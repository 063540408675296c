"""Answers of a real ASGI application name their versions; requests may ask for a newer one."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.unit.vllm.extensions.processor import Llm
from weightsync.vllm.bridge.live_versions import LiveVersions
from weightsync.vllm.extensions.answers import AnswerVersions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

applications = pytest.importorskip("starlette.applications")
middleware = pytest.importorskip("starlette.middleware.base")
responses = pytest.importorskip("starlette.responses")
routing = pytest.importorskip("starlette.routing")

DONE = "data: [DONE]\n\n"
#: From a step's end until the application has sent what it made.
_TURNS = 20


class Site:
    """An application over a stand-in engine; a test decides when it samples and what it serves.

    Attributes:
        sent: What reached the network so far, of the request under way.
    """

    def __init__(self, *, labels: bool = True, on: bool = True) -> None:
        self.llm = Llm(labels=labels)
        self.live = LiveVersions(labelled=labels)
        self.go(41)
        self.steps: asyncio.Queue[Callable[[], None] | None] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        state = AnswerVersions()
        self.app = applications.Starlette(
            routes=[
                routing.Route("/plain", self._plain),
                routing.Route("/stream", self._stream),
                routing.Route("/created", self._created),
                routing.Route("/zipped", self._zipped),
                routing.Route("/sized", self._sized),
                routing.Route("/models", self._models),
            ]
        )
        self.app.add_middleware(state.wrap)
        if on:
            state.follow(self.llm, self.live)

    def go(self, version: int) -> None:
        """Serve a version."""
        self.live.begin(version)
        self.live.confirm()
        self.llm.label = str(version)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """Return the whole answer to a request."""
        transport = httpx.ASGITransport(app=self.app)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.get(path, headers=named)

    def watched(self, path: str) -> asyncio.Task[None]:
        """Begin a request whose messages are in `sent` as they come."""
        scope = {
            "type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"",
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
            await self.steps.put(lambda: self.llm.token("a"))
            await _turns()

    async def end(self) -> None:
        """End the engine's request."""
        await self.steps.put(None)
        await _turns()

    async def _tokens(self) -> AsyncIterator[int]:
        self.llm.ask("a")
        count = 0
        while (step := await self.steps.get()) is not None:
            step()
            count += 1
            yield count
        self.llm.end("a")

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

    async def _models(self, request: Any) -> Any:
        return responses.JSONResponse({"data": []})


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def _answer(site: Site, path: str, *versions: int) -> httpx.Response:
    asking = asyncio.create_task(site.get(path))
    await site.step(*versions)
    await site.end()
    return await asking


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(("versions", "named"), [((41, 41), "41"), ((41, 42), "41,42")])
async def test_an_answer_names_the_versions_that_made_it(
    versions: tuple[int, ...], named: str
) -> None:
    answer = await _answer(Site(), "/plain", *versions)
    assert answer.headers["x-weightsync-version"] == named
    assert answer.json() == {"tokens": [1, 2]}


async def test_without_labels_all_that_were_live_are_named() -> None:
    site = Site(labels=False)
    asking = asyncio.create_task(site.get("/plain"))
    await site.step(41)
    site.go(42)
    await site.end()
    assert (await asking).headers["x-weightsync-version"] == "41,42"


@pytest.mark.parametrize(
    ("versions", "first", "last"),
    [((41, 41), "41", "41"), ((41, 42, 43), "41", "41,42,43"), ((42, 42), "42", "42")],
)
async def test_a_stream_names_the_first_version_and_all_of_them_at_its_end(
    versions: tuple[int, ...], first: str, last: str
) -> None:
    answer = await _answer(Site(), "/stream", *versions)
    assert answer.headers["x-weightsync-version"] == first
    *events, usage = _events(answer.text)
    assert not any("weightsync_version" in event for event in events)
    assert usage == {"choices": [], "usage": {"n": 3}, "weightsync_version": last}
    assert answer.text.endswith("\n\n" + DONE)
    assert len(events) == len(versions) + 1


async def test_a_stream_keeps_nothing_back_while_the_engine_works() -> None:
    site = Site()
    asking = site.watched("/stream")
    await _turns()
    assert site.sent == []
    for count in range(1, 4):
        await site.step(41)
        bodies = [message["body"] for message in site.sent if "body" in message]
        assert bodies == [b'data: {"n":%d}\n\n' % n for n in range(1, count + 1)]
    await site.end()
    await asking
    assert [message["type"] for message in site.sent].count("http.response.start") == 1
    assert not site.sent[-1].get("more_body")


async def test_a_stream_that_begins_before_its_first_token_names_versions_at_its_end_only() -> None:
    site = Site()
    asking = site.watched("/created")
    await _turns()
    assert len(site.sent) == 2
    await site.step(41, 42)
    await site.end()
    await asking
    assert b"x-weightsync-version" not in dict(site.sent[0]["headers"])
    text = b"".join(message.get("body", b"") for message in site.sent).decode()
    assert _events(text)[-1]["weightsync_version"] == "41,42"


@pytest.mark.parametrize("path", ["/zipped", "/sized"])
async def test_what_is_compressed_or_has_its_length_and_what_the_engine_did_not_make_stays(
    path: str,
) -> None:
    site = Site()
    asking = site.watched(path)
    await site.step(41)
    await site.end()
    await asking
    assert b"weightsync_version" not in b"".join(m.get("body", b"") for m in site.sent)
    assert "x-weightsync-version" not in (await site.get("/models")).headers
    assert (await site.get("/nothing")).status_code == 404


async def test_without_an_engine_or_switched_off_nothing_is_added() -> None:
    site = Site(on=False)
    assert "x-weightsync-version" not in (await _answer(site, "/plain", 41)).headers
    assert "weightsync" not in (await _answer(site, "/stream", 41)).text
    assert (await site.get("/models", x_weightsync_min_version="99")).status_code == 200


async def test_middlewares_that_wrap_the_body_change_nothing() -> None:
    site = Site()

    async def through(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    inner = site.app
    site.app = applications.Starlette()
    state = AnswerVersions()
    state.live = site.live
    wrapped = middleware.BaseHTTPMiddleware(inner, dispatch=through)
    site.app = state.wrap(wrapped)
    assert (await _answer(site, "/plain", 41, 42)).headers["x-weightsync-version"] == "41,42"


@pytest.mark.parametrize(("minimum", "status"), [("40", 200), ("41", 200), ("42", 409)])
async def test_an_older_version_than_the_minimum_is_refused_for_now(
    minimum: str, status: int
) -> None:
    site = Site()
    answer = await site.get("/models", x_weightsync_min_version=minimum)
    assert answer.status_code == status
    if status == 409:
        assert answer.headers["retry-after"] == "1"
        assert "version 41 is live" in answer.json()["error"]["message"]
    site.go(42)
    assert (await site.get("/models", x_weightsync_min_version=minimum)).status_code == 200


async def test_a_version_that_may_yet_be_refused_is_not_live() -> None:
    site = Site()
    site.live.attempt(42)
    assert (await site.get("/models", x_weightsync_min_version="42")).status_code == 409
    site.live.settle(42)
    assert (await site.get("/models", x_weightsync_min_version="42")).status_code == 200


async def test_weights_without_a_number_meet_no_minimum() -> None:
    site = Site()
    site.go(0)
    answer = await site.get("/models", x_weightsync_min_version="1")
    assert answer.status_code == 409
    assert "no number yet" in answer.json()["error"]["message"]


@pytest.mark.parametrize("minimum", ["", "new", "-1", "4.2", "41,42", "1" * 20, "\u0664\u0661"])
async def test_a_minimum_that_is_no_number_is_refused(minimum: str) -> None:
    transport = httpx.ASGITransport(app=Site().app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        headers = [(b"x-weightsync-min-version", minimum.encode())]
        answer = await client.get("/models", headers=headers)
    assert answer.status_code == 400
    assert "one whole number such as 41" in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers


async def test_two_minima_are_refused() -> None:
    transport = httpx.ASGITransport(app=Site().app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        headers = [("x-weightsync-min-version", "1"), ("x-weightsync-min-version", "2")]
        assert (await client.get("/models", headers=headers)).status_code == 400
