"""The last JSON of a stream gets one member more, and nothing else is kept or changed."""

from __future__ import annotations

import json

import pytest

from weightsync.vllm.extensions.answers.answer_versions import LastEvent

DONE = b"data: [DONE]\n\n"


def _through(*pieces: bytes) -> tuple[bytes, bytes]:
    """Return what was sent before the end, and what was sent then."""
    last = LastEvent()
    sent = b"".join(last.feed(piece) for piece in pieces)
    return sent, last.extended({"weightsync_version": "41,42"})


@pytest.mark.parametrize("end", [(), (DONE,), (b": bye\n\n", DONE)])
@pytest.mark.parametrize("text", ["x", "}\n\ndata: {", '"}', "é\\"])
def test_the_last_json_is_extended(text: str, end: tuple[bytes, ...]) -> None:
    events = [json.dumps({"n": n, "text": text}) for n in range(3)]
    sent, rest = _through(*(f"data: {event}\n\n".encode() for event in events), *end)
    assert sent == "".join(f"data: {event}\n\n" for event in events[:2]).encode()
    line, _, after = rest.partition(b"\n\n")
    expected = json.loads(events[2]) | {"weightsync_version": "41,42"}
    assert json.loads(line.removeprefix(b"data: ")) == expected
    assert after == b"".join(end)


def test_several_events_in_a_piece_and_one_in_several() -> None:
    sent, rest = _through(b'data: {"a":1}\n\ndata: {"a":2}\n\nda', b'ta: {"a":', b"3}\n\n" + DONE)
    assert sent == b'data: {"a":1}\n\ndata: {"a":2}\n\n'
    assert rest == b'data: {"a":3,"weightsync_version":"41,42"}\n\n' + DONE


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_named_events_and_other_line_ends(line_end: bytes) -> None:
    event = b'event: response.completed%bdata:{"a":{}}%b%b' % ((line_end,) * 3)
    sent, rest = _through(event)
    assert sent == b"event: response.completed" + line_end
    assert rest == b'data:{"a":{},"weightsync_version":"41,42"}' + line_end * 2


def test_an_empty_object_gets_its_first_member() -> None:
    assert _through(b"data: {}\n\n")[1] == b'data: {"weightsync_version":"41,42"}\n\n'


@pytest.mark.parametrize("stream", [b"", DONE, b"data: 1\n\n", b'data: {"a": 1'])
def test_a_stream_without_a_json_object_stays_as_it_is(stream: bytes) -> None:
    assert b"".join(_through(stream)) == stream


def test_what_is_released_is_kept_no_longer() -> None:
    last = LastEvent()
    assert last.feed(b"data: {}\n\n") == b""
    assert last.release() == b"data: {}\n\n"
    assert last.release() == last.extended({"a": "b"}) == b""
