"""ASGI middleware: answers name the versions that made them, and requests the oldest they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.vllm.answers.error_response import send_error
from weightsync.vllm.answers.last_event import LastEvent
from weightsync.vllm.answers.request_versions import RequestVersions, watch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from weightsync.vllm.answers.live_versions import LiveVersions

__all__ = ["AnswerState", "AnswerVersions"]

_VERSION = b"x-weightsync-version"
_MINIMUM = b"x-weightsync-min-version"
#: In the last JSON of an event stream.
_MEMBER = "weightsync_version"
#: More digits than any version has.
_MOST_DIGITS = 20


class AnswerState:
    """What the middleware asks; without an engine it lets everything through as it is.

    Attributes:
        live: What the engine serves.
    """

    def __init__(self) -> None:
        self.live: LiveVersions | None = None

    def follow(self, llm: Any, live: LiveVersions) -> None:
        """Name the versions of an AsyncLLM from now on."""
        watch(llm, live)
        self.live = live


class AnswerVersions:
    """Adds `x-weightsync-version` to every answer for which the engine has worked.

    A stream has the version of its first token there, and all of them in its last JSON. Nothing is
    kept back while the engine works on the request but the head of a stream, until its first event.

    Args:
        app: The application behind it.
        state: What to ask.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], state: AnswerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or refuse it."""
        live = self._state.live
        if scope["type"] != "http" or live is None:
            await self._app(scope, receive, send)
            return
        try:
            minimum = _minimum(scope["headers"])
        except ValueError as error:
            await send_error(send, 400, "BadRequestError", str(error), again=False)
            return
        if minimum > live.version:
            await _refuse_older(send, live.version, minimum)
            return
        versions = RequestVersions(live)
        with versions.answering():
            await self._app(scope, receive, _Answer(send, versions))


class _Answer:
    """ASGI's `send` of one answer.

    Args:
        send: The server's.
        versions: Of this request.
    """

    def __init__(self, send: Any, versions: RequestVersions) -> None:
        self._send = send
        self._versions = versions
        #: The start of a stream, until its first event.
        self._start: Any = None
        self._last: LastEvent | None = None

    async def __call__(self, message: Any) -> None:
        """Send a message on."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and self._last is not None:
            await self._stream(message, self._last)
        else:
            await self._send(message)

    async def _begin(self, message: Any) -> None:
        if _streams(message.get("headers", ())):
            self._start, self._last = message, LastEvent()
        else:
            await self._send(_named(message, await self._versions.so_far()))

    async def _stream(self, message: Any, last: LastEvent) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(_named(start, await self._versions.first()))
        body = message.get("body", b"")
        if not message.get("more_body"):
            body = last.feed(body) + await self._extended(last)
        elif self._versions.finished():
            # Whatever comes now has been made already, so that nobody waits for it.
            body = last.feed(body)
            if not body:
                return
        else:
            body = last.release() + body
        await self._send({**message, "body": body})

    async def _extended(self, last: LastEvent) -> bytes:
        versions = await self._versions.so_far()
        return last.extended(_MEMBER, _text(versions)) if versions else last.release()


def _minimum(headers: Any) -> int:
    values = [value for name, value in headers if name == _MINIMUM]
    if not values:
        return 0
    text = values[0].decode("latin-1").strip()
    if len(values) > 1 or not (text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS):
        found = b", ".join(values)[:100].decode("latin-1")
        msg = f"{_MINIMUM.decode()} is {found!r}; send it once, as one whole number such as 41"
        raise ValueError(msg)
    return int(text)


async def _refuse_older(send: Any, version: int, minimum: int) -> None:
    what = f"version {version} is live" if version else "the live weights have no number yet"
    message = (
        f"{what}, and {_MINIMUM.decode()} asks for {minimum} or a newer one; try again when that "
        "has been applied"
    )
    await send_error(send, 409, "ConflictError", message, again=True)


def _streams(headers: Any) -> bool:
    """Whether it is an event stream that can be read."""
    fields = {name.lower(): value for name, value in headers}
    kind = fields.get(b"content-type", b"").lower()
    fixed = b"content-encoding" in fields or b"content-length" in fields
    return kind.startswith(b"text/event-stream") and not fixed


def _named(start: Any, versions: tuple[int, ...]) -> Any:
    if not versions:
        return start
    named = (_VERSION, _text(versions).encode())
    return {**start, "headers": [*start.get("headers", ()), named]}


def _text(versions: tuple[int, ...]) -> str:
    return ",".join(map(str, versions))
