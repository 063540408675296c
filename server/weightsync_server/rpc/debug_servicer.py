"""The debug service: failpoints, only where the server was started with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync import failpoints
from weightsync.debug.v1 import debug_pb2 as pb
from weightsync.debug.v1 import debug_pb2_grpc
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.os_errors import write_fault
from weightsync_server.push import is_here

if TYPE_CHECKING:
    import grpc

__all__ = ["DebugServicer", "add_debug_service"]

_MAX_PLAN_BYTES = 64 << 10


class DebugServicer(debug_pb2_grpc.DebugServiceServicer):
    """Sets and tells failpoints. Every call is refused unless it comes from this host."""

    async def SetFailpoints(self, request: pb.SetFailpointsRequest, context: Any) -> Any:
        """Replace the plan."""
        _check_near(context)
        if len(request.plan.encode()) > _MAX_PLAN_BYTES:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"the plan is over {_MAX_PLAN_BYTES} bytes; shorten it"
            )
        try:
            failpoints.set_plan(request.plan)
        except failpoints.FailpointError as error:
            raise WeightSyncError(Reason.REQUEST_INVALID, str(error)) from error
        except OSError as error:
            raise write_fault(error, "writing the plan") from error
        return pb.SetFailpointsResponse()

    async def GetFailpoints(self, request: pb.GetFailpointsRequest, context: Any) -> Any:
        """Tell the plan and what was hit."""
        _check_near(context)
        hits = [line.split() for line in failpoints.hits()]
        return pb.GetFailpointsResponse(
            plan=failpoints.plan(),
            hits=[
                pb.FailpointHit(name=name, action=action, pid=int(pid))
                for name, action, pid in hits
            ],
        )


def add_debug_service(server: grpc.aio.Server) -> bool:
    """Serve failpoints if this process has them; returns whether it does."""
    if not failpoints.enabled():
        return False
    debug_pb2_grpc.add_DebugServiceServicer_to_server(DebugServicer(), server)
    return True


def _check_near(context: Any) -> None:
    # An interceptor decides who may call at all; failpoints never leave this host, whoever asks.
    if not is_here(context.peer()):
        raise WeightSyncError(
            Reason.PERMISSION_DENIED, "failpoints are set from this host only: unix or loopback"
        )
