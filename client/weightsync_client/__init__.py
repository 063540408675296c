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
    FleetChoices,
    PauseChoices,
    PushOptions,
    Retry,
    RollbackOptions,
    Timeouts,
)
from weightsync_client.pull import PulledTensor
from weightsync_client.push.handle import PushHandle
from weightsync_client.push_reasons import Fallback, Streamed, Way
from weightsync_client.source.declared import Declared
from weightsync_client.source.sharded_tensors import ShardedTensor
from weightsync_client.source.source import PushSource
from weightsync_client.types import (
    ApplyOutcome,
    ApplyPlan,
    ApplyReport,
    ApplyStrategy,
    CacheMode,
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
    "Client",
    "ClientError",
    "DataError",
    "DeadlineError",
    "Declared",
    "DeniedError",
    "Durability",
    "EngineChoices",
    "EngineOrder",
    "EngineProof",
    "EngineReport",
    "EngineState",
    "EngineStatus",
    "ExhaustedError",
    "Fallback",
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
    "Transform",
    "UnavailableError",
    "Verification",
    "Version",
    "VersionChange",
    "Way",
    "WeightSyncError",
]
