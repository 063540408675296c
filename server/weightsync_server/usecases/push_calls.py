"""To become the writer, and to push versions."""

from __future__ import annotations

from collections.abc import AsyncIterator

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import Caller
from weightsync_server.push import Message
from weightsync_server.push.sources.remote_stream import RemoteStream
from weightsync_server.usecases.core import ServerCore


async def acquire_epoch(
    core: ServerCore, caller: Caller, request: pb.AcquireEpochRequest
) -> pb.AcquireEpochResponse:
    core.check_model(request.model)
    _refuse_on_follower(core)
    epoch = await core.versions.model.epochs.acquire(request.holder, request.client_run)
    return pb.AcquireEpochResponse(epoch=epoch)


async def begin_push(
    core: ServerCore, caller: Caller, request: pb.BeginPushRequest
) -> pb.BeginPushResponse:
    core.check_model(request.model)
    _refuse_on_follower(core)
    response = await core.versions.pushes.begin(request, caller.left_s(), caller.name)
    if core.versions.same_host is not None and request.HasField("same_host"):
        core.versions.same_host.offer(response, caller.peer, request.writer, caller.name)
    response.data_endpoints.extend(core.versions.endpoints(caller))
    return response


async def push_weights(
    core: ServerCore, caller: Caller, requests: AsyncIterator[Message] | RemoteStream
) -> pb.PushWeightsResponse:
    _refuse_on_follower(core)
    return await core.versions.pushes.stream(requests, caller.left_s(), caller.name)


async def commit_push(
    core: ServerCore, caller: Caller, request: pb.CommitPushRequest
) -> pb.CommitPushResponse:
    _refuse_on_follower(core)
    return await core.versions.pushes.commit(request)


async def abort_push(
    core: ServerCore, caller: Caller, request: pb.AbortPushRequest
) -> pb.AbortPushResponse:
    _refuse_on_follower(core)
    return await core.versions.pushes.abort(request)


async def get_push(
    core: ServerCore, caller: Caller, request: pb.GetPushRequest
) -> pb.GetPushResponse:
    return core.versions.pushes.get(request)


def _refuse_on_follower(core: ServerCore) -> None:
    if core.versions.origin:
        raise WeightSyncError(
            Reason.SERVER_FOLLOWS,
            f"this server follows {core.versions.origin} and takes no pushes; push there",
            metadata={"origin": core.versions.origin},
        )
