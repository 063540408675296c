"""What is answered: one JSON object, with the sentence of a refusal in it."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weightsync.errors import STATUS, Reason, WeightSyncError
from weightsync_server.ops.http_endpoint import HttpReply

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["answered", "error_document", "no_method", "no_route", "refusal", "wrong_request"]

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
    """Return a JSON object as the answer."""
    body = json.dumps(document).encode() + b"\n"
    return HttpReply(status, body, "application/json", tuple(headers))


def refusal(error: WeightSyncError) -> HttpReply:
    """Return an error as the answer: its sentence, its reason and when to try again."""
    status = _STATUS[STATUS[error.reason]]
    if error.reason in _PASSING:
        status = HTTPStatus.SERVICE_UNAVAILABLE
    headers = []
    if error.retry_after_s is not None:
        headers.append(("Retry-After", str(max(1, math.ceil(error.retry_after_s)))))
    if status is HTTPStatus.UNAUTHORIZED:
        headers.append(("WWW-Authenticate", "Bearer"))
    return answered(error_document(error), status, headers)


def error_document(error: WeightSyncError) -> dict[str, str]:
    """Return an error as JSON has it: sentence, reason, and what a program may want to know."""
    facts = {name: error.metadata[name] for name in _FACTS if name in error.metadata}
    return {"error": error.message, "reason": error.reason.value, **facts}


def no_route(paths: Iterable[str]) -> HttpReply:
    """Return the answer to a path that is none of ours."""
    sentence = f"there is no such path here; use one of {', '.join(paths)}"
    return wrong_request(HTTPStatus.NOT_FOUND, sentence)


def no_method(path: str, method: str) -> HttpReply:
    """Return the answer to a path of ours that takes another method."""
    sentence = f"{path} takes {method} and nothing else"
    return wrong_request(HTTPStatus.METHOD_NOT_ALLOWED, sentence, [("Allow", method)])


def wrong_request(
    status: HTTPStatus, sentence: str, headers: Iterable[tuple[str, str]] = ()
) -> HttpReply:
    """Return the answer to what is no request of ours, with a status that only HTTP has."""
    document = {"error": sentence, "reason": Reason.REQUEST_INVALID.value}
    return answered(document, status, headers)
