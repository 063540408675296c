"""Every call with one request as data: method, request, timeout and how to read the answer.

The sync and the asyncio client both send these, so each call is built and read in one place.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from google.protobuf.duration_pb2 import Duration

from weightsync.errors import Reason
from weightsync.v1 import attach_pb2, attach_pb2_grpc
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import types
from weightsync_client.errors import refuse
from weightsync_client.options import (
    ApplyOptions,
    EngineChoices,
    PauseChoices,
    RollbackOptions,
    Timeouts,
)
from weightsync_client.rpc import convert
from weightsync_client.rpc.client_run import client_run
from weightsync_client.rpc.validate import flag, seconds, text, whole_number

if TYPE_CHECKING:
    import enum

__all__ = [
    "Call",
    "abort_push",
    "acquire_epoch",
    "apply_version",
    "attach",
    "begin_in_place",
    "begin_push",
    "commit_push",
    "delete_version",
    "get_engine_layout",
    "get_push",
    "get_status",
    "get_version",
    "health",
    "list_versions",
    "made_key",
    "most_unavailable",
    "pause_options",
    "pin_version",
    "pull_weights",
    "rollback",
    "single_model",
    "verify_version",
    "watch_versions",
]

T = TypeVar("T")

#: Of the names that the protocol has for choices.
_PREFIXES: dict[type[enum.StrEnum], str] = {
    types.CacheMode: "CACHE_MODE",
    types.EngineOrder: "ENGINE_ORDER",
    types.PauseMode: "PAUSE_MODE",
}
#: The most that a message can carry; no host has so many engines.
_MOST_UNAVAILABLE = 2**32 - 1
#: Characters of what a writer tells the others.
_MOST_REASON = 512


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call with one request.

    Attributes:
        method: Name of the RPC.
        request: Its request message.
        timeout_s: Its deadline, in seconds.
        read: Turns the response message, each of a stream, into the result.
        stub: Makes the stub from a channel; None: WeightSync's own.
    """

    method: str
    request: Any
    timeout_s: float
    read: Callable[[Any], T]
    stub: Callable[[Any], Any] | None = None


def _ident(message: Any) -> Any:
    return message


def _nothing(_: Any) -> None:
    return None


def _duration(option: str, value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds(option, value) * 1e9))
    return duration


def _choice(kind: type[enum.StrEnum], value: str, option: str) -> str:
    allowed = [member.value for member in kind if member != "unspecified"]
    if value not in allowed:
        raise refuse(
            Reason.REQUEST_INVALID, f"{option} is {str(value)!r}; use one of {', '.join(allowed)}"
        )
    return f"{_PREFIXES[kind]}_{value}".upper()


def pause_options(options: PauseChoices) -> pb.PauseOptions:
    """Return how to pause, as a message carries it; what is not chosen is not set."""
    pause = pb.PauseOptions()
    if "pause" in options:
        pause.mode = pb.PauseMode.Value(_choice(types.PauseMode, options["pause"], "pause"))
    if "cache" in options:
        pause.cache = pb.CacheMode.Value(_choice(types.CacheMode, options["cache"], "cache"))
    if "wait_timeout_s" in options:
        pause.wait_timeout.CopyFrom(_duration("wait_timeout_s", options["wait_timeout_s"]))
    if "after_wait" in options:
        mode = _choice(types.PauseMode, options["after_wait"], "after_wait")
        pause.after_wait = pb.PauseMode.Value(mode)
    return pause


def _choose_engines(
    request: pb.ApplyVersionRequest | pb.RollbackRequest, options: EngineChoices
) -> None:
    request.engine = text("engine", options.get("engine") or "")
    if order := options.get("order"):
        request.order = pb.EngineOrder.Value(_choice(types.EngineOrder, order, "order"))
    request.max_unavailable = most_unavailable(options.get("max_unavailable", 0))


def most_unavailable(number: int) -> int:
    """Return how many may be away, as a message carries it."""
    return min(whole_number("max_unavailable", number), _MOST_UNAVAILABLE)


def attach(
    model: str, engine: str, job: str, timeouts: Timeouts
) -> Call[attach_pb2.AttachResponse]:
    """Ask for what opens an engine's live parameters."""
    request = attach_pb2.AttachRequest(model=model, engine=text("engine", engine), job=job)
    return Call("Attach", request, timeouts.begin_s, _ident, attach_pb2_grpc.AttachServiceStub)


def begin_in_place(
    model: str, engine: str, version: int, lease_s: float, pause: PauseChoices
) -> attach_pb2.BeginInPlace:
    """Return the first message of a transaction."""
    return attach_pb2.BeginInPlace(
        model=model,
        engine=text("engine", engine),
        base_version=whole_number("version", version),
        pause=pause_options(pause),
        lease=_duration("lease_s", lease_s),
    )


def made_key(key: str | None) -> str:
    """Return an idempotency key, or a new one."""
    return text("idempotency_key", key or uuid.uuid4().hex)


def acquire_epoch(model: str, holder: str, timeouts: Timeouts) -> Call[int]:
    """Make the caller the writer."""
    request = pb.AcquireEpochRequest(model=model, holder=holder, client_run=client_run())
    return Call("AcquireEpoch", request, timeouts.call_s, lambda m: int(m.epoch))


def begin_push(request: pb.BeginPushRequest, timeouts: Timeouts) -> Call[pb.BeginPushResponse]:
    """Open or join a push."""
    return Call("BeginPush", request, timeouts.begin_s, _ident)


def commit_push(request: pb.CommitPushRequest, timeouts: Timeouts) -> Call[pb.CommitPushResponse]:
    """Commit a push."""
    return Call("CommitPush", request, timeouts.commit_s, _ident)


def abort_push(
    push_id: str, timeouts: Timeouts, *, reason: str = "", writer: int = 0
) -> Call[None]:
    """Drop a push; of several writers, this one tells the others why."""
    request = pb.AbortPushRequest(push_id=push_id, reason=reason[:_MOST_REASON], writer=writer)
    return Call("AbortPush", request, timeouts.call_s, _nothing)


def get_push(push_id: str, timeouts: Timeouts, writer: int = 0) -> Call[pb.GetPushResponse]:
    """Ask how far a push has come; of several writers, how far this one has."""
    request = pb.GetPushRequest(push_id=push_id, writer=writer)
    return Call("GetPush", request, timeouts.call_s, _ident)


def apply_version(
    model: str, version: int, options: ApplyOptions, timeouts: Timeouts
) -> Call[types.ApplyReport]:
    """Make a version live."""
    request = pb.ApplyVersionRequest(
        model=model,
        version=whole_number("version", version),
        idempotency_key=made_key(options.get("idempotency_key")),
        pause=pause_options(options),
        dry_run=flag("dry_run", options.get("dry_run") or False),
        clear_rejected=flag("clear_rejected", options.get("clear_rejected") or False),
    )
    if (durable := options.get("require_durable")) is not None:
        request.require_durable = flag("require_durable", durable)
    if "prepare_timeout_s" in options:
        prepare_s = _duration("prepare_timeout_s", options["prepare_timeout_s"])
        request.prepare_timeout.CopyFrom(prepare_s)
    _choose_engines(request, options)
    timeout = seconds("timeout_s", options.get("timeout_s", timeouts.apply_s))
    return Call("ApplyVersion", request, timeout, lambda m: convert.to_report(m.report, m.engines))


def rollback(
    model: str, reason: str, options: RollbackOptions, timeouts: Timeouts
) -> Call[types.RollbackReport]:
    """Go back to the previous version."""
    request = pb.RollbackRequest(
        model=model,
        idempotency_key=made_key(options.get("idempotency_key")),
        pause=pause_options(options),
        reason=text("reason", reason),
    )
    _choose_engines(request, options)
    timeout = seconds("timeout_s", options.get("timeout_s", timeouts.apply_s))
    return Call("Rollback", request, timeout, convert.to_rollback)


def list_versions(
    model: str, page_token: str, timeouts: Timeouts
) -> Call[tuple[list[types.Version], str]]:
    """List one page of versions: the versions, and the token of the next page."""
    request = pb.ListVersionsRequest(model=model, page_token=page_token)

    def read(m: pb.ListVersionsResponse) -> tuple[list[types.Version], str]:
        return [convert.to_version(v) for v in m.versions], m.next_page_token

    return Call("ListVersions", request, timeouts.call_s, read)


def get_version(
    model: str, version: int, timeouts: Timeouts, *, tensors: int = 0, page_token: str = ""
) -> Call[tuple[types.Version, list[types.TensorInfo], str]]:
    """Get a version with at most `tensors` of its tensors, and the token of the next page."""
    request = pb.GetVersionRequest(
        model=model,
        version=whole_number("version", version),
        page_size=tensors,
        page_token=page_token,
    )

    def read(m: pb.GetVersionResponse) -> tuple[types.Version, list[types.TensorInfo], str]:
        tensors = [convert.to_tensor(t) for t in m.tensors]
        return convert.to_version(m.version), tensors, m.next_page_token

    return Call("GetVersion", request, timeouts.call_s, read)


def get_engine_layout(
    model: str, known: str, page_token: str, timeouts: Timeouts
) -> Call[pb.GetEngineLayoutResponse]:
    """Ask for a page of what the engines hold, unless that is what is known."""
    request = pb.GetEngineLayoutRequest(model=model, known_signature=known, page_token=page_token)
    return Call("GetEngineLayout", request, timeouts.call_s, _ident)


def watch_versions(model: str, timeouts: Timeouts) -> Call[types.VersionChange]:
    """Watch the versions; what is read is one message."""
    request = pb.WatchVersionsRequest(model=model)
    return Call("WatchVersions", request, timeouts.watch_s, convert.to_change)


def pull_weights(
    request: pb.PullWeightsRequest, timeouts: Timeouts
) -> Call[pb.PullWeightsResponse]:
    """Read the bytes of a version; what is read is one message."""
    return Call("PullWeights", request, timeouts.stream_s, _ident)


def pin_version(
    model: str, version: int, *, pinned: bool, timeouts: Timeouts
) -> Call[types.Version]:
    """Pin or unpin."""
    request = pb.PinVersionRequest(
        model=model, version=whole_number("version", version), pinned=pinned
    )
    return Call("PinVersion", request, timeouts.call_s, lambda m: convert.to_version(m.version))


def delete_version(model: str, version: int, *, force: bool, timeouts: Timeouts) -> Call[None]:
    """Delete a version."""
    request = pb.DeleteVersionRequest(
        model=model, version=whole_number("version", version), force=flag("force", force)
    )
    return Call("DeleteVersion", request, timeouts.call_s, _nothing)


def verify_version(
    model: str, version: int, timeouts: Timeouts, engine: str = ""
) -> Call[types.Verification]:
    """Prove what is served."""
    request = pb.VerifyVersionRequest(
        model=model, version=whole_number("version", version), engine=text("engine", engine)
    )
    return Call("VerifyVersion", request, timeouts.apply_s, convert.to_verification)


def get_status(model: str, timeouts: Timeouts) -> Call[types.Status]:
    """Ask for the state."""
    request = pb.GetStatusRequest(model=model)
    return Call("GetStatus", request, timeouts.call_s, convert.to_status)


def health(service: str, timeouts: Timeouts) -> Call[bool]:
    """Ask the standard health service; empty: the server as a whole."""
    try:
        from grpc_health.v1 import health_pb2, health_pb2_grpc
    except ImportError:
        raise refuse(
            Reason.NOT_SUPPORTED,
            "health checks need the package grpcio-health-checking; install weightsync[server]",
        ) from None
    return Call(
        "Check",
        health_pb2.HealthCheckRequest(service=service),
        timeouts.call_s,
        lambda m: bool(m.status == health_pb2.HealthCheckResponse.SERVING),
        health_pb2_grpc.HealthStub,
    )


def single_model(status: types.Status) -> str:
    """Return the name of a server's only model."""
    names = [model.model for model in status.models]
    if len(names) != 1:
        raise refuse(
            Reason.REQUEST_INVALID,
            f"the server has {len(names)} models ({', '.join(names)}); name the one you mean",
        )
    return names[0]
