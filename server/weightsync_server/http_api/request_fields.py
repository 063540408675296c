"""What a path takes, and what a request says in its body and query."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from weightsync_server.ops.http_endpoint import HttpReply, HttpRequest

__all__ = ["BODY_BYTES", "Verb", "read_fields", "refuse_unknown", "refused"]

#: Bytes of a body: a path and some fields.
BODY_BYTES = 64 << 10


class Verb(NamedTuple):
    """What a path does.

    Attributes:
        method: The one HTTP method that it takes.
        needs: Methods of ours that its sender must be allowed to call: all of them, before any.
        run: Does it.
        body_bytes: Most bytes of a body.
        may_be_empty: Whether a body may be left out.
        is_long: Whether its answer may take long: a sender that leaves ends the waiting for it.
    """

    method: str
    needs: Sequence[str]
    run: Callable[[HttpRequest, Mapping[str, Any]], Awaitable[HttpReply]]
    body_bytes: int = BODY_BYTES
    may_be_empty: bool = True
    is_long: bool = False


def read_fields(request: HttpRequest, *, may_be_empty: bool) -> dict[str, Any]:
    """Return what a request says in its body, a JSON object or nothing, and in its query.

    Args:
        request: The request.
        may_be_empty: Whether its body may be left out.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    fields: Any = {}
    if request.body.strip() or not may_be_empty:
        try:
            fields = json.loads(request.body)
        except (ValueError, RecursionError):
            fields = None
    if not isinstance(fields, dict):
        empty = ", or empty" if may_be_empty else "; send {} where none is needed"
        raise refused(f"the body must be one JSON object in UTF-8{empty}")
    try:
        return fields | dict(parse_qsl(request.query, strict_parsing=bool(request.query)))
    except ValueError:
        raise refused("the query must be fields such as mode=keep, joined by &") from None


def refuse_unknown(fields: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse fields that there are not.

    Raises:
        WeightSyncError: REQUEST_INVALID, naming one.
    """
    unknown = sorted(fields.keys() - set(known))
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise refused(f"{unknown[0][:64]!r} is no field of this verb; {takes}")


def refused(sentence: str) -> WeightSyncError:
    """Return the error for a request that is wrong in itself."""
    return WeightSyncError(Reason.REQUEST_INVALID, sentence)
