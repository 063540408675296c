"""Messages of HTTP: fields of a request, JSON answers, refusals, and server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl

from weightsync.errors import STATUS, Reason, WeightSyncError, invalid_request
from weightsync_server.http.http_server import HttpReply, HttpRequest
from weightsync_server.ops.tasks import cancel_tasks

#: By gRPC status. What may be good a moment later is a 5xx: that is what callers try again.
_STATUS: Mapping[str, HTTPStatus] = MappingProxyType(
    {
        "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
        "OUT_OF_RANGE": HTTPStatus.BAD_REQUEST,
        "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
        "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
        "NOT_FOUND": HTTPStatus.NOT_FOUND,
        "ALREADY_EXISTS": HTTPStatus.CONFLICT,
        "FAILED_PRECONDITION": HTTPStatus.CONFLICT,
        "ABORTED": HTTPStatus.CONFLICT,
        "RESOURCE_EXHAUSTED": HTTPStatus.SERVICE_UNAVAILABLE,
        "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
        "CANCELLED": HTTPStatus.SERVICE_UNAVAILABLE,
        "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
        "DATA_LOSS": HTTPStatus.INTERNAL_SERVER_ERROR,
        "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
    }
)
#: Of these the server frees itself, or the operator does, while the caller tries again.
_PASSING = frozenset({Reason.ENGINE_FENCED, Reason.ENGINE_ASLEEP})
#: Of a job: where its class has failed, on which of our refusals, and what it had committed.
_FACTS = ("traceback", "cause", "version")


def answered(
    document: Mapping[str, Any],
    status: HTTPStatus = HTTPStatus.OK,
    headers: Iterable[tuple[str, str]] = (),
) -> HttpReply:
    body = json.dumps(document).encode() + b"\n"
    return HttpReply(status, body, "application/json", tuple(headers))


def refusal(error: WeightSyncError, status: HTTPStatus | None = None) -> HttpReply:
    """Return what an error is answered with; a `status` of None is that of its reason."""
    if error.reason in _PASSING:
        status = HTTPStatus.SERVICE_UNAVAILABLE
    status = status or _STATUS[STATUS[error.reason]]
    headers = []
    if error.retry_after_s is not None:
        headers.append(("Retry-After", str(max(1, math.ceil(error.retry_after_s)))))
    if status is HTTPStatus.UNAUTHORIZED:
        headers.append(("WWW-Authenticate", "Bearer"))
    return answered(error_document(error), status, headers)


def error_document(error: WeightSyncError) -> dict[str, str]:
    facts = {name: error.metadata[name] for name in _FACTS if name in error.metadata}
    return {"error": error.message, "reason": error.reason.value, **facts}


def no_route(paths: Iterable[str]) -> HttpReply:
    sentence = f"there is no such path; use one of {', '.join(paths)}"
    return wrong_request(HTTPStatus.NOT_FOUND, sentence)


def no_method(path: str, method: str) -> HttpReply:
    sentence = f"{path} accepts only {method}"
    return wrong_request(HTTPStatus.METHOD_NOT_ALLOWED, sentence, [("Allow", method)])


def wrong_request(
    status: HTTPStatus, sentence: str, headers: Iterable[tuple[str, str]] = ()
) -> HttpReply:
    """Return the answer to what is no request of ours, with a status that only HTTP has."""
    document = {"error": sentence, "reason": Reason.REQUEST_INVALID.value}
    return answered(document, status, headers)


#: Bytes of a body: a path and some fields.
BODY_BYTES = 64 << 10


class Verb(NamedTuple):
    """What a path does.

    Its sender must be allowed to call all methods in `needs`, before any is called. `body_bytes` is
    the most of a body. If `is_long`, a sender that leaves ends the waiting for its answer. What
    `is_public` is answered to anyone who can connect: it says nothing of this server.
    """

    method: str
    needs: Sequence[str]
    run: Callable[[HttpRequest, Mapping[str, Any]], Awaitable[HttpReply]]
    body_bytes: int = BODY_BYTES
    may_be_empty: bool = True
    is_long: bool = False
    is_public: bool = False


def read_fields(request: HttpRequest, *, may_be_empty: bool) -> dict[str, Any]:
    """Return what a request says in its body, a JSON object or nothing, and in its query.

    Raises REQUEST_INVALID, also for an empty body unless it `may_be_empty`.
    """
    fields: Any = {}
    if request.body.strip() or not may_be_empty:
        try:
            fields = json.loads(request.body)
            # An escape may stand for half a character, which no message of a call can hold.
            json.dumps(fields, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            fields = None
    if not isinstance(fields, dict):
        empty = ", or empty" if may_be_empty else "; send {} where none is needed"
        raise invalid_request(f"the body must be one JSON object in UTF-8{empty}")
    try:
        return fields | dict(parse_qsl(request.query, strict_parsing=bool(request.query)))
    except ValueError:
        raise invalid_request("the query must be fields such as mode=keep, joined by &") from None


def refuse_unknown(fields: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise REQUEST_INVALID for a field that is not `known`, naming it."""
    unknown = sorted(fields.keys() - set(known))
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise invalid_request(f"{unknown[0][:64]!r} is not a field of this verb; {takes}")


#: Seconds without an event after which a comment is sent: proxies end connections that are silent.
SILENCE_S = 10.0
COMMENT = b":\n\n"


class EventStream:
    """Yields one event for each message; a failure is the last one, with its sentence in it.

    `others` follow the `first` message, and are closed with this.
    """

    def __init__(
        self,
        first: Any,
        others: AsyncGenerator[Any, None],
        document: Callable[[Any], Mapping[str, Any]],
    ) -> None:
        self._first: Any = first
        self._others = others
        self._document = document
        self._next: asyncio.Future[Any] | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        if self._first is not None:
            message, self._first = self._first, None
            return _event(self._document(message))
        self._next = self._next or asyncio.ensure_future(anext(self._others, None))
        done, _ = await asyncio.wait([self._next], timeout=SILENCE_S)
        if not done:
            return COMMENT
        found, self._next = self._next, None
        try:
            message = found.result()
        except WeightSyncError as error:
            self._ended = True
            return _event(error_document(error))
        if message is None:
            raise StopAsyncIteration
        return _event(self._document(message))

    async def aclose(self) -> None:
        self._ended = True
        await cancel_tasks(self._next)
        await self._others.aclose()


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
