"""Every call with one request as data, built and read here for the sync and asyncio clients."""

from __future__ import annotations

import enum
import math
import os
import secrets
import socket
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration

from weightsync.errors import Reason
from weightsync.v1 import attach_pb2, attach_pb2_grpc
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import types
from weightsync_client.errors import from_rpc, invalid, refuse
from weightsync_client.gate import Gate, GateAction, GateWhen
from weightsync_client.options import (
    ApplyOptions,
    EngineChoices,
    PauseChoices,
    RollbackOptions,
    Timeouts,
)
from weightsync_client.rpc.convert import from_message, to_report, to_rollback, to_tensor
from weightsync_client.rpc.validate import flag, seconds, text, whole_number

if TYPE_CHECKING:
    from weightsync_client.options import FleetApplyOptions, FleetChoices


@cache
def client_run() -> str:
    """Return host, process and a random part; processes that are forked later share it."""
    host = "".join(c for c in socket.gethostname()[:64] if c.isascii() and c.isprintable())
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"


T = TypeVar("T")
_E = TypeVar("_E", bound=enum.StrEnum)

#: Versions of one report of log probabilities.
_MOST_GAPS = 64

#: The most that a message can carry; no host has so many engines.
_MOST_UNAVAILABLE = 2**32 - 1
#: Characters of what a writer tells the others.
_MOST_REASON = 512


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call with one request; `read` turns the answer, or each of a stream, into a result.

    `stub` makes the stub from a channel; None is WeightSync's own.
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


def _choice(kind: type[_E], value: str, option: str) -> _E:
    allowed = [member.value for member in kind if member != "unspecified"]
    if value not in allowed:
        raise invalid(f"{option} is {str(value)!r}; use one of {', '.join(allowed)}")
    return kind(value)


def _number(choice: enum.StrEnum) -> Any:
    """Return what the protocol has for a choice, under a name that ends in ours."""
    numbers = getattr(pb, type(choice).__name__)
    return numbers.Value(numbers.Name(0).removesuffix("UNSPECIFIED") + choice.upper())


def pause_options(options: PauseChoices) -> pb.PauseOptions:
    pause = pb.PauseOptions()
    if "pause" in options:
        pause.mode = _number(_choice(types.PauseMode, options["pause"], "pause"))
    if "cache" in options:
        pause.cache = _number(_choice(types.CacheMode, options["cache"], "cache"))
    if "wait_timeout_s" in options:
        pause.wait_timeout.CopyFrom(_duration("wait_timeout_s", options["wait_timeout_s"]))
    if "after_wait" in options:
        after = _choice(types.PauseMode, options["after_wait"], "after_wait")
        pause.after_wait = _number(after)
    return pause


def _choose_engines(
    request: pb.ApplyVersionRequest | pb.RollbackRequest, options: EngineChoices
) -> None:
    request.engine = text("engine", options.get("engine") or "")
    if order := options.get("order"):
        request.order = _number(_choice(types.EngineOrder, order, "order"))
    request.max_unavailable = most_unavailable(options.get("max_unavailable", 0))


def most_unavailable(number: int) -> int:
    return min(whole_number("max_unavailable", number), _MOST_UNAVAILABLE)


def attach(
    model: str, engine: str, job: str, timeouts: Timeouts
) -> Call[attach_pb2.AttachResponse]:
    request = attach_pb2.AttachRequest(model=model, engine=text("engine", engine), job=job)
    return Call("Attach", request, timeouts.begin_s, _ident, attach_pb2_grpc.AttachServiceStub)


def begin_in_place(
    model: str, engine: str, version: int, lease_s: float, pause: PauseChoices
) -> attach_pb2.BeginInPlace:
    return attach_pb2.BeginInPlace(
        model=model,
        engine=text("engine", engine),
        base_version=whole_number("version", version),
        pause=pause_options(pause),
        lease=_duration("lease_s", lease_s),
        keyed=True,
    )


def gate_options(gate: Gate) -> pb.GateOptions:
    """Return what an apply is asked for; refuses what is no gate, or has no such choice."""
    if not isinstance(gate, Gate):
        raise invalid(f"gate is {gate!r}; use Gate(...)")
    when = _choice(GateWhen, gate.when, "gate.when")
    action = _choice(GateAction, gate.on_fail, "gate.on_fail")
    options = pb.GateOptions(
        when=_number(when) if when is not GateWhen.AUTO else pb.GATE_WHEN_UNSPECIFIED,
        on_fail=_number(action),
        k3_limit=_limit("gate.k3_limit", gate.k3_limit),
        step_k3_limit=_limit("gate.step_k3_limit", gate.step_k3_limit),
        each_engine=flag("gate.each_engine", gate.each_engine),
    )
    if gate.time_limit_s is not None:
        options.time_limit.CopyFrom(_duration("gate.time_limit_s", gate.time_limit_s))
    return options


def _limit(what: str, value: float | None) -> float:
    """Return a limit of k3; without one, what the protocol has for none."""
    if value is None:
        return 0.0
    number = float(value) if isinstance(value, (int, float)) else math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise invalid(f"{what} is {value!r}; use a number above 0, or None")
    return number


def made_key(key: str | None) -> str:
    return text("idempotency_key", key or uuid.uuid4().hex)


def acquire_epoch(model: str, holder: str, timeouts: Timeouts) -> Call[int]:
    request = pb.AcquireEpochRequest(model=model, holder=holder, client_run=client_run())
    return Call("AcquireEpoch", request, timeouts.call_s, lambda m: int(m.epoch))


def begin_push(request: pb.BeginPushRequest, timeouts: Timeouts) -> Call[pb.BeginPushResponse]:
    return Call("BeginPush", request, timeouts.begin_s, _ident)


def commit_push(request: pb.CommitPushRequest, timeouts: Timeouts) -> Call[pb.CommitPushResponse]:
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
    if (gate := options.get("gate")) is not None:
        request.gate.CopyFrom(gate_options(gate))
    if "prepare_timeout_s" in options:
        prepare_s = _duration("prepare_timeout_s", options["prepare_timeout_s"])
        request.prepare_timeout.CopyFrom(prepare_s)
    _choose_engines(request, options)
    timeout = seconds("timeout_s", options.get("timeout_s", timeouts.apply_s))
    return Call("ApplyVersion", request, timeout, lambda m: to_report(m.report, m.engines))


def rollback(
    model: str, reason: str, options: RollbackOptions, timeouts: Timeouts
) -> Call[types.RollbackReport]:
    request = pb.RollbackRequest(
        model=model,
        idempotency_key=made_key(options.get("idempotency_key")),
        pause=pause_options(options),
        reason=text("reason", reason),
    )
    _choose_engines(request, options)
    timeout = seconds("timeout_s", options.get("timeout_s", timeouts.apply_s))
    return Call("Rollback", request, timeout, to_rollback)


def list_versions(
    model: str, page_token: str, timeouts: Timeouts
) -> Call[tuple[list[types.Version], str]]:
    request = pb.ListVersionsRequest(model=model, page_token=page_token)

    def read(m: pb.ListVersionsResponse) -> tuple[list[types.Version], str]:
        return [from_message(types.Version, v) for v in m.versions], m.next_page_token

    return Call("ListVersions", request, timeouts.call_s, read)


#: Applies that a server sends at once, at most.
_APPLIES = 1000


def list_applies(
    model: str, last: int, version: int, page_token: str, timeouts: Timeouts
) -> Call[tuple[list[types.ApplyRecord], str]]:
    request = pb.ListAppliesRequest(
        model=model,
        page_size=min(whole_number("last", last), _APPLIES),
        version=whole_number("version", version),
        page_token=page_token,
    )

    def read(m: pb.ListAppliesResponse) -> tuple[list[types.ApplyRecord], str]:
        return [from_message(types.ApplyRecord, one) for one in m.applies], m.next_page_token

    return Call("ListApplies", request, timeouts.call_s, read)


def get_version(
    model: str, version: int, timeouts: Timeouts, *, tensors: int = 0, page_token: str = ""
) -> Call[tuple[types.Version, list[types.TensorInfo], str]]:
    request = pb.GetVersionRequest(
        model=model,
        version=whole_number("version", version),
        page_size=tensors,
        page_token=page_token,
    )

    def read(m: pb.GetVersionResponse) -> tuple[types.Version, list[types.TensorInfo], str]:
        tensors = [to_tensor(t) for t in m.tensors]
        return from_message(types.Version, m.version), tensors, m.next_page_token

    return Call("GetVersion", request, timeouts.call_s, read)


def get_engine_layout(
    model: str, known: str, page_token: str, timeouts: Timeouts
) -> Call[pb.GetEngineLayoutResponse]:
    """Ask for a page of what the engines hold, unless that is what is known."""
    request = pb.GetEngineLayoutRequest(model=model, known_signature=known, page_token=page_token)
    return Call("GetEngineLayout", request, timeouts.call_s, _ident)


def watch_versions(model: str, timeouts: Timeouts) -> Call[types.VersionChange]:
    """What is read is one message."""
    request = pb.WatchVersionsRequest(model=model)
    return Call(
        "WatchVersions", request, timeouts.watch_s, partial(from_message, types.VersionChange)
    )


def pull_weights(
    request: pb.PullWeightsRequest, timeouts: Timeouts
) -> Call[pb.PullWeightsResponse]:
    """What is read is one message."""
    return Call("PullWeights", request, timeouts.stream_s, _ident)


def pin_version(
    model: str, version: int, *, pinned: bool, timeouts: Timeouts
) -> Call[types.Version]:
    request = pb.PinVersionRequest(
        model=model, version=whole_number("version", version), pinned=pinned
    )
    read = partial(from_message, types.Version)
    return Call("PinVersion", request, timeouts.call_s, lambda m: read(m.version))


def delete_version(model: str, version: int, *, force: bool, timeouts: Timeouts) -> Call[None]:
    request = pb.DeleteVersionRequest(
        model=model, version=whole_number("version", version), force=flag("force", force)
    )
    return Call("DeleteVersion", request, timeouts.call_s, _nothing)


def get_probes(model: str, version: int, timeouts: Timeouts) -> Call[pb.Probes]:
    request = pb.GetVersionRequest(model=model, version=whole_number("version", version))
    return Call("GetVersion", request, timeouts.call_s, lambda m: m.probes)


def report_logprobs(
    model: str, trained_version: int, gaps: Sequence[pb.LogprobGap], timeouts: Timeouts
) -> list[Call[None]]:
    """Return as many calls as the gaps need."""
    trained = whole_number("trained_version", trained_version)
    requests = (
        pb.ReportLogprobsRequest(
            model=model, trained_version=trained, gaps=gaps[at : at + _MOST_GAPS]
        )
        for at in range(0, len(gaps), _MOST_GAPS)
    )
    return [Call("ReportLogprobs", request, timeouts.call_s, _nothing) for request in requests]


def verify_version(
    model: str, version: int, timeouts: Timeouts, engine: str = "", *, score: bool = False
) -> Call[types.Verification]:
    request = pb.VerifyVersionRequest(
        model=model,
        version=whole_number("version", version),
        engine=text("engine", engine),
        score=flag("score", score),
    )
    return Call(
        "VerifyVersion", request, timeouts.apply_s, partial(from_message, types.Verification)
    )


def get_status(model: str, timeouts: Timeouts) -> Call[types.Status]:
    request = pb.GetStatusRequest(model=model)
    return Call("GetStatus", request, timeouts.call_s, partial(from_message, types.Status))


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
    names = [model.model for model in status.models]
    if len(names) != 1:
        raise invalid(
            f"the server has {len(names)} models ({', '.join(names)}); name the one you mean",
        )
    return names[0]


_ORDERS = {
    types.FleetOrder.BARRIER: pb.ENGINE_ORDER_TOGETHER,
    types.FleetOrder.ROLLING: pb.ENGINE_ORDER_ROLLING,
}


def fleet_apply(
    model: str, version: int, options: FleetApplyOptions, timeouts: Timeouts
) -> Call[types.FleetReport]:
    request = pb.ApplyVersionRequest(
        model=model,
        version=whole_number("version", version),
        clear_rejected=flag("clear_rejected", options.get("clear_rejected") or False),
        **_chosen(options),
    )
    return Call("ApplyVersion", request, _timeout_s(options, timeouts), _fleet_report)


def fleet_rollback(
    model: str, reason: str, options: FleetChoices, timeouts: Timeouts
) -> Call[types.FleetReport]:
    request = pb.RollbackRequest(
        model=model,
        reason=text("reason", reason),
        **_chosen(options),
    )
    return Call("Rollback", request, _timeout_s(options, timeouts), _fleet_report)


def fleet_abort(model: str, reason: str, timeouts: Timeouts) -> Call[types.FleetReport | None]:
    request = pb.AbortFleetApplyRequest(model=model, reason=text("reason", reason))
    return Call(
        "AbortFleetApply",
        request,
        timeouts.call_s,
        lambda m: _fleet_report(m) if m.HasField("fleet") else None,
    )


def fleet_status(model: str, timeouts: Timeouts) -> Call[types.FleetStatus]:
    request = pb.GetFleetStatusRequest(model=model)
    return Call(
        "GetFleetStatus", request, timeouts.call_s, partial(from_message, types.FleetStatus)
    )


def _chosen(options: FleetChoices) -> dict[str, Any]:
    pause = pause_options(options)
    order = options.get("order", types.FleetOrder.ROLLING)
    return {
        "idempotency_key": made_key(options.get("idempotency_key")),
        # An older server refuses any: where nothing is chosen there is none.
        "pause": pause if pause.ListFields() else None,
        "order": _ORDERS[_choice(types.FleetOrder, order, "order")],
        "max_unavailable": most_unavailable(options.get("max_unavailable", 0)),
        "scope": pb.SCOPE_FLEET,
    }


def _timeout_s(options: FleetChoices, timeouts: Timeouts) -> float:
    return seconds("timeout_s", options.get("timeout_s", timeouts.apply_s))


def _fleet_report(m: Any) -> types.FleetReport:
    return from_message(types.FleetReport, m.fleet)


def read_stream(sent: Any, call: Call[T], address: str) -> Generator[T, None, None]:
    """Yield what `sent`, a call under way, brings; however this is left, it has ended then."""
    try:
        for message in sent:
            yield call.read(message)
    except grpc.RpcError as error:
        raise from_rpc(error, method=call.method, address=address) from None
    finally:
        sent.cancel()


async def read_stream_async(sent: Any, call: Call[T], address: str) -> AsyncGenerator[T, None]:
    try:
        async for message in sent:
            yield call.read(message)
    except grpc.RpcError as error:
        raise from_rpc(error, method=call.method, address=address) from None
    finally:
        sent.cancel()
