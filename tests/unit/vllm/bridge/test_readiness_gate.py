"""Requests pass the gate only while the engine serves or is paused."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
import uvicorn

from weightsync.backoff import until
from weightsync.engine import EngineState
from weightsync.vllm.bridge.readiness_gate import ReadinessGate, starting

_UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "passed"})


async def _request(
    state: EngineState | None,
    path: str,
    kind: str = "http",
    reason: str | None = None,
    **more: Any,
) -> Any:
    condition = starting
    if state is not None:
        default = "" if state in ("serving", "paused") else "because of that"
        told = state, default if reason is None else reason
        condition = lambda: told  # noqa: E731
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await ReadinessGate(_app, condition)({"type": kind, "path": path, **more}, receive, send)
    return sent


@pytest.mark.parametrize("state", [EngineState.SERVING, EngineState.PAUSED])
async def test_open_states_pass(state: EngineState) -> None:
    assert await _request(state, "/v1/completions") == [{"type": "passed"}]


@pytest.mark.parametrize("state", [EngineState.SERVING, EngineState.PAUSED])
async def test_what_nobody_has_proved_yet_answers_nothing(state: EngineState) -> None:
    start, body = await _request(state, "/v1/completions", reason="nobody has proved it yet")
    assert start["status"] == 503
    assert b"nobody has proved it yet" in body["body"]
    assert await _request(state, "/health", reason="nobody has proved it yet") == [
        {"type": "passed"}
    ]


@pytest.mark.parametrize("state", [EngineState.UNRECONCILED, EngineState.FENCED, EngineState.DEAD])
async def test_closed_states_tell_why(state: EngineState) -> None:
    start, body = await _request(state, "/v1/completions")
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["message"] == f"{state}: because of that"


async def test_closed_until_there_is_an_engine() -> None:
    start, body = await _request(None, "/v1/models")
    assert start["status"] == 503
    assert b"starting" in body["body"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/metrics/", "/version"])
async def test_what_tells_about_the_process_is_always_open(path: str) -> None:
    assert await _request(EngineState.FENCED, path) == [{"type": "passed"}]
    prefixed = await _request(EngineState.FENCED, "/llm" + path, root_path="/llm")
    assert prefixed == [{"type": "passed"}]


async def test_one_that_sleeps_can_be_woken_while_it_is_fenced() -> None:
    assert await _request(EngineState.FENCED, "/wake_up") == [{"type": "passed"}]
    for state in (None, EngineState.UNRECONCILED, EngineState.DEAD):
        assert (await _request(state, "/wake_up"))[0]["status"] == 503
    for path in ("/sleep", "/resume", "/v1/wake_up"):
        assert (await _request(EngineState.FENCED, path))[0]["status"] == 503


@pytest.mark.parametrize("path", ["/healthy", "/v1/health", "/health/../v1/models"])
async def test_likenesses_are_not_open(path: str) -> None:
    assert (await _request(EngineState.FENCED, path))[0]["status"] == 503


async def test_websockets_are_closed_and_lifespan_passes() -> None:
    silent: list[dict[str, Any]] = [{}, {"extensions": {}}]
    for more in silent:
        (message,) = await _request(EngineState.FENCED, "/v1/realtime", "websocket", **more)
        assert (message["type"], message["code"]) == ("websocket.close", 1013)
    assert await _request(EngineState.FENCED, "", "lifespan") == [{"type": "passed"}]


async def test_a_websocket_is_told_why_and_that_it_may_try_again() -> None:
    gate = ReadinessGate(_app, lambda: (EngineState.FENCED, "kept by a test"))
    server = uvicorn.Server(uvicorn.Config(gate, lifespan="off", log_level="error"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        await until(lambda: server.started or serving.done(), 0.01)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(_UPGRADE)
        head, body = (await asyncio.wait_for(reader.read(), 5)).split(b"\r\n\r\n")
        writer.close()
        server.should_exit = True
        await serving
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in head.lower()
    assert json.loads(body)["error"]["message"] == "fenced: kept by a test"
