"""To make versions live on this host or in the fleet, to go back, and to prove what is live."""

from __future__ import annotations

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import Caller
from weightsync_server.auth.caller import for_people
from weightsync_server.fleet_host.fleet_service import FleetService
from weightsync_server.usecases.core import ServerCore
from weightsync_server.usecases.version_calls import page_number

#: Applies of a page, and the bytes after which it is ended: one message carries 4 MiB.
_MAX_APPLIES, _PAGE_BYTES = 1000, 1 << 20


async def apply_version(
    core: ServerCore, caller: Caller, request: pb.ApplyVersionRequest
) -> pb.ApplyVersionResponse:
    core.check_model(request.model)
    if _for_fleet(request.scope):
        return await _fleet(core).apply(request, for_people(caller.name))
    return await core.engines.applier.apply(request, who=for_people(caller.name))


async def rollback(
    core: ServerCore, caller: Caller, request: pb.RollbackRequest
) -> pb.RollbackResponse:
    core.check_model(request.model)
    if _for_fleet(request.scope):
        return await _fleet(core).rollback(request, for_people(caller.name))
    return await core.engines.applier.rollback(request, who=for_people(caller.name))


async def verify_version(
    core: ServerCore, caller: Caller, request: pb.VerifyVersionRequest
) -> pb.VerifyVersionResponse:
    core.check_model(request.model)
    return await core.engines.applier.verify(request)


async def list_applies(
    core: ServerCore, caller: Caller, request: pb.ListAppliesRequest
) -> pb.ListAppliesResponse:
    """List applies, newest first; the page token is the number of the last one before."""
    if request.model:
        core.check_model(request.model)
    below = page_number(request.page_token)
    size = min(request.page_size or _MAX_APPLIES, _MAX_APPLIES)
    answer, room = pb.ListAppliesResponse(), _PAGE_BYTES
    for record in core.engines.history.newest_first():
        if below is not None and record.number >= below:
            continue
        if request.version and request.version not in (record.version, record.previous_version):
            continue
        if len(answer.applies) == size or room < 0:
            answer.next_page_token = str(answer.applies[-1].number)
            break
        answer.applies.append(record)
        room -= record.ByteSize()
    return answer


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
