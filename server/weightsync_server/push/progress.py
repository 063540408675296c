"""What a push reports of itself: what has come, what has not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.task_set import is_running

if TYPE_CHECKING:
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.push.state import PushState
    from weightsync_server.store.store_records import ShardCheckpoint

__all__ = ["has_all", "is_reading_back", "missing", "progress", "received", "status"]

_NAMED = 10
#: Numbers of writers that GetStatus tells.
_MOST_WRITERS = 100


def missing(state: PushState, shard_count: int = 0) -> list[str]:
    """Return what has not arrived, at most ten items and how many more."""
    count = shard_count or state.shard_count or max(state.shards, default=-1) + 1
    total = state.request.total_bytes
    items = []
    for index in range(count):
        shard = state.shards.get(index)
        if shard is None or shard.tensors is None:
            items.append(f"the layout and bytes of shard {index}")
        elif not shard.complete and shard.writers.boxes:
            items.append(f"the boxes of some writers in shard {index}")
        elif not shard.complete:
            items.append(f"shard {index} from byte {shard.received} of {shard.entry.size} on")
    if not items and not state.shards:
        items = ["all shards"]
    if not items and state.declared_bytes < total:
        items = [f"{total - state.declared_bytes} of total_bytes"]
    if len(items) > _NAMED:
        items[_NAMED:] = [f"{len(items) - _NAMED} more"]
    return items


def progress(state: PushState, writer: int = 0) -> list[pb.ShardProgress]:
    """Return how far every shard has come whose layout is here.

    Args:
        state: The push.
        writer: Whose boxes are told of, where several writers bring it.
    """
    if state.final is not None:
        return state.final
    if state.suspended is not None:
        kept = (state.suspended[index] for index in sorted(state.suspended))
        return [_checkpointed(shard) for shard in kept if state.writers is None or shard.is_whole]
    shards = [state.shards[index] for index in sorted(state.shards)]
    if state.writers is not None:
        each = (_of_writer(shard, writer) for shard in shards)
        return [of_writer for of_writer in each if of_writer is not None]
    return [shard.progress() for shard in shards if shard.tensors is not None]


def _of_writer(shard: ShardState, writer: int) -> pb.ShardProgress | None:
    """Return how far one of several writers has come with a shard that it has declared.

    Or with one that outlived the server: all of that is here, whatever the writer sends of it.
    """
    boxes = shard.writers.boxes.get(writer)
    if boxes is None:
        return shard.progress() if shard.complete else None
    found = boxes.progress()
    found.verified = shard.verified
    if shard.durable_bytes == shard.entry.size:
        found.durable_bytes = found.size_bytes
    return found


def received(state: PushState, writer: int) -> int:
    """Return how many bytes one of several writers has brought."""
    each = (shard.writers.boxes.get(writer) for shard in state.shards.values())
    return sum(boxes.received for boxes in each if boxes is not None)


def has_all(state: PushState, writer: int) -> bool:
    """Whether one of several writers has brought everything."""
    each = [shard.writers.boxes.get(writer) for shard in state.shards.values()]
    whole = len(each) == state.shard_count
    return whole and all(boxes is not None and boxes.complete for boxes in each)


def is_reading_back(state: PushState) -> bool:
    """Whether the server still reads what it kept of the push, for which its writers wait."""
    return any(is_running(shard.tasks.restore) for shard in state.shards.values())


def status(state: PushState) -> pb.PushStatus:
    """Return the push as GetStatus tells it."""
    return pb.PushStatus(
        push_id=state.id,
        version=state.record.version,
        received_bytes=_received(state),
        declared_bytes=max(state.declared_bytes, state.request.total_bytes),
        streams=state.streams,
        layout_check=state.record.layout_check,
        **_writers(state),
    )


def _writers(state: PushState) -> dict[str, Any]:
    writers = state.writers
    if writers is None:
        return {}
    unfinished = set(range(writers.count)) - writers.absent - writers.committed
    return {
        "writers": writers.count,
        "absent_writers": sorted(writers.absent)[:_MOST_WRITERS],
        "unfinished_writers": sorted(unfinished)[:_MOST_WRITERS],
    }


def _received(state: PushState) -> int:
    if state.writers is None or state.suspended is not None or state.final is not None:
        return sum(shard.received_bytes for shard in progress(state))
    return sum(map(_of_all, state.shards.values()))


def _of_all(shard: ShardState) -> int:
    """Return how much of a shard several writers have brought, a box that changed for all of it."""
    if shard.complete:
        return shard.entry.size
    covered = sum(boxes.covered_bytes for boxes in shard.writers.boxes.values())
    # Several may send one box, which is compared.
    return min(covered, shard.entry.size)


def _checkpointed(shard: ShardCheckpoint) -> pb.ShardProgress:
    return pb.ShardProgress(
        shard=shard.index,
        received_bytes=shard.size,
        size_bytes=shard.entry.size,
        durable_bytes=shard.size,
    )
