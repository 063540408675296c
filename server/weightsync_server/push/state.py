"""What is known of one push: data alone, which the parts of a push work on."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.errors import WeightSyncError
    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_server.catalog.layout_cache import KnownLayout
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.push.delta_push import DeltaPush
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.push.writers import Writers
    from weightsync_server.store.store_records import ShardCheckpoint

__all__ = ["Phase", "PushState", "check_open"]


class Phase(enum.Enum):
    """How far a push has come; `PushLifecycle.phase` tells it.

    Attributes:
        SUSPENDED: It has no slot: what came of it lies in the store.
        OPENING: It waits for its slot and its memory.
        RECEIVING: Its bytes come, and are proved and made durable.
        SEALING: All of them are proved: its manifest is being made, or is.
        COMMITTING: Its trainer has asked for the commit.
        COMMITTED: The version exists. For ever.
        FAILED: It has an error. For ever, unless its commit was too far to be called back.
    """

    SUSPENDED = enum.auto()
    OPENING = enum.auto()
    RECEIVING = enum.auto()
    SEALING = enum.auto()
    COMMITTING = enum.auto()
    COMMITTED = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True, eq=False)
class PushState:
    """The state of one push. Changed on the event loop only.

    Its layout (`shards` to `declared_bytes`) is written by `layout_parts`, all else by `lifecycle`,
    which also drops a shard whose stream left before all of its layout was here.

    Attributes:
        id: Names the push.
        caller: Who began it.
        request: The call that opened it.
        record: The version it brings.
        existing: The committed version that it repeats, or the live one that failed to commit.
        delta: What it has besides if it is a delta.
        writers: Who brings it, where several processes do.
        shards: By index.
        known: The layout, when the server knew it.
        shard_count: Shards that there will be; 0: not known yet.
        declared_bytes: Sum of the shards' sizes so far.
        streams: Streams open now.
        recorded: It is written down to survive a crash, as far as its bytes are durable.
        recovered: It was open in an earlier life of the server.
        suspended: After a restart, or when nobody sent it for a while, what was made durable of
            it, by shard; None: it is not suspended.
        cast_tensors: Tensors that its trainer says it has cast.
        committed: The answer to its commit.
        error: Why it failed.
        failed_at: When, by the event loop's clock.
        final: How far every shard came, once it has ended.
    """

    id: str
    caller: str
    request: pb.BeginPushRequest
    record: VersionRecord
    existing: VersionRecord | None = None
    delta: DeltaPush | None = None
    writers: Writers | None = None
    shards: dict[int, ShardState] = field(default_factory=dict)
    known: KnownLayout | None = None
    shard_count: int = 0
    declared_bytes: int = 0
    streams: int = 0
    recorded: bool = False
    recovered: bool = False
    suspended: dict[int, ShardCheckpoint] | None = None
    cast_tensors: int = 0
    committed: pb.CommitPushResponse | None = None
    error: WeightSyncError | None = None
    failed_at: float = 0.0
    final: list[pb.ShardProgress] | None = None


def check_open(state: PushState) -> None:
    """Raise the error of a push that failed."""
    if state.error is not None:
        raise state.error
