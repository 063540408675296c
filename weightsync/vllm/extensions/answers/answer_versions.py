"""ASGI middleware: answers name the versions that made them, and requests the oldest they take."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weightsync.vllm.bridge.extension_points import AsgiApp
from weightsync.vllm.bridge.readiness_gate import send_error
from weightsync.vllm.extensions.answers.request_body import bounded_request
from weightsync.vllm.extensions.answers.request_versions import RequestVersions, watch
from weightsync.vllm.extensions.answers.spans import spans_text

if TYPE_CHECKING:
    from weightsync.vllm.bridge.live_versions import LiveVersions
    from weightsync.vllm.env import EngineSettings
    from weightsync.vllm.extensions.answers.request_bounds import Refusal


#: The data of an event where it is a JSON object; `[DONE]` is none.
_DATA = re.compile(rb"^data: ?\{", re.MULTILINE)
_OBJECT = re.compile(rb"(data: ?\{.*)\}([ \t]*(?:\r?\n|\Z))")


class LastEvent:
    """Keeps the last `data:` line with a JSON object, and what follows it, until more comes."""

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, body: bytes) -> bytes:
        """Take a piece of the stream; returns what may be sent before more is known."""
        body = self._kept + body
        starts = [match.start() for match in _DATA.finditer(body)]
        at = starts[-1] if starts else len(body)
        self._kept = body[at:]
        return body[:at]

    def release(self) -> bytes:
        kept, self._kept = self._kept, b""
        return kept

    def extended(self, members: Mapping[str, str]) -> bytes:
        """Return what was kept, its JSON with some members more."""
        if not members:
            return self.release()
        added = ",".join(f"{json.dumps(n)}:{json.dumps(value)}" for n, value in members.items())

        def add(match: re.Match[bytes]) -> bytes:
            comma = b"" if match[1].endswith(b"{") else b","
            return match[1] + comma + added.encode() + b"}" + match[2]

        return _OBJECT.sub(add, self.release(), count=1)


_VERSION = b"x-weightsync-version"
_SPANS = b"x-weightsync-spans"
#: In the last JSON of an event stream.
_MEMBER = "weightsync_version"
_SPANS_MEMBER = "weightsync_spans"


@functools.cache
def _counters() -> tuple[Any, Any] | None:
    """Make both counters on vLLM's own /metrics; a process can have them once."""
    # Imported by vLLM, if it is there.
    prometheus = sys.modules.get("prometheus_client")
    if prometheus is None:
        return None
    return (
        prometheus.Counter(
            "weightsync_refused_requests",
            "Requests that were answered with 409, by the bound that did not hold.",
            ["why"],
        ),
        prometheus.Counter(
            "weightsync_answers",
            "Answers with tokens or results: of one version or several, and computed with keys of "
            "their own version alone or of older ones too; unknown where nobody can tell.",
            ["versions", "keys"],
        ),
    )


class AnswerCounts:
    """Counts answers and refusals on vLLM's own /metrics, once the counters are registered."""

    def __init__(self) -> None:
        self._refused: Any = None
        self._answers: Any = None

    def register(self) -> None:
        if (counters := _counters()) is not None:
            self._refused, self._answers = counters

    def refused(self, why: str) -> None:
        if self._refused is not None:
            self._refused.labels(why).inc()

    async def answered(self, versions: RequestVersions) -> None:
        """Count an answer, if the engine worked for it."""
        if versions.refusal is not None:
            self.refused(versions.refusal.why)
            return
        if self._answers is None or not (numbers := await versions.so_far()):
            return
        spans = await versions.spans()
        older = "older" if any(one.keys for one in spans) else "own"
        several = "several" if len(numbers) > 1 else "one"
        self._answers.labels(several, older if spans else "unknown").inc()


class AnswerVersions:
    """Adds `x-weightsync-version` to every answer for which the engine has worked.

    A stream has the version of its first token there, and all of them in its last JSON. Nothing is
    kept back while the engine works on the request but the head of a stream, until its first event.
    A request whose bounds do not hold is answered with 409; where they cease to, the engine stops
    to work on it, and a stream that has begun ends with the error. Without an engine, everything is
    let through as it is.
    """

    def __init__(self) -> None:
        self.live: LiveVersions | None = None
        self._llm: Any = None
        self._counts = AnswerCounts()

    def follow(self, llm: Any, live: LiveVersions) -> None:
        watch(llm, live)
        self._llm, self.live = llm, live

    def start(self, llm: Any, live: LiveVersions, settings: EngineSettings) -> None:
        if settings.answer_versions:
            self._counts.register()
            self.follow(llm, live)

    def wrap(self, app: AsgiApp) -> AsgiApp:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            live = self.live
            if scope["type"] != "http" or live is None:
                await app(scope, receive, send)
                return
            try:
                bounds, scope, receive = await bounded_request(scope, receive)
            except ValueError as error:
                await send_error(send, 400, "BadRequestError", str(error), again=False)
                return
            if (refusal := bounds.refusal(live)) is not None:
                self._counts.refused(refusal.why)
                await _refuse(send, refusal)
                return
            versions = RequestVersions(live, bounds, self._llm)
            with versions.answering():
                try:
                    await app(scope, receive, _Answer(send, versions, _path(scope)))
                finally:
                    await versions.end()
            await self._counts.answered(versions)

        return answer


class _Answer:
    def __init__(self, send: Any, versions: RequestVersions, path: str) -> None:
        self._send = send
        self._versions = versions
        self._path = path
        #: The start of a stream, until its first event.
        self._start: Any = None
        self._last: LastEvent | None = None
        self._begun = self._over = False

    async def __call__(self, message: Any) -> None:
        if self._over or await self._refused():
            return
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and self._last is not None:
            await self._stream(message, self._last)
        else:
            await self._send(message)

    async def _refused(self) -> bool:
        """Whether the answer has become an error, which is sent in place of the rest."""
        lasting = self._versions.bounds.lasting
        refusal = await self._versions.broken() if lasting else None
        # Of what has begun and is no stream, the engine had made all.
        if refusal is None or (self._begun and self._last is None):
            return False
        self._over = True
        if self._begun:
            await self._send({"type": "http.response.body", "body": _error(refusal, self._path)})
        else:
            await _refuse(self._send, refusal)
        return True

    async def _begin(self, message: Any) -> None:
        if _streams(message.get("headers", ())):
            self._start, self._last = message, LastEvent()
            return
        self._begun = True
        named = _named(message, _VERSION, _text(await self._versions.so_far()))
        await self._send(_named(named, _SPANS, await self._spans()))

    async def _stream(self, message: Any, last: LastEvent) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            self._begun = True
            await self._send(_named(start, _VERSION, _text(await self._versions.first())))
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
        found = {_MEMBER: _text(await self._versions.so_far()), _SPANS_MEMBER: await self._spans()}
        return last.extended({name: text for name, text in found.items() if text})

    async def _spans(self) -> str:
        return spans_text(await self._versions.spans()) if self._versions.bounds.spans else ""


async def _refuse(send: Any, refusal: Refusal) -> None:
    await send_error(send, 409, "ConflictError", refusal.message, again=refusal.again)


def _error(refusal: Refusal, path: str) -> bytes:
    """Return the last event of a stream, as vLLM ends one that fails."""
    error = {"message": refusal.message, "type": "ConflictError", "code": 409}
    if path.endswith("/completions"):
        return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
    # Clients of these look at the name of an event.
    event = json.dumps({"type": "error", "error": error})
    return b"event: error\ndata: " + event.encode() + b"\n\n"


def _path(scope: Any) -> str:
    return str(scope.get("path", "")).rstrip("/")


def _streams(headers: Any) -> bool:
    fields = {name.lower(): value for name, value in headers}
    kind = fields.get(b"content-type", b"").lower()
    fixed = b"content-encoding" in fields or b"content-length" in fields
    return kind.startswith(b"text/event-stream") and not fixed


def _named(start: Any, name: bytes, text: str) -> Any:
    if not text:
        return start
    return {**start, "headers": [*start.get("headers", ()), (name, text.encode())]}


def _text(versions: tuple[int, ...]) -> str:
    return ",".join(map(str, versions))
