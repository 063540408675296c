"""Answers of a real ASGI application name their versions; requests may ask for a newer one."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.unit.vllm.extensions.answers.site import DONE, Site, answer_of, events_of, turns
from weightsync.vllm.extensions.answers import AnswerVersions

applications = pytest.importorskip("starlette.applications")
middleware = pytest.importorskip("starlette.middleware.base")


@pytest.mark.parametrize(("versions", "named"), [((41, 41), "41"), ((41, 42), "41,42")])
async def test_an_answer_names_the_versions_that_made_it(
    versions: tuple[int, ...], named: str
) -> None:
    answer = await answer_of(Site(), "/plain", *versions)
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
    answer = await answer_of(Site(), "/stream", *versions)
    assert answer.headers["x-weightsync-version"] == first
    *events, usage = events_of(answer.text)
    assert not any("weightsync_version" in event for event in events)
    assert usage == {"choices": [], "usage": {"n": 3}, "weightsync_version": last}
    assert answer.text.endswith("\n\n" + DONE)
    assert len(events) == len(versions) + 1


async def test_a_stream_keeps_nothing_back_while_the_engine_works() -> None:
    site = Site()
    asking = site.watched("/stream")
    await turns()
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
    await turns()
    assert len(site.sent) == 2
    await site.step(41, 42)
    await site.end()
    await asking
    assert b"x-weightsync-version" not in dict(site.sent[0]["headers"])
    text = b"".join(message.get("body", b"") for message in site.sent).decode()
    assert events_of(text)[-1]["weightsync_version"] == "41,42"


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
    assert "x-weightsync-version" not in (await answer_of(site, "/plain", 41)).headers
    assert "weightsync" not in (await answer_of(site, "/stream", 41)).text
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
    assert (await answer_of(site, "/plain", 41, 42)).headers["x-weightsync-version"] == "41,42"


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
