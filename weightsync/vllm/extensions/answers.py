"""ASGI middleware: answers name the versions that made them, and requests the oldest they take."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from weightsync.vllm.bridge.extension_points import AsgiApp
from weightsync.vllm.bridge.readiness_gate import send_error

if TYPE_CHECKING:
    from weightsync.vllm.bridge.live_versions import LiveInterval, LiveVersions
    from weightsync.vllm.env import EngineSettings


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

    def extended(self, name: str, value: str) -> bytes:
        member = f"{json.dumps(name)}:{json.dumps(value)}".encode()

        def add(match: re.Match[bytes]) -> bytes:
            comma = b"" if match[1].endswith(b"{") else b","
            return match[1] + comma + member + b"}" + match[2]

        return _OBJECT.sub(add, self.release(), count=1)


#: The HTTP request that the running task answers.
_answering: ContextVar[RequestVersions | None] = ContextVar("weightsync_answering", default=None)


class RequestVersions:
    """Knows, for an HTTP request, the versions that have sampled tokens for it.

    Where vLLM does not label outputs, which is so in 0.26 and for embeddings, scores and the like,
    it is all versions that were live since vLLM got the request.
    """

    def __init__(self, live: LiveVersions) -> None:
        self._live = live
        self._since: LiveInterval | None = None
        #: For each of vLLM's requests: the labels of its outputs, each with its first token.
        self._labels: list[Sequence[tuple[str, int]] | None] = []
        self._unfinished: list[str] = []
        self._requests: Mapping[str, Any] = {}

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        token = _answering.set(self)
        try:
            yield
        finally:
            _answering.reset(token)

    def add(self, request: Any, requests: Mapping[str, Any]) -> None:
        """Add one of the engine's requests; `requests` is vLLM's state of open ones, by id."""
        if self._since is None:
            self._since = self._live.current
        self._requests = requests
        self._unfinished.append(request.request_id)
        pools = getattr(request, "pooling_params", None) is not None
        state = requests.get(request.request_id)
        # The list itself grows while vLLM generates; it outlives the state.
        self._labels.append(None if pools else getattr(state, "weight_version_starts", None))

    def finished(self) -> bool:
        """Whether the engine was asked for something and has done all of it."""
        while self._unfinished and self._unfinished[-1] not in self._requests:
            self._unfinished.pop()
        return self._since is not None and not self._unfinished

    async def so_far(self) -> tuple[int, ...]:
        """Return the numbers of all versions that have contributed, each once, in order.

        Empty if none has, or one has no known number.
        """
        return await self._named({label for starts in self._labels for label, _ in starts or ()})

    async def first(self) -> tuple[int, ...]:
        """Return the version of each sequence's first token, as `so_far` does."""
        return await self._named({starts[0][0] for starts in self._labels if starts})

    async def _named(self, labels: set[str]) -> tuple[int, ...]:
        if self._since is None:
            return ()
        if self._live.current.label in labels:
            # Its tokens come behind the answers of the ranks, so that these are here as well.
            await self._live.settled()
        intervals = tuple(self._since.walk())
        if None in self._labels or not _tell_apart(intervals):
            return _numbers(interval.version for interval in intervals)
        if not labels <= {interval.label for interval in intervals}:
            return ()
        return _numbers(_contributed(intervals, labels))


def watch(llm: Any, live: LiveVersions) -> None:
    """Have every request of an AsyncLLM be known to the HTTP request that it is made for.

    Costs a call for each request, and none for tokens. `live` is told of every new label.
    """
    processor = llm.output_processor
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        if (answer := _answering.get()) is not None:
            answer.add(request, processor.request_states)

    processor.add_request = add_request
    if (update := getattr(llm, "update_weight_version", None)) is None:
        return

    async def update_weight_version(new_version: str) -> None:
        live.relabel(new_version)
        await update(new_version)

    llm.update_weight_version = update_weight_version


def _tell_apart(intervals: Sequence[LiveInterval]) -> bool:
    """Whether each label is of one version: a trainer's own may be anything."""
    versions: dict[str, int] = {}
    return all(
        interval.labelled
        and versions.setdefault(interval.label, interval.version) == interval.version
        for interval in intervals
    )


def _contributed(intervals: Sequence[LiveInterval], labels: set[str]) -> Iterator[int]:
    """Yield versions with those labels; on both sides of a switch that came between two steps."""
    sampled = [interval.label in labels for interval in intervals]
    for at, interval in enumerate(intervals):
        before = at > 0 and _blurred(interval) and sampled[at - 1]
        after = at + 1 < len(intervals) and _blurred(intervals[at + 1]) and sampled[at + 1]
        if sampled[at] or before or after:
            yield interval.version


def _blurred(interval: LiveInterval) -> bool:
    # One that is not settled has no tokens yet: they come behind the answers of the ranks.
    return interval.between_steps and not interval.pending


def _numbers(versions: Iterator[int]) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(versions))
    return () if 0 in found else found


_VERSION = b"x-weightsync-version"
_MINIMUM = b"x-weightsync-min-version"
#: In the last JSON of an event stream.
_MEMBER = "weightsync_version"
#: More digits than any version has.
_MOST_DIGITS = 20


class AnswerVersions:
    """Adds `x-weightsync-version` to every answer for which the engine has worked.

    A stream has the version of its first token there, and all of them in its last JSON. Nothing is
    kept back while the engine works on the request but the head of a stream, until its first event.
    Without an engine, everything is let through as it is.
    """

    def __init__(self) -> None:
        self.live: LiveVersions | None = None

    def follow(self, llm: Any, live: LiveVersions) -> None:
        watch(llm, live)
        self.live = live

    def start(self, llm: Any, live: LiveVersions, settings: EngineSettings) -> None:
        if settings.answer_versions:
            self.follow(llm, live)

    def wrap(self, app: AsgiApp) -> AsgiApp:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            live = self.live
            if scope["type"] != "http" or live is None:
                await app(scope, receive, send)
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
                await app(scope, receive, _Answer(send, versions))

        return answer


class _Answer:
    def __init__(self, send: Any, versions: RequestVersions) -> None:
        self._send = send
        self._versions = versions
        #: The start of a stream, until its first event.
        self._start: Any = None
        self._last: LastEvent | None = None

    async def __call__(self, message: Any) -> None:
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
