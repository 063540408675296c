"""Which versions made an answer, from what each HTTP client and framework gives."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightsync_client import InvalidError, Spans, TokenSpans, VersionSpan, versions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADERS = {"x-weightsync-version": "41,42", "x-weightsync-spans": "41:0-2,42:2-5;keys=41"}
FOUND = Spans((41, 42), (TokenSpans((VersionSpan(41, 0, 2), VersionSpan(42, 2, 5)), keys=(41,)),))
LAST = {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": []}
MEMBERS = {name.removeprefix("x-").replace("-", "_"): text for name, text in HEADERS.items()}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.dumps(LAST).encode()
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        for name, text in {**HEADERS, "Content-Type": "application/json"}.items():
            self.send_header(name.title(), text)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_what_an_answer_tells() -> None:
    assert (FOUND.oldest, FOUND.newest, FOUND.pure) == (41, 42, False)
    assert FOUND.per_token() == [41, 41, 42, 42, 42]
    one = versions_of({"x-weightsync-version": "41", "x-weightsync-spans": "41:0-2 41:0-1 -"})
    assert one.pure
    assert [one.per_token(choice) for choice in range(3)] == [[41, 41], [41], []]
    kept = versions_of({"x-weightsync-version": "42", "x-weightsync-spans": "42:0-2;keys=41"})
    assert not kept.pure
    unasked = versions_of({"x-weightsync-version": "41"})
    assert not unasked.pure
    with pytest.raises(InvalidError, match=r"^send x-weightsync-spans: 1 with the request"):
        unasked.per_token()
    with pytest.raises(InvalidError, match="choice is 3; this answer has 3, from 0"):
        one.per_token(3)


def test_responses_of_httpx_requests_and_openai(address: str) -> None:
    httpx = pytest.importorskip("httpx")
    openai = pytest.importorskip("openai")
    requests = pytest.importorskip("requests")
    assert versions_of(httpx.post(address, json={})) == FOUND
    assert versions_of(requests.post(address, json={}, timeout=5)) == FOUND
    client = openai.OpenAI(base_url=address, api_key="k")
    raw = client.completions.with_raw_response.create(model="m", prompt="a")
    assert versions_of(raw) == versions_of(raw.headers) == FOUND


def test_a_response_of_aiohttp(address: str) -> None:
    aiohttp = pytest.importorskip("aiohttp")

    async def ask() -> Spans:
        async with aiohttp.ClientSession() as session, session.post(address, json={}) as answer:
            return versions_of(answer)

    assert asyncio.run(ask()) == FOUND


def test_the_last_event_of_a_stream_in_every_form() -> None:
    completion = pytest.importorskip("openai.types").Completion
    event = json.dumps({**LAST, **MEMBERS})
    assert versions_of(json.loads(event)) == FOUND
    assert versions_of(event) == versions_of(f"data: {event}\n\n") == FOUND
    stream = f'data: {{"choices":[]}}\n\ndata: {event}\r\n\r\ndata: [DONE]\n\n'
    assert versions_of(stream) == versions_of(stream.encode()) == FOUND
    assert versions_of(completion.model_validate_json(event)) == FOUND


def test_the_head_of_a_stream_is_not_taken_for_all_of_it() -> None:
    head = {"Content-Type": "text/event-stream; charset=utf-8", "X-Weightsync-Version": "41"}
    with pytest.raises(InvalidError, match=r"^give the last event of the stream"):
        versions_of(SimpleNamespace(headers=head))


def test_vllms_own_field_and_its_outputs() -> None:
    own = [{"version": "41", "start": 0, "end": 2}, {"version": "42", "start": 2, "end": 5}]
    found = versions_of({"choices": [{"index": 0, "weight_versions": own}]})
    assert (found.versions, found.per_token()) == ((41, 42), [41, 41, 42, 42, 42])
    # It does not tell of keys.
    assert not versions_of({"choices": [{"weight_versions": own[:1]}]}).pure
    outputs = [SimpleNamespace(weight_versions=[SimpleNamespace(**span) for span in own])]
    assert versions_of(SimpleNamespace(outputs=outputs)) == found
    labelled = [{"version": "step-7", "start": 0, "end": 2}]
    with pytest.raises(InvalidError, match="names no version"):
        versions_of({"choices": [{"weight_versions": labelled}]})
    # Ours tells more.
    assert versions_of({**MEMBERS, "choices": [{"weight_versions": own[:1]}]}) == FOUND


@pytest.mark.parametrize(
    "response", [{}, {"choices": []}, "{}", SimpleNamespace(headers={"server": "uvicorn"})]
)
def test_an_answer_without_a_version_is_told_with_the_remedy(response: Any) -> None:
    with pytest.raises(InvalidError, match="WEIGHTSYNC_ANSWER_VERSIONS is 0"):
        versions_of(response)


@pytest.mark.parametrize("response", ["data: [DONE]", "", "[1]", b"\xff"])
def test_what_is_no_json_is_told(response: Any) -> None:
    with pytest.raises(InvalidError, match=r"^give the JSON of an answer or a stream's last event"):
        versions_of(response)


def test_what_is_no_response_is_told() -> None:
    with pytest.raises(InvalidError, match=r"^give a response, not int"):
        versions_of(41)


@pytest.mark.parametrize("text", ["41:0", "41:0-2,", "a:0-2", "41:0-2;keys=b", "41:2-0x"])
def test_spans_that_are_not_clear_are_not_guessed_at(text: str) -> None:
    with pytest.raises(InvalidError, match="is not clear"):
        versions_of({"x-weightsync-version": "41", "x-weightsync-spans": text})


def test_what_a_later_release_adds_is_passed_over() -> None:
    text = "41:0-2;keys=40;of=7"
    found = versions_of({"x-weightsync-version": "41", "x-weightsync-spans": text})
    assert found.sequences[0].keys == (40,)
