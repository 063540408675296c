"""The service that trainers call who want an engine's own memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import attach_pb2_grpc
from weightsync_server.attach.in_place_call import read_order
from weightsync_server.catalog.model_name import check_model

if TYPE_CHECKING:
    import grpc

    from weightsync.v1 import attach_pb2 as pb
    from weightsync_server.attach.attachments import Attachments
    from weightsync_server.attach.in_place_call import InPlaceCalls

__all__ = ["AttachServicer", "add_attach_service"]


class AttachServicer(attach_pb2_grpc.AttachServiceServicer):
    """Lets trainers attach, and write.

    Args:
        model: Name of the model.
        attachments: Those there are.
        transactions: Runs them.
    """

    def __init__(self, model: str, attachments: Attachments, transactions: InPlaceCalls) -> None:
        self._model = model
        self._attachments = attachments
        self._transactions = transactions

    async def Attach(self, request: pb.AttachRequest, context: Any) -> Any:
        """Have the ranks hand out their memory."""
        check_model(request.model, self._model)
        return await self._attachments.offer(request, context.peer())

    async def WriteInPlace(self, request_iterator: Any, context: Any) -> Any:
        """Let a trainer write it."""
        steps = aiter(request_iterator)
        first = await anext(steps, None)
        if first is None or first.WhichOneof("step") != "begin":
            raise WeightSyncError(
                Reason.REQUEST_INVALID, "the first message of a transaction must be begin"
            )
        check_model(first.begin.model, self._model)
        applier = self._attachments.engine(first.begin.engine)
        order = read_order(first.begin)
        writer = self._attachments.writer(applier.name, first.begin.attachment, context.peer())
        answered = self._transactions.run(applier, order, steps, writer)
        async with contextlib.aclosing(answered) as answers:
            async for answer in answers:
                yield answer


def add_attach_service(servicer: AttachServicer, server: grpc.aio.Server) -> None:
    """Serve it."""
    attach_pb2_grpc.add_AttachServiceServicer_to_server(servicer, server)
