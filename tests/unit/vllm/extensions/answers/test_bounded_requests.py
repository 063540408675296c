"""Bounds of requests to a real ASGI application: refused, ended by a switch, or met to the end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.vllm.extensions.answers.site import DONE, Site, answer_of, events_of, turns
from weightsync.vllm.extensions.answers import request_body


@pytest.mark.parametrize(
    "headers",
    [
        {"x_weightsync_exact_version": "42"},
        {"x_weightsync_max_lag": "1"},
        {"x_weightsync_min_version": "42"},
    ],
)
async def test_what_is_not_met_is_refused_before_vllm_hears_of_it(headers: dict[str, str]) -> None:
    site = Site()
    site.live.newest = 43
    for answer in (await site.get("/plain", **headers), await site.post({}, **headers)):
        assert answer.status_code == 409
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "ConflictError"
    assert site.llm.salts == {}
    site.go(42)
    assert (await answer_of(site, "/plain", 42, **headers)).status_code == 200


async def test_fields_are_taken_from_the_body_and_the_rest_reaches_vllm() -> None:
    site = Site()
    body = {"prompt": "\u00e9", "weightsync_exact_version": 41, "vllm_xargs": {"a": 1.5}}
    asking = asyncio.create_task(site.post(body))
    await site.step(41)
    await site.end()
    assert (await asking).status_code == 200
    assert json.loads(site.bodies[0]) == {"prompt": "\u00e9", "vllm_xargs": {"a": 1.5}}
    assert site.lengths == [str(len(site.bodies[0]))]
    refused = await site.post({"weightsync_exact_version": 42})
    assert refused.status_code == 409


async def test_a_body_without_a_field_of_ours_is_passed_on_byte_for_byte() -> None:
    site = Site()
    raw = b'{ "prompt" :"weightsync", "n":1.50 }'
    asking = asyncio.create_task(site.post_raw(raw))
    await site.step(41)
    await site.end()
    assert (await asking).status_code == 200
    assert site.bodies == [raw]


@pytest.mark.parametrize("raw", [b'{"weightsync_spans": 1', b'{"a": weightsync_', b""])
async def test_what_is_no_json_object_is_vllms_to_refuse(raw: bytes) -> None:
    site = Site()
    await asyncio.gather(site.post_raw(raw), return_exceptions=True)
    assert site.bodies == [raw]


async def test_a_field_and_a_header_that_disagree_are_refused() -> None:
    answer = await Site().post({"weightsync_max_lag": 2}, x_weightsync_max_lag="3")
    assert answer.status_code == 400
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize(
    "headers", [{"x_weightsync_exact_version": "41"}, {"x_weightsync_max_span": "1"}]
)
async def test_a_switch_ends_an_answer_that_is_for_one_version(headers: dict[str, str]) -> None:
    site = Site()
    asking = asyncio.create_task(site.get("/plain", **headers))
    await site.step(41)
    site.go(42)
    answer = await asking
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
    assert "ask again" in answer.json()["error"]["message"]
    assert "x-weightsync-version" not in answer.headers
    assert site.llm.aborted == (["a"], ["a"])
    assert not site.live.watchers


async def test_a_stream_ends_with_the_error_as_vllms_own_do() -> None:
    site = Site()
    asking = asyncio.create_task(
        site.post({"stream": True}, x_weightsync_exact_version="41", path="/v1/completions")
    )
    await site.step(41, 41)
    site.go(42)
    answer = await asking
    assert (answer.status_code, answer.headers["x-weightsync-version"]) == (200, "41")
    *tokens, last = events_of(answer.text)
    assert tokens == [{"n": 1}, {"n": 2}]
    assert last["error"] == {
        "message": "version 42 became live while this answer was made for 41 alone; ask again",
        "type": "ConflictError",
        "code": 409,
    }
    assert answer.text.endswith(DONE)


async def test_a_stream_of_named_events_ends_with_one_named_error() -> None:
    site = Site()
    asking = asyncio.create_task(
        site.post({"stream": True}, "/v1/messages", x_weightsync_exact_version="41")
    )
    await site.step(41)
    site.go(42)
    text = (await asking).text
    assert text.count("event: error\n") == 1
    assert events_of(text)[-1]["type"] == "error"
    assert DONE not in text


async def test_a_stream_that_has_not_begun_is_answered_with_409() -> None:
    site = Site()
    asking = asyncio.create_task(site.get("/stream", x_weightsync_exact_version="41"))
    await turns()
    site.go(42)
    assert (await asking).status_code == 409


async def test_versions_of_which_it_has_no_token_do_not_count() -> None:
    site = Site()
    asking = asyncio.create_task(site.get("/plain", x_weightsync_max_span="1"))
    await turns()
    for version in (42, 43):
        site.go(version)
    await site.step(43)
    await site.end()
    answer = await asking
    assert (answer.status_code, answer.headers["x-weightsync-version"]) == (200, "43")


async def test_as_many_versions_as_allowed_make_an_answer_also_over_a_rollback() -> None:
    site = Site()
    answer = await answer_of(site, "/plain", 41, 42, 41, 42, x_weightsync_max_span="2")
    assert (answer.status_code, answer.headers["x-weightsync-version"]) == (200, "41,42")
    site = Site()
    answer = await answer_of(site, "/plain", 41, 42, 43, x_weightsync_max_span="2")
    assert answer.status_code == 409


async def test_what_was_made_before_a_switch_is_answered() -> None:
    site = Site()
    asking = site.watched("/stream", x_weightsync_exact_version="41")
    await site.step(41)
    await site.end()
    site.go(42)
    await asking
    text = b"".join(message.get("body", b"") for message in site.sent).decode()
    assert events_of(text)[-1]["weightsync_version"] == "41"
    assert site.llm.aborted == ([], [])


@pytest.mark.parametrize("taken", [True, False])
async def test_of_a_switch_between_steps_an_exact_answer_waits_for_the_outcome(taken: bool) -> None:
    site = Site()
    asking = site.watched("/stream", x_weightsync_exact_version="41")
    await site.step(41)
    site.live.attempt(42)
    site.llm.label = "42" if taken else "41"
    sent = len(site.sent)
    await site.steps.put(lambda: site.llm.token("a"))
    await turns()
    assert len(site.sent) == sent
    site.live.settle(42 if taken else 41)
    await turns()
    await site.end()
    await asking
    text = b"".join(message.get("body", b"") for message in site.sent).decode()
    assert ("error" in events_of(text)[-1]) is taken
    assert ('{"n":2}' in text) is not taken


async def test_what_is_asked_of_the_engine_after_a_switch_is_ended_too() -> None:
    site = Site()
    versions = site.versions(x_weightsync_exact_version=41)
    with versions.answering():
        site.llm.ask("a")
        site.llm.token("a")
        site.go(42)
        await turns()
        assert site.llm.aborted[0] == ["a"]
        site.llm.ask("0_b", of="b")
        site.llm.ask("1_b", of="b", index=1)
        await turns()
        await versions.end()
    assert site.llm.output_processor.request_states == {}
    assert set(site.llm.aborted[0]) == {"a", "b"}
    assert set(site.llm.aborted[1]) == {"a", "0_b", "1_b"}


@pytest.mark.parametrize(
    ("salt", "sent"), [(None, "weightsync-group:t1"), ("mine", "weightsync-group:t1/mine")]
)
async def test_a_group_shares_keys_by_a_salt_of_its_own(salt: str | None, sent: str) -> None:
    site = Site()
    with site.versions(x_weightsync_group="t1").answering():
        site.llm.ask("0_a", of="a", salt=salt)
        site.llm.ask("1_a", of="a", index=1, salt=salt)
    site.llm.ask("other", salt=salt)
    assert site.llm.salts == {"0_a": sent, "1_a": sent, "other": salt}


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "weightsync_spans": 1}, True),
        ({"return_weight_versions": False}, False),
        ({"use_beam_search": True}, None),
    ],
)
async def test_a_vllm_that_tells_spans_itself_is_asked_for_them_too(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, object], asked: bool | None
) -> None:
    monkeypatch.setattr(request_body, "_release_tells_spans", lambda: True)
    site = Site()
    for headers in ({"x_weightsync_spans": "1"}, {}):
        asking = asyncio.create_task(site.post(body, **headers))
        await site.step(41)
        await site.end()
        assert (await asking).status_code == 200
    first, second = map(json.loads, site.bodies)
    assert first.get("return_weight_versions") is asked
    if "weightsync_spans" not in body:
        assert second == body


async def test_a_body_that_is_too_large_is_passed_on_and_its_fields_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_body, "_MOST_MIB", 0)
    site = Site()
    asking = asyncio.create_task(site.post_raw(b'{"prompt":"a"}', x_weightsync_spans="1"))
    await site.step(41)
    await site.end()
    answer = await asking
    assert answer.headers["x-weightsync-spans"] == "41:0-1"
    assert site.bodies == [b'{"prompt":"a"}']


async def test_a_client_that_leaves_before_its_body_has_come_is_vllms_matter() -> None:
    site = Site()
    messages = [
        {"type": "http.request", "body": b'{"a":', "more_body": True},
        {"type": "http.disconnect"},
    ]
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "path": "/"}

    async def receive() -> Any:
        return messages.pop(0)

    bounds, passed, replay = await request_body.bounded_request(scope, receive)
    assert (bounds, passed) == (site.versions().bounds, scope)
    assert await replay() == {"type": "http.request", "body": b'{"a":', "more_body": True}
    assert await replay() == {"type": "http.disconnect"}
