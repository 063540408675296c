"""What a push reports: to its sender what has come, to engines which shards are complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.model.manifest import Layout
from weightsync.shm.incoming_version import IpcAddresses
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth.caller import for_people
from weightsync_server.ops.tasks import is_running
from weightsync_server.residency.incoming import IncomingReader
from weightsync_server.store.store_records import ShardCheckpoint

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.shard_part import ShardState
    from weightsync_server.push.state import PushState


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
        elif not shard.complete and shard.parts and shard.file is None:
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
    """Return how far every shard has come whose layout is here, of several writers one's parts."""
    if state.final is not None:
        return state.final
    if state.suspended is not None:
        several, kept = state.writers.several, sorted(state.suspended.items())
        return [_checkpointed(shard) for _, shard in kept if shard.is_whole or not several]
    each = (state.shards[index].progress(writer) for index in sorted(state.shards))
    return [part for part in each if part is not None]


def received(state: PushState, writer: int) -> int:
    each = (shard.parts.get(writer) for shard in state.shards.values())
    return sum(part.received for part in each if part is not None)


def has_all(state: PushState, writer: int) -> bool:
    each = [shard.parts.get(writer) for shard in state.shards.values()]
    whole = len(each) == state.shard_count
    return whole and all(part is not None and part.complete for part in each)


def is_reading_back(state: PushState) -> bool:
    """Whether the server still reads what it kept of the push, for which its writers wait."""
    return any(is_running(shard.tasks.restore) for shard in state.shards.values())


def status(state: PushState) -> pb.PushStatus:
    return pb.PushStatus(
        push_id=state.id,
        version=state.record.version,
        received_bytes=_received(state),
        declared_bytes=max(state.declared_bytes, state.request.total_bytes),
        streams=state.streams,
        layout_check=state.record.layout_check,
        **_writers(state),
    )


def traced_facts(state: PushState) -> dict[str, str | int | None]:
    """Return what the span of a push says beside its phases."""
    response, error = state.committed, state.error
    repeated = response is not None and response.already
    outcome = "failed" if response is None else "already" if repeated else "committed"
    return {
        "version": state.record.version,
        "push_id": state.id,
        "outcome": outcome,
        "error_reason": error.reason.value if error is not None else None,
        "kind": "delta" if state.request.kind == pb.PUSH_KIND_DELTA else "full",
        "size_bytes": response.size_bytes if response is not None else None,
        "requested_by": for_people(state.caller),
    }


def _writers(state: PushState) -> dict[str, Any]:
    writers = state.writers
    if not writers.several:
        return {}
    unfinished = set(range(writers.count)) - writers.absent - writers.committed
    return {
        "writers": writers.count,
        "absent_writers": sorted(writers.absent)[:_MOST_WRITERS],
        "unfinished_writers": sorted(unfinished)[:_MOST_WRITERS],
    }


def _received(state: PushState) -> int:
    if state.suspended is not None or state.final is not None:
        return sum(shard.received_bytes for shard in progress(state))
    return sum(shard.covered_bytes for shard in state.shards.values())


def _checkpointed(shard: ShardCheckpoint) -> pb.ShardProgress:
    return pb.ShardProgress(
        shard=shard.index,
        received_bytes=shard.size,
        size_bytes=shard.entry.size,
        durable_bytes=shard.size,
    )


class PushAnnouncement:
    """What engines know of one push; nothing, until `begin`."""

    def __init__(self, state: PushState, model: Model) -> None:
        self._state = state
        self._model = model
        self._reader: IncomingReader | None = None

    def begin(self, layout: Layout) -> None:
        """Let engines read the version as it comes, if all of it is new and has its memory."""
        state = self._state
        if state.delta is not None or state.existing is not None:
            return
        segments = [state.shards[index].segment for index in range(len(layout.shards))]
        known = [segment for segment in segments if segment is not None]
        if len(known) == len(segments):
            self._reader = IncomingReader(state.record, layout, known, self._model.segments)
            self._model.events.publish(self._reader)

    def announce_ipc(self, shard: ShardState, where: IpcAddresses) -> None:
        if self._reader is not None:
            self._reader.announce_ipc(shard.index, where)

    def mark_complete(self, shard: ShardState) -> None:
        if self._reader is not None:
            self._reader.mark_complete(shard.index)

    def end(self) -> None:
        """Tell of no more shards; further calls do nothing."""
        if self._reader is not None:
            self._reader.end()
            self._reader = None
