"""To make versions live on this host or in the fleet, to go back, and to prove what is live."""

from __future__ import annotations

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import Caller
from weightsync_server.fleet_host.fleet_service import FleetService
from weightsync_server.usecases.core import ServerCore


async def apply_version(
    core: ServerCore, caller: Caller, request: pb.ApplyVersionRequest
) -> pb.ApplyVersionResponse:
    core.check_model(request.model)
    if _for_fleet(request.scope):
        return await _fleet(core).apply(request)
    return await core.engines.applier.apply(request)


async def rollback(
    core: ServerCore, caller: Caller, request: pb.RollbackRequest
) -> pb.RollbackResponse:
    core.check_model(request.model)
    if _for_fleet(request.scope):
        return await _fleet(core).rollback(request)
    return await core.engines.applier.rollback(request)


async def verify_version(
    core: ServerCore, caller: Caller, request: pb.VerifyVersionRequest
) -> pb.VerifyVersionResponse:
    core.check_model(request.model)
    return await core.engines.applier.verify(request)


async def get_status(
    core: ServerCore, caller: Caller, request: pb.GetStatusRequest
) -> pb.GetStatusResponse:
    if request.model:
        core.check_model(request.model)
    return core.status()


async def get_fleet_status(
    core: ServerCore, caller: Caller, request: pb.GetFleetStatusRequest
) -> pb.GetFleetStatusResponse:
    if request.model:
        core.check_model(request.model)
    return await _fleet(core).status()


async def abort_fleet_apply(
    core: ServerCore, caller: Caller, request: pb.AbortFleetApplyRequest
) -> pb.AbortFleetApplyResponse:
    if request.model:
        core.check_model(request.model)
    return await _fleet(core).abort(request)


def _fleet(core: ServerCore) -> FleetService:
    if core.engines.fleet is None:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            "this server is a member of no fleet; start it with engines, --fleet and "
            "--fleet-register, or ask one that is",
        )
    return core.engines.fleet


def _for_fleet(scope: int) -> bool:
    if scope not in pb.Scope.values():
        raise WeightSyncError(
            Reason.REQUEST_INVALID, "scope must be HOST or FLEET; leave it out for HOST"
        )
    return scope == pb.SCOPE_FLEET
