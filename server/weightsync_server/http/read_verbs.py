"""What is read over HTTP: the same as over gRPC, as JSON."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from weightsync.errors import invalid_request
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.http import http_messages
from weightsync_server.http.http_messages import Verb, refuse_unknown
from weightsync_server.http.http_server import HttpReply, HttpRequest
from weightsync_server.usecases.methods import LIST_APPLIES

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from weightsync_server.http.http_calls import HttpCalls

#: Applies that are listed where the request does not say how many.
_LAST = 20


class ReadVerbs:
    """Answers requests that change nothing, about `model`, the one model of this server."""

    def __init__(self, calls: HttpCalls, model: str) -> None:
        self._calls, self._model = calls, model
        path = "/v1/weightsync/applies"
        self.verbs: Mapping[str, Verb] = {path: Verb("GET", (LIST_APPLIES,), self._applies)}

    async def _applies(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        refuse_unknown(fields, ("last", "version", "page_token"))
        ask = pb.ListAppliesRequest(
            model=self._model,
            page_size=_number(fields, "last", _LAST),
            version=_number(fields, "version", 0),
            page_token=str(fields.get("page_token", "")),
        )
        return http_messages.answered(
            plain_document(await self._calls.call(LIST_APPLIES, ask, request))
        )


def _number(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = str(fields.get(name, default))
    if not value.isascii() or not value.isdecimal() or int(value[:20]) >= 2**32:
        raise invalid_request(
            f"{name} must be a whole number from 0 to 4294967295, not {value[:20]!r}"
        )
    return int(value)


def plain_document(message: Message) -> dict[str, Any]:
    """Return all fields of a message as JSON has them.

    A duration is in seconds and its name ends in `_s`, a time is text in ISO 8601, a choice its
    name in small letters. A message, or a duration or time, that is not set is null. The values of
    a map are plain.
    """
    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        is_duration = field.message_type is Duration.DESCRIPTOR
        name = f"{field.name}_s" if is_duration else field.name
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            document[name] = dict(value)
        elif field.is_repeated:
            document[name] = [_plain(field, one) for one in value]
        elif field.message_type is not None and not message.HasField(field.name):
            document[name] = None
        else:
            document[name] = _plain(field, value)
    return document


def _plain(field: Any, value: Any) -> Any:
    if isinstance(value, Duration):
        return value.ToNanoseconds() / 1e9
    if isinstance(value, Timestamp):
        return value.ToDatetime(tzinfo=dt.UTC).isoformat()
    if field.message_type is not None:
        return plain_document(value)
    if field.enum_type is not None:
        values = field.enum_type.values_by_number
        prefix = values[0].name.removesuffix("UNSPECIFIED")
        return values[value].name.removeprefix(prefix).lower() if value in values else "unspecified"
    return value
