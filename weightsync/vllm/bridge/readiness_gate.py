"""The gate before vLLM's HTTP API: 503 with the reason while weights are not proved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.engine import EngineState
from weightsync.vllm.answers.error_response import send_error
from weightsync.vllm.bridge.resume_guard import refusals_of_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Gate", "GateState"]

#: Paths that are answered in every state: they tell about the process, not from the weights.
_OPEN_PATHS = ("/health", "/metrics", "/version")
#: A pause is short, so its requests wait in vLLM's queue.
_OPEN_STATES = (EngineState.SERVING, EngineState.PAUSED)


class GateState:
    """What the gate asks. Closed until an engine is given.

    Attributes:
        condition: Returns the engine's state and the reason for it.
    """

    def __init__(self) -> None:
        self.condition: Callable[[], tuple[EngineState, str]] = lambda: (
            EngineState.UNRECONCILED,
            "vLLM is starting",
        )


class Gate:
    """ASGI middleware that lets requests pass only while the engine serves what is proved.

    In a pause of what is proved they pass, too, and wait.

    Args:
        app: The application behind it.
        state: What to ask.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], state: GateState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] not in ("http", "websocket") or _open(scope):
            await self._app(scope, receive, send)
            return
        state, reason = self._state.condition()
        # Who generates with what nobody has proved says so, also in a pause.
        if state in _OPEN_STATES and not reason:
            with refusals_of_request() as refused:
                await self._app(scope, receive, _Answer(send, refused).send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1013, "reason": reason[:100]})
        else:
            await send_error(send, 503, "ServiceUnavailableError", f"{state}: {reason}", again=True)


class _Answer:
    """Sends the answer of vLLM, or why a resume was refused in its place.

    Args:
        send: ASGI's.
        refused: What was refused.
    """

    def __init__(self, send: Any, refused: list[str]) -> None:
        self._send = send
        self._refused = refused
        self._replaced = False

    async def send(self, message: Any) -> None:
        """Pass a message on, unless another answer has been sent."""
        if message["type"] == "http.response.start" and self._refused:
            self._replaced = True
            await send_error(self._send, 409, "ConflictError", self._refused[0], again=False)
        elif not self._replaced:
            await self._send(message)


def _open(scope: Any) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
    return path in _OPEN_PATHS
