"""Server-sent events of messages that come, fail, or do not come."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.http import http_messages
from weightsync_server.http.http_messages import EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class _Messages:
    """What comes after the first message."""

    def __init__(self, *messages: Any) -> None:
        self._messages = messages
        self.hang = asyncio.Event()
        self.closed = False

    async def run(self) -> AsyncGenerator[Any, None]:
        try:
            for message in self._messages:
                if isinstance(message, Exception):
                    raise message
                if message is None:
                    await self.hang.wait()
                else:
                    yield message
        finally:
            self.closed = True


def _stream(messages: _Messages) -> EventStream:
    return EventStream("first", messages.run(), lambda message: {"event": message})


def _read(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


async def test_each_message_is_an_event() -> None:
    messages = _Messages("a\n\ndata: b", "c")
    stream = _stream(messages)
    found = [_read(event)["event"] async for event in stream]
    assert found == ["first", "a\n\ndata: b", "c"]
    await stream.aclose()
    assert messages.closed


async def test_a_failure_is_the_last_event() -> None:
    error = WeightSyncError(Reason.TRAINER_FAILED, "it raised", metadata={"traceback": "T"})
    messages = _Messages("a", error, "never")
    found = [_read(event) async for event in _stream(messages)]
    assert found[2:] == [{"error": "it raised", "reason": "TRAINER_FAILED", "traceback": "T"}]


async def test_silence_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_messages, "SILENCE_S", 0.05)
    messages = _Messages(None, "a")
    stream = _stream(messages)
    assert _read(await anext(stream)) == {"event": "first"}
    assert [await anext(stream) for _ in range(3)] == [b":\n\n"] * 3
    messages.hang.set()
    # Nothing is lost in between.
    while (event := await anext(stream)) == b":\n\n":
        pass
    assert _read(event) == {"event": "a"}
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("reads", [0, 1, 2])
async def test_what_makes_messages_ends_with_it(
    reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_messages, "SILENCE_S", 0.05)
    messages = _Messages("begun", None)
    others = messages.run()
    assert await anext(others) == "begun"
    stream = EventStream("first", others, lambda message: {"event": message})
    for _ in range(reads):
        await anext(stream)
    await stream.aclose()
    assert messages.closed
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
