"""What gRPC serves: the use cases as they are, failpoints, and the standard health service."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health, health_pb2

from weightsync import failpoints
from weightsync.debug.v1 import debug_pb2
from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync_server.auth import PUSH_WEIGHTS
from weightsync_server.ops.os_errors import write_fault
from weightsync_server.push import is_here, read_message
from weightsync_server.rpc.status_interceptor import HANDLER_MAKERS

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor

    from weightsync_server.auth import Caller
    from weightsync_server.auth.caller import UseCase


def add_calls(calls: Mapping[str, UseCase], server: grpc.aio.Server) -> None:
    """Serve methods on a `generic_only` server; an `AuthorityInterceptor` tells who calls."""
    services: defaultdict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = defaultdict(dict)
    for path, call in calls.items():
        _, service, name = path.split("/")
        method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
        services[service][name] = _handler(method, call)
    for service, handlers in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def _handler(method: MethodDescriptor, call: UseCase) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(request: Any, context: Any) -> Any:
        return await call(context.caller, request)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(call(context.caller, request)) as responses:
            async for response in responses:
                yield response

    request, response = (
        message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)
    )
    # Chunks are read without copies.
    is_push = f"/{method.containing_service.full_name}/{method.name}" == PUSH_WEIGHTS
    make: Any = HANDLER_MAKERS[method.client_streaming, method.server_streaming]
    handler: grpc.RpcMethodHandler[Any, Any] = make(
        stream if inspect.isasyncgenfunction(call) else answer,
        read_message if is_push else request.FromString,
        response.SerializeToString,
    )
    return handler


_DEBUG = debug_pb2.DESCRIPTOR.services_by_name["DebugService"].full_name
_MAX_PLAN_BYTES = 64 << 10


def failpoint_calls() -> dict[str, UseCase]:
    """Return what sets and tells failpoints, by method: nothing, if this process has none."""
    if not failpoints.enabled():
        return {}
    return {f"/{_DEBUG}/SetFailpoints": set_failpoints, f"/{_DEBUG}/GetFailpoints": get_failpoints}


async def set_failpoints(
    caller: Caller, request: debug_pb2.SetFailpointsRequest
) -> debug_pb2.SetFailpointsResponse:
    _check_near(caller)
    if len(request.plan.encode()) > _MAX_PLAN_BYTES:
        raise invalid_request(f"the plan is over {_MAX_PLAN_BYTES} bytes; shorten it")
    try:
        failpoints.set_plan(request.plan)
    except failpoints.FailpointError as error:
        raise invalid_request(str(error)) from error
    except OSError as error:
        raise write_fault(error, "writing the plan") from error
    return debug_pb2.SetFailpointsResponse()


async def get_failpoints(
    caller: Caller, _: debug_pb2.GetFailpointsRequest
) -> debug_pb2.GetFailpointsResponse:
    _check_near(caller)
    hits = [line.split() for line in failpoints.hits()]
    return debug_pb2.GetFailpointsResponse(
        plan=failpoints.plan(),
        hits=[
            debug_pb2.FailpointHit(name=name, action=action, pid=int(pid))
            for name, action, pid in hits
        ],
    )


def _check_near(caller: Caller) -> None:
    # Authority decides who may call at all; failpoints never leave this host, whoever asks.
    if not is_here(caller.peer):
        raise WeightSyncError(
            Reason.PERMISSION_DENIED, "failpoints are set from this host only: unix or loopback"
        )


#: `push` while pushes are accepted and the store has room, `serving` while the engine serves one
#: version.
PUSH, SERVING = "push", "serving"
CHECK_HEALTH = f"/{health.SERVICE_NAME}/Check"


class HealthServicer(health.aio.HealthServicer):
    """Tells of `push`, `serving` and the empty name, the server as a whole, and of nothing else."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        if request.service not in ("", PUSH, SERVING):
            raise WeightSyncError(
                Reason.SERVICE_UNKNOWN,
                f"ask about {PUSH!r} or {SERVING!r}, or the empty name for the whole server: "
                f"there is no health service {request.service[:64]!r}",
            )
        return await super().Check(request, context)

    async def check(self, _: Caller, request: health_pb2.HealthCheckRequest) -> Any:
        """Tell the same as `Check`, as a use case for other doors."""
        # Of the names that are told about, each has been set: no context is needed.
        return await self.Check(request, None)


class Announcer:
    """Tells the health service of one name, and only when the answer changes."""

    def __init__(self, service: HealthServicer, name: str) -> None:
        self._service = service
        self._name = name
        self._announced: bool | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, serving: bool) -> None:  # noqa: FBT001 - a callback with one value
        if serving == self._announced:
            return
        self._announced = serving
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        task = asyncio.ensure_future(self._service.set(self._name, value))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PushHealth:
    """Tells that `push` is serving while pushes are let in and the store has room for them."""

    def __init__(self, service: HealthServicer) -> None:
        self._announcer = Announcer(service, PUSH)
        self._open = False
        self._full = False

    def let_in(self) -> None:
        """Pushes are let in from now on."""
        self._open = True
        self._announcer.tell(not self._full)

    def fill(self, full: bool) -> None:  # noqa: FBT001 - a callback with one value
        """Take note of whether the store takes nothing more."""
        self._full = full
        self._announcer.tell(self._open and not full)
