"""The gate before vLLM's HTTP API: 503 with the reason while weights are not proved."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from weightsync.engine import EngineState
from weightsync.vllm.bridge.resume_guard import refusals_of_request


async def send_error(send: Any, status: int, kind: str, message: str, *, again: bool) -> None:
    """Answer with an error of the OpenAI API's type `kind`; `again`: it is worth another try."""
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    await send_json(send, status, body, [(b"retry-after", b"1")] if again else ())


async def send_json(
    send: Any, status: int, body: bytes, more: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Answer with a JSON document, and with some headers more."""
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


#: Paths that are answered in every state: they tell about the process, not from the weights.
_OPEN_PATHS = ("/health", "/metrics", "/version")
#: Passes a fence: what sleeps could not be proved, and waking up it takes no step; `SleepGuard`.
_WAKE_UP = "/wake_up"
#: The extension of ASGI by which a websocket is refused with an answer.
_HANDSHAKE = "websocket.http.response"
#: A pause is short, so its requests wait in vLLM's queue.
_OPEN_STATES = (EngineState.SERVING, EngineState.PAUSED)


def starting() -> tuple[EngineState, str]:
    """Return what a gate is told until there is an engine; it is closed."""
    return EngineState.UNRECONCILED, "vLLM is starting"


class ReadinessGate:
    """ASGI middleware that lets requests pass only while the engine serves what is proved.

    In its pauses they pass, too, and wait. One that sleeps may be woken while it is fenced.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        condition: Callable[[], tuple[EngineState, str]],
    ) -> None:
        self._app = app
        self._condition = condition

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or _open(scope):
            await self._app(scope, receive, send)
            return
        state, reason = self._condition()
        # Who generates with what nobody has proved says so, also in a pause.
        if state in _OPEN_STATES and not reason:
            with refusals_of_request() as refused:
                await self._app(scope, receive, _Answer(send, refused).send)
        elif state is EngineState.FENCED and _path(scope) == _WAKE_UP:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket" and _HANDSHAKE not in scope.get("extensions", {}):
            # Its server answers 403, without a word.
            await receive()
            await send({"type": "websocket.close", "code": 1013, "reason": reason[:100]})
        else:
            answer = _in_handshake(send) if scope["type"] == "websocket" else send
            message = f"{state}: {reason}"
            await send_error(answer, 503, "ServiceUnavailableError", message, again=True)


def _in_handshake(send: Any) -> Callable[[Any], Awaitable[None]]:
    async def answer(message: Any) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return answer


class _Answer:
    """Sends the answer of vLLM, or why a resume was refused in its place."""

    def __init__(self, send: Any, refused: list[str]) -> None:
        self._send = send
        self._refused = refused
        self._replaced = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start" and self._refused:
            self._replaced = True
            await send_error(self._send, 409, "ConflictError", self._refused[0], again=False)
        elif not self._replaced:
            await self._send(message)


def _open(scope: Any) -> bool:
    return _path(scope) in _OPEN_PATHS


def _path(scope: Any) -> str:
    path: str = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
    return path
