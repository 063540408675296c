"""What a push brings: its shards as their layouts tell, checked before they get memory."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.layout import check_shard
from weightsync.manifest import ShardEntry
from weightsync_server.ingest.checks import refused, tensor_entries
from weightsync_server.ingest.room import make_room
from weightsync_server.ingest.upload import ShardUpload

if TYPE_CHECKING:
    from weightsync.manifest import TensorEntry
    from weightsync.segments import Segment
    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_server.ingest.push import Push
    from weightsync_server.versions.layouts import KnownLayout

__all__ = ["add_layout", "describe_known", "described"]

#: Layouts with more tensors than this are worked on in a thread.
_INLINE_TENSORS = 256


def describe_known(push: Push, known: KnownLayout) -> None:
    """Take a whole layout that the server knows.

    Raises:
        WeightSyncError: LAYOUT_INVALID, MEMORY_EXHAUSTED.
    """
    if push.shard_count not in (0, len(known.layout.shards)):
        raise refused(
            f"shard_count is {push.shard_count}, the layout named by layout_digest has "
            f"{len(known.layout.shards)} shards"
        )
    push.known = known
    push.shard_count = len(known.layout.shards)
    for index, (entry, tensors) in enumerate(
        zip(known.layout.shards, known.layout.by_shard, strict=True)
    ):
        upload = push.shards[index] = ShardUpload(index, entry)
        _accept(push, upload, tensors)


async def add_layout(push: Push, part: pb.LayoutPart, stream: object) -> None:
    """Take a part of a shard's layout; the last one is checked and reserves memory.

    Raises:
        WeightSyncError: LAYOUT_INVALID, REQUEST_INVALID, SHARD_BUSY, MEMORY_EXHAUSTED.
    """
    if len(part.shard_name.encode()) > 255:
        raise refused("shard_name is over 255 bytes; shorten it")
    large = len(part.tensors) > _INLINE_TENSORS
    entries = await asyncio.to_thread(tensor_entries, part) if large else tensor_entries(part)
    push.check_open()
    upload = _upload_for(push, part)
    if upload.tensors is not None:
        same = upload.same_layout
        if not (await asyncio.to_thread(same, part, entries) if large else same(part, entries)):
            raise refused(
                f"shard {part.shard} has another layout already; the layout of a shard is sent once"
            )
        return
    upload.own(stream)
    upload.add(part, entries)
    pending = sum(other.pending_tensors for other in push.shards.values())
    if push.tensor_count + pending > push.limits.max_tensors:
        raise WeightSyncError(
            Reason.LAYOUT_INVALID,
            f"the version holds over {push.limits.max_tensors} tensors, the most there may be",
        )
    if part.last:
        parts = upload.take_parts()
        if len(parts) > _INLINE_TENSORS:
            tensors = await asyncio.to_thread(check_shard, upload.entry, parts)
            push.check_open()
        else:
            tensors = check_shard(upload.entry, parts)
        _check_names(push, tensors)
        _accept(push, upload, tensors)
        upload.owner = None


def _upload_for(push: Push, part: pb.LayoutPart) -> ShardUpload:
    upload = push.shards.get(part.shard)
    if upload is not None:
        return upload
    most = push.shard_count or push.limits.max_shards
    if part.shard >= most:
        raise refused(f"shard {part.shard} of a version of at most {most} shards")
    entry = ShardEntry(part.shard_name, part.size_bytes, part.header_bytes)
    upload = push.shards[part.shard] = ShardUpload(part.shard, entry)
    return upload


def _check_names(push: Push, tensors: tuple[TensorEntry, ...]) -> None:
    for tensor in tensors:
        if tensor.name in push.names:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID, f"tensor {tensor.name[:100]!r} is in the version twice"
            )
        push.names.add(tensor.name)


def _accept(push: Push, upload: ShardUpload, tensors: tuple[TensorEntry, ...]) -> None:
    push.declared_bytes += upload.entry.size
    if push.total_bytes and push.declared_bytes > push.total_bytes:
        raise WeightSyncError(
            Reason.LAYOUT_INVALID,
            f"the shards so far hold {push.declared_bytes} bytes, total_bytes promised "
            f"{push.total_bytes}; declare the right sum or none",
        )
    push.tensor_count += len(tensors)
    upload.describe(tensors)
    if not push.stores or push.disk.covers(push.declared_bytes):
        upload.segment = push.record.place.reuse(upload.index, upload.entry.size)
    if upload.segment is None:
        # A task of its own, so that streams of other shards go on meanwhile.
        upload.allocation = asyncio.create_task(make_room(push, upload, push.declared_bytes))
        upload.allocation.add_done_callback(functools.partial(_allocated, push))


def _allocated(push: Push, task: asyncio.Task[Segment]) -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, WeightSyncError):
        push.fail(error)


def described(
    push: Push, index: int, entry: ShardEntry, tensors: tuple[TensorEntry, ...]
) -> ShardUpload | None:
    """Return the upload of a shard whose checked layout is known; None: it has another.

    Raises:
        WeightSyncError: LAYOUT_INVALID, MEMORY_EXHAUSTED.
    """
    upload = push.shards.get(index)
    if upload is None:
        upload = push.shards[index] = ShardUpload(index, entry)
        _check_names(push, tensors)
        _accept(push, upload, tensors)
    return upload if (upload.entry, upload.tensors) == (entry, tensors) else None
