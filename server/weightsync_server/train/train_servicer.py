"""The service that gives the trainer jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import train_pb2 as pb
from weightsync.v1 import train_pb2_grpc
from weightsync.wire.json_struct import from_struct
from weightsync_server.catalog.model_name import check_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from weightsync_server.train.training import Training

__all__ = ["TrainServicer", "add_train_service"]


class TrainServicer(train_pb2_grpc.TrainServiceServicer):
    """Serves it, where there is a trainer.

    Args:
        model: Name of the model.
        training: What the trainer can be asked; None: there is none.
    """

    def __init__(self, model: str, training: Training | None) -> None:
        self._model = model
        self._training = training

    async def Train(
        self, request: pb.TrainRequest, context: Any
    ) -> AsyncIterator[pb.TrainResponse]:
        """Do a job, and tell of it to its end."""
        del context
        training = self._trainer(request.model)
        job = training.submit(from_struct(request.request))
        try:
            async for event in job.events():
                yield event
        finally:
            training.cancel(job)

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Any) -> Any:
        """Return when the live version is durable."""
        del context
        return await self._trainer(request.model).checkpoint(request.folder)

    async def GetTrainStatus(self, request: pb.GetTrainStatusRequest, context: Any) -> Any:
        """Tell what the trainer does."""
        del context
        return self._trainer(request.model).status()

    async def CancelTrain(self, request: pb.CancelTrainRequest, context: Any) -> Any:
        """End a job."""
        del context
        training = self._trainer(request.model)
        training.cancel(training.find(request.job_id))
        return pb.CancelTrainResponse()

    def _trainer(self, model: str) -> Training:
        check_model(model, self._model)
        if self._training is None:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                "this server supervises no trainer; start it with --trainer module:Class",
            )
        return self._training


def add_train_service(servicer: TrainServicer, server: grpc.aio.Server) -> None:
    """Serve it."""
    train_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)
