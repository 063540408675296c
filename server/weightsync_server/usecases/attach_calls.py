"""For trainers that want an engine's own memory: to have it, and to write it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import attach_pb2 as pb
from weightsync_server.attach.in_place import read_order
from weightsync_server.auth import Caller
from weightsync_server.usecases.core import ServerCore


async def attach(core: ServerCore, caller: Caller, request: pb.AttachRequest) -> pb.AttachResponse:
    core.check_model(request.model)
    return await core.engines.attachments.offer(request, caller.peer)


async def write_in_place(
    core: ServerCore, caller: Caller, requests: AsyncIterator[pb.WriteInPlaceRequest]
) -> AsyncIterator[pb.WriteInPlaceResponse]:
    steps = aiter(requests)
    first = await anext(steps, None)
    if first is None or first.WhichOneof("step") != "begin":
        raise WeightSyncError(
            Reason.REQUEST_INVALID, "send begin as the first message of a transaction"
        )
    core.check_model(first.begin.model)
    applier = core.engines.attachments.engine(first.begin.engine)
    order = read_order(first.begin, caller.name)
    writer = core.engines.attachments.writer(applier.name, first.begin.attachment, caller.peer)
    answered = core.engines.transactions.run(applier, order, steps, writer)
    async with contextlib.aclosing(answered) as answers:
        async for answer in answers:
            yield answer
