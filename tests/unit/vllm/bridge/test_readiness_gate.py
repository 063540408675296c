"""Requests pass the gate only while the engine serves or is paused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weightsync.engine import EngineState
from weightsync.vllm.bridge.readiness_gate import Gate, GateState


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "passed"})


async def _request(
    state: EngineState | None,
    path: str,
    kind: str = "http",
    reason: str | None = None,
    **more: Any,
) -> Any:
    gate_state = GateState()
    if state is not None:
        default = "" if state in ("serving", "paused") else "because of that"
        gate_state.condition = lambda: (state, default if reason is None else reason)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await Gate(_app, gate_state)({"type": kind, "path": path, **more}, receive, send)
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


@pytest.mark.parametrize("path", ["/healthy", "/v1/health", "/health/../v1/models"])
async def test_likenesses_are_not_open(path: str) -> None:
    assert (await _request(EngineState.FENCED, path))[0]["status"] == 503


async def test_websockets_are_closed_and_lifespan_passes() -> None:
    (message,) = await _request(EngineState.FENCED, "/v1/realtime", "websocket")
    assert (message["type"], message["code"]) == ("websocket.close", 1013)
    assert await _request(EngineState.FENCED, "", "lifespan") == [{"type": "passed"}]
