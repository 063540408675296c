"""The service that trainers call who want an engine's own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import attach_pb2_grpc

if TYPE_CHECKING:
    import grpc

    from weightsync.v1 import attach_pb2 as pb
    from weightsync_server.attach.attachments import Attachments

__all__ = ["AttachServicer", "add_attach_service"]


class AttachServicer(attach_pb2_grpc.AttachServiceServicer):
    """Lets trainers attach.

    Args:
        model: Name of the model.
        attachments: Those there are.
    """

    def __init__(self, model: str, attachments: Attachments) -> None:
        self._model = model
        self._attachments = attachments

    async def Attach(self, request: pb.AttachRequest, context: Any) -> Any:
        """Have the ranks hand out their memory."""
        if request.model != self._model:
            raise WeightSyncError(
                Reason.MODEL_UNKNOWN,
                f"model {request.model!r} is not configured; this server has {self._model!r}",
            )
        return await self._attachments.offer(request.engine, context.peer())


def add_attach_service(servicer: AttachServicer, server: grpc.aio.Server) -> None:
    """Serve it."""
    attach_pb2_grpc.add_AttachServiceServicer_to_server(servicer, server)
