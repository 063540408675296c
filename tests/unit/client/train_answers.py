"""A trainer to order: jobs that come to what a test says."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tests.unit.client.answers import fail
from weightsync.errors import WeightSyncError
from weightsync.v1 import train_pb2 as pb
from weightsync.v1 import train_pb2_grpc
from weightsync.wire.json_struct import from_struct

if TYPE_CHECKING:
    import grpc

__all__ = ["TrainAnswers"]


class TrainAnswers(train_pb2_grpc.TrainServiceServicer):
    """Answers as one job would.

    Attributes:
        events: What a job comes to.
        error: How it fails after them; None: it ends, or hangs where `hang` is set.
        hang: Whether it waits after the events until its caller leaves.
        came: Set when a job has come.
        left: Set when a caller has left.
        missing: What a checkpoint's folder lacks.
        requests: All that came.
    """

    def __init__(self) -> None:
        self.events = [
            pb.TrainResponse(job_id="j1", queued=pb.TrainQueued(ahead=2)),
            pb.TrainResponse(job_id="j1", started=pb.TrainStarted(version=4, state_version=3)),
            pb.TrainResponse(
                job_id="j1", step=pb.TrainStep(step=1, loss=0.5, tokens=64, version=5)
            ),
            pb.TrainResponse(job_id="j1", step=pb.TrainStep(step=2)),
        ]
        done = pb.TrainResponse(job_id="j1", finished=pb.TrainFinished(version=5, steps=2))
        done.finished.duration.FromNanoseconds(1_500_000_000)
        self.events.append(done)
        self.error: WeightSyncError | None = None
        self.hang = False
        self.missing = ""
        self.came, self.left = threading.Event(), threading.Event()
        self.requests: list[Any] = []
        self.status = pb.GetTrainStatusResponse(
            state=pb.TRAINER_STATE_TRAINING,
            reason="trainer 76 was ended",
            pid=77,
            restarts=1,
            running_job_id="j1",
            running_steps=3,
            queued_job_ids=["j2", "j3"],
            finished=4,
            failed=5,
            cancelled=6,
            state_version=9,
        )

    def add_to(self, server: grpc.Server) -> None:
        """Serve this."""
        train_pb2_grpc.add_TrainServiceServicer_to_server(self, server)

    def asked(self) -> dict[str, Any]:
        """Return the request of the last job."""
        return from_struct(self.requests[-1].request)

    def Train(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.requests.append(request)
        context.add_callback(self.left.set)
        self.came.set()
        yield from self.events
        if self.hang:
            self.left.wait(30)
        if self.error is not None:
            fail(context, self.error)

    def Checkpoint(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.requests.append(request)
        path = f"/srv/{request.folder}" if request.folder else ""
        return pb.CheckpointResponse(version=7, path=path, missing=self.missing)

    def GetTrainStatus(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.requests.append(request)
        return self.status

    def CancelTrain(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.requests.append(request)
        return pb.CancelTrainResponse()
