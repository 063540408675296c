"""Which version a partial push keeps the absent tensors of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason
from weightsync.model.digest import signature_of
from weightsync_client.errors import ClientError, refuse
from weightsync_client.rpc import calls
from weightsync_client.rpc.validate import whole_number
from weightsync_client.rpc.version_tensors import version_tensors
from weightsync_client.snapshot.snapshot import BaseVersion
from weightsync_client.types import Serving

if TYPE_CHECKING:
    from weightsync_client.options import PushOptions, Timeouts
    from weightsync_client.push.history import PushHistory
    from weightsync_client.rpc.retry import Invoke

__all__ = ["NamedBase", "base_of_part", "check_part", "named_base"]


class NamedBase(NamedTuple):
    """Which version one of several processes keeps the absent tensors of.

    Attributes:
        version: Its number; 0: that of the others, or the live one.
        content_digest: What it must be; empty: not known here.
    """

    version: int
    content_digest: str


def check_part(options: PushOptions) -> None:
    """Check what is said of a base.

    Raises:
        ClientError: REQUEST_INVALID: a base is named for a push of all of them.
    """
    wanted = whole_number("base", options.get("base", 0))
    if wanted and not options.get("partial"):
        raise refuse(
            Reason.REQUEST_INVALID,
            f"base={wanted} is given, but partial=True is not: a push of all tensors keeps none",
        )


def _wanted(
    options: PushOptions, history: PushHistory, invoke: Invoke, timeouts: Timeouts, model: str
) -> int:
    """Return the base that the caller names, or the default one; 0: the live version.

    What was rejected is no default: its tensors would be refused again, or served all the same.
    """
    if wanted := options.get("base", 0):
        return wanted
    if history.committed:
        try:
            version, _, _ = invoke(calls.get_version(model, history.committed, timeouts))
        except ClientError as error:
            if error.reason is not Reason.VERSION_UNKNOWN:
                raise
        else:
            if version.serving is Serving.REJECTED:
                return 0
    return history.committed


def named_base(
    options: PushOptions, history: PushHistory, invoke: Invoke, timeouts: Timeouts, model: str
) -> NamedBase:
    """Return the version that the caller names, else the last one that this client has committed.

    Args:
        options: Of the push.
        history: Of the client.
        invoke: Sends unary calls.
        timeouts: Of the client.
        model: Name of the model.
    """
    wanted = _wanted(options, history, invoke, timeouts, model)
    return NamedBase(wanted, history.committed_digest if wanted == history.committed else "")


def base_of_part(
    options: PushOptions, history: PushHistory, invoke: Invoke, timeouts: Timeouts, model: str
) -> BaseVersion:
    """Return the version whose tensors stay where the push has none.

    It is the one that the caller names, else the last one that this client has committed and nobody
    has rejected, else the live one. Where this client holds a copy of it, that is compared with.

    Args:
        options: Of the push.
        history: Of the client.
        invoke: Sends unary calls.
        timeouts: Of the client.
        model: Name of the model.

    Raises:
        ClientError: VERSION_UNKNOWN: there is no such version, or none is live yet.
    """
    wanted = _wanted(options, history, invoke, timeouts, model)
    copied = history.snapshot.current
    if copied is not None and wanted == copied.version:
        return copied
    try:
        version, infos = version_tensors(invoke, timeouts, model, wanted)
    except ClientError as error:
        if error.reason is not Reason.VERSION_UNKNOWN:
            raise
        which = f"version {wanted}" if wanted else "a live version"
        raise refuse(
            Reason.VERSION_UNKNOWN,
            f"a partial push keeps the tensors of {which}, which the server has not got; name "
            "another one with base=, or push all tensors",
        ) from error
    # Imported late: who pushes in full needs no NumPy kernels.
    from weightsync_client.snapshot.remote_tensor import RemoteTensor

    if copied is not None and copied.content_digest == version.content_digest:
        return replace(copied, version=version.version)
    ordered = sorted(infos, key=lambda info: info.name)
    return BaseVersion(
        version.version,
        version.content_digest,
        version.size_bytes,
        signature_of((info.name, info.dtype, info.shape) for info in ordered),
        version.metadata.get("run_id", ""),
        {info.name: RemoteTensor(info) for info in ordered},
    )
