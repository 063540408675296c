"""From protobuf messages to the client's types; nothing of protobuf's is left in them.

A field is found in the message by its name; seconds, whose names end in `_s`, are a duration there
without that. What is there or not, such as `commit_time`, is None where it is not.
"""

from __future__ import annotations

import enum
import types as builtin_types
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from datetime import UTC
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import types

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
    from google.protobuf.message import Message


T = TypeVar("T")

#: What the protocol calls otherwise.
_OTHER_NAMES = {(types.ApplyPlan, "write_bytes"): "bytes"}
#: What stands beside the message.
_BESIDE = {(types.ApplyReport, "engines")}


def from_message(kind: type[T], m: Message) -> T:
    getters = _getters(kind, m.DESCRIPTOR)  # type: ignore[arg-type] # a class can be hashed
    return kind(**{name: get(m) for name, get in getters.items()})


def to_tensor(m: pb.TensorInfo) -> types.TensorInfo:
    spec = m.spec
    return types.TensorInfo(
        spec.name, spec.dtype, tuple(spec.shape), m.shard, spec.begin, spec.end, m.digest
    )


def to_report(m: pb.ApplyReport, engines: Iterable[pb.EngineReport] = ()) -> types.ApplyReport:
    every = tuple(from_message(types.EngineReport, one) for one in engines)
    return replace(from_message(types.ApplyReport, m), engines=every)


def to_rollback(m: pb.RollbackResponse) -> types.RollbackReport:
    return types.RollbackReport(to_report(m.report, m.engines), m.rejected_version)


@cache
def _getters(kind: Any, descriptor: Descriptor) -> dict[str, Callable[[Any], Any]]:
    """Return what gets each field of a dataclass from such messages."""
    hints = get_type_hints(kind)
    return {
        field.name: _getter(descriptor.fields_by_name[_name(kind, field.name)], hints[field.name])
        for field in fields(kind)
        if (kind, field.name) not in _BESIDE
    }


def _name(kind: Any, name: str) -> str:
    return _OTHER_NAMES.get((kind, name)) or name.removesuffix("_s")


def _getter(field: FieldDescriptor, hint: Any) -> Callable[[Any], Any]:
    name = field.name
    if get_origin(hint) is builtin_types.UnionType:
        some = _converter(field, get_args(hint)[0])
        return lambda m: some(getattr(m, name)) if m.HasField(name) else None
    convert = _converter(field, hint)
    return lambda m: convert(getattr(m, name))


def _converter(field: FieldDescriptor, hint: Any) -> Callable[[Any], Any]:
    if get_origin(hint) is tuple:
        one = _converter(field, get_args(hint)[0])
        return lambda values: tuple(map(one, values))
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(from_message, hint)
    if field.message_type is Duration.DESCRIPTOR:
        return lambda duration: duration.ToNanoseconds() / 1e9
    if field.message_type is Timestamp.DESCRIPTOR:
        return lambda timestamp: timestamp.ToDatetime(tzinfo=UTC)
    if field.enum_type is not None:
        return partial(_enum, hint, _names(field.enum_type))
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return partial(_choice, hint)
    # Of what a message has as a map, a copy.
    made: Callable[[Any], Any] = get_origin(hint) or hint
    return made


def _enum(kind: type[enum.StrEnum], names: dict[int, str], value: int) -> enum.StrEnum:
    # A value of a newer server has no name here.
    try:
        return kind(names[value])
    except (KeyError, ValueError):
        return kind("unspecified")


def _choice(kind: type[enum.StrEnum], text: str) -> enum.StrEnum:
    try:
        return kind(text)
    except ValueError:
        return kind("unspecified")


@cache
def _names(descriptor: EnumDescriptor) -> dict[int, str]:
    values = {v.number: v.name for v in descriptor.values}
    prefix = values[0].removesuffix("UNSPECIFIED")
    return {number: name.removeprefix(prefix).lower() for number, name in values.items()}
