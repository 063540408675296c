"""A JSON object as messages carry it, unchanged, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct, Value

from weightsync.errors import invalid_request

#: From here on doubles have no fractions, and do not have every whole number.
_WHOLE = 2.0**53


def to_struct(what: str, value: Mapping[str, Any]) -> Struct:
    """Return a mapping, or refuse what would not come out as it goes in; `what` names it."""
    struct = Struct()
    try:
        plain = json.loads(json.dumps(dict(value), allow_nan=False))
        struct.update(plain)
        # Numbers are carried as doubles, and messages may be nested 100 deep, with the one around.
        carried = Value(struct_value=struct).SerializeToString()
        same = MessageToDict(Value.FromString(carried).struct_value) == plain
    except (TypeError, ValueError, OverflowError, RecursionError, DecodeError) as error:
        raise invalid_request(
            f"{what} is not a JSON object that can be sent ({error}); give text, finite numbers, "
            "lists and objects, nested at most 30 deep"
        ) from None
    if not same:
        raise invalid_request(
            f"{what} has a whole number above 2^53, which would be rounded; send it as text"
        )
    return struct


def from_struct(struct: Struct) -> dict[str, Any]:
    """Return what a message carries; whole numbers are whole again."""
    found: dict[str, Any] = _whole(MessageToDict(struct))
    return found


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _WHOLE:
        return int(value)
    return value
