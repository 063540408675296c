"""The WeightSync client: pushes versions, applies them and reads them back.

from weightsync_client import Client

with Client("127.0.0.1:50551") as client:
    pushed = client.push(model.state_dict(), metadata={"step": "120"})
    client.apply(pushed.version)
"""

from __future__ import annotations

import weightsync_client.verbosity  # noqa: F401  # before anything that imports grpc
from weightsync.errors import Reason, WeightSyncError
from weightsync_client.access import Access
from weightsync_client.aio import AsyncClient, AsyncPushHandle
from weightsync_client.client import Client
from weightsync_client.errors import (
    AbortedError,
    ClientError,
    DataError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    InvalidError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from weightsync_client.options import (
    ApplyOptions,
    EngineChoices,
    FleetApplyOptions,
    FleetChoices,
    PauseChoices,
    PushOptions,
    Retry,
    RollbackOptions,
    Timeouts,
)
from weightsync_client.pull import PulledTensor
from weightsync_client.push.session import PushHandle
from weightsync_client.push_reasons import Fallback, Streamed, TransferPath
from weightsync_client.source.sharded_tensors import ShardedTensor
from weightsync_client.source.source import PushSource
from weightsync_client.source.tensor_stream import Declared
from weightsync_client.train_calls import (
    CheckpointResult,
    TrainerState,
    TrainEvent,
    TrainProgress,
    TrainStatus,
)
from weightsync_client.trainer_base import Progress, Trainer
from weightsync_client.types import (
    ApplyOutcome,
    ApplyPlan,
    ApplyReport,
    ApplyStrategy,
    CacheMode,
    DiskStatus,
    Durability,
    EngineOrder,
    EngineProof,
    EngineReport,
    EngineState,
    EngineStatus,
    FleetMemberReport,
    FleetMemberStatus,
    FleetOrder,
    FleetReport,
    FleetStatus,
    LayoutCheck,
    LiveCheck,
    LoaderState,
    LoaderStatus,
    ModelStatus,
    PauseMode,
    PauseUsed,
    Phases,
    PullResult,
    PushKind,
    PushResult,
    PushStatus,
    RankResult,
    Residency,
    RollbackReport,
    Serving,
    SlotStatus,
    Status,
    TensorInfo,
    Transform,
    Verification,
    Version,
    VersionChange,
)

__all__ = [
    "AbortedError",
    "Access",
    "ApplyOptions",
    "ApplyOutcome",
    "ApplyPlan",
    "ApplyReport",
    "ApplyStrategy",
    "AsyncClient",
    "AsyncPushHandle",
    "CacheMode",
    "CheckpointResult",
    "Client",
    "ClientError",
    "DataError",
    "DeadlineError",
    "Declared",
    "DeniedError",
    "DiskStatus",
    "Durability",
    "EngineChoices",
    "EngineOrder",
    "EngineProof",
    "EngineReport",
    "EngineState",
    "EngineStatus",
    "ExhaustedError",
    "Fallback",
    "FleetApplyOptions",
    "FleetChoices",
    "FleetMemberReport",
    "FleetMemberStatus",
    "FleetOrder",
    "FleetReport",
    "FleetStatus",
    "InvalidError",
    "LayoutCheck",
    "LiveCheck",
    "LoaderState",
    "LoaderStatus",
    "ModelStatus",
    "NotFoundError",
    "PauseChoices",
    "PauseMode",
    "PauseUsed",
    "Phases",
    "Progress",
    "PullResult",
    "PulledTensor",
    "PushHandle",
    "PushKind",
    "PushOptions",
    "PushResult",
    "PushSource",
    "PushStatus",
    "RankResult",
    "Reason",
    "RefusedError",
    "Residency",
    "Retry",
    "RollbackOptions",
    "RollbackReport",
    "Serving",
    "ShardedTensor",
    "SlotStatus",
    "Status",
    "Streamed",
    "TensorInfo",
    "Timeouts",
    "TrainEvent",
    "TrainProgress",
    "TrainStatus",
    "Trainer",
    "TrainerState",
    "TransferPath",
    "Transform",
    "UnavailableError",
    "Verification",
    "Version",
    "VersionChange",
    "Way",
    "WeightSyncError",
]

#: The name of `TransferPath` up to 0.1, for one release.
Way = TransferPath
