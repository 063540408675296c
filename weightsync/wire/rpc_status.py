"""Errors on the wire: `WeightSyncError` to a rich gRPC status and back.

Details are those of https://google.aip.dev/193: ErrorInfo always, RetryInfo where a retry helps.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message


DOMAIN = "weightsync"
_DETAILS_KEY = "grpc-status-details-bin"
#: A status travels twice in the trailers, which peers refuse above 8 KiB.
_MAX_MESSAGE_BYTES = 2000


def _cut(text: str) -> str:
    data = text.encode(errors="backslashreplace")
    if len(data) <= _MAX_MESSAGE_BYTES:
        return data.decode()
    return data[: _MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def to_status(error: WeightSyncError) -> grpc.Status:
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.value, domain=DOMAIN, metadata=error.metadata
    )
    details = [_packed(info)]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(retry))
    code: int = error.code.value[0]
    return rpc_status.to_status(
        status_pb2.Status(code=code, message=_cut(error.message), details=details)
    )


def as_sent(error: WeightSyncError) -> WeightSyncError:
    """Return an error as the other side of a call has it: a copy, with its sentence cut."""
    return WeightSyncError(
        error.reason,
        _cut(error.message),
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def release_with_call(error: BaseException) -> None:
    """Let an exception that ends the present call keep nothing alive once the call has ended.

    grpc.aio keeps what `context.abort` raises in the call's state, and the frames of its traceback
    keep that state: a cycle of some 10 KB for each refused call. `error` is on its way to grpc.aio,
    whose task for the call is the present one.
    """
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(partial(_release, error))


def _release(error: BaseException, _task: asyncio.Task[Any]) -> None:
    error.__traceback__ = error.__context__ = None


class ErrorDetails(NamedTuple):
    """What the details of a failed call say; `reason` is empty where they are not ours."""

    message: str
    reason: str
    metadata: dict[str, str]
    retry_after_s: float | None


def error_details(call: Any) -> ErrorDetails | None:
    """Return what a failed call of grpc.aio or the sync API tells; None: nothing readable."""
    trailers = call.trailing_metadata() or ()
    data = next((value for key, value in trailers if key == _DETAILS_KEY), b"")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    reason, metadata, seconds = "", {}, None
    try:
        status = status_pb2.Status.FromString(data)
        for detail in status.details:
            if detail.Unpack(info) and info.domain == DOMAIN:
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(retry):
                seconds = retry.retry_delay.ToNanoseconds() / 1e9
    except DecodeError:
        return None
    return ErrorDetails(status.message, reason, metadata, seconds) if status.details else None


def from_call(call: Any) -> WeightSyncError | None:
    """Return the error that the other side raised; None when it was not one of ours."""
    details = error_details(call)
    if details is None or details.reason not in Reason.__members__:
        return None
    return WeightSyncError(
        Reason[details.reason],
        details.message,
        metadata=details.metadata,
        retry_after_s=details.retry_after_s,
    )
