"""What is known of one push: data alone, which the parts of a push work on."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.commits import KnownLayout
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.ops.traces import Work
from weightsync_server.store.store_records import ShardCheckpoint

if TYPE_CHECKING:
    from weightsync_server.push.delta_push import DeltaPush
    from weightsync_server.push.shard_part import ShardState
    from weightsync_server.push.writers import PushWriters


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
        existing: The committed version that it repeats, or the live one that failed to commit.
        shard_count: Shards that there will be; 0: not known yet.
        declared_bytes: Sum of the shards' sizes so far.
        recorded: It is written down to survive a crash, as far as its bytes are durable.
        recovered: It was open in an earlier life of the server.
        suspended: What was made durable of it, by shard; None: it is not suspended.
        probes: What the gate of an apply is to score, by the writer that sent it.
        failed_at: By the event loop's clock.
        final: How far every shard came, once it has ended.
        work: What is traced of it; None: nothing is, or it has ended.
    """

    id: str
    caller: str
    request: pb.BeginPushRequest
    record: VersionRecord
    existing: VersionRecord | None = None
    delta: DeltaPush | None = None
    writers: PushWriters = field(init=False)
    shards: dict[int, ShardState] = field(default_factory=dict)
    known: KnownLayout | None = None
    shard_count: int = 0
    declared_bytes: int = 0
    streams: int = 0
    recorded: bool = False
    recovered: bool = False
    suspended: dict[int, ShardCheckpoint] | None = None
    cast_tensors: int = 0
    probes: dict[int, pb.Probes] = field(default_factory=dict)
    committed: pb.CommitPushResponse | None = None
    error: WeightSyncError | None = None
    failed_at: float = 0.0
    final: list[pb.ShardProgress] | None = None
    work: Work | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What lines of the log about it say beside their text."""
        return {"version": self.record.version, "push_id": self.id}


def check_open(state: PushState) -> None:
    if state.error is not None:
        raise state.error
