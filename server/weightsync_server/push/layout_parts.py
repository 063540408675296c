"""What a trainer tells of the shards of a push: checked, and then there is room for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import check_shard
from weightsync.model.manifest import ShardEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.push.reservation import make_room
from weightsync_server.push.shard_state import ShardState
from weightsync_server.push.validation import refused, tensor_entries

if TYPE_CHECKING:
    from weightsync.model.manifest import TensorEntry
    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.layout_cache import KnownLayout
    from weightsync_server.push.lifecycle import Push

__all__ = ["PushLayout"]

#: Layouts with more tensors than this are worked on in a thread.
_INLINE_TENSORS = 256


class PushLayout:
    """The layout of one push, as far as it was told.

    Args:
        push: The push, whose `shards` this fills.
    """

    def __init__(self, push: Push) -> None:
        self._push = push
        self._tensors = 0
        self._names: set[str] = set()
        self._unchecked = False

    def take_known(self, known: KnownLayout) -> None:
        """Take a whole layout that the server knows.

        Raises:
            WeightSyncError: LAYOUT_INVALID, MEMORY_EXHAUSTED.
        """
        if self._push.shard_count not in (0, len(known.layout.shards)):
            raise refused(
                f"shard_count is {self._push.shard_count}, the layout named by layout_digest has "
                f"{len(known.layout.shards)} shards"
            )
        self._push.known = known
        self._push.shard_count = len(known.layout.shards)
        for index, (entry, tensors) in enumerate(
            zip(known.layout.shards, known.layout.by_shard, strict=True)
        ):
            upload = self._push.shards[index] = ShardState(index, entry)
            self._accept(upload, tensors)

    async def add(self, part: pb.LayoutPart, stream: object) -> None:
        """Take a part of a shard's layout; the last one is checked and reserves memory.

        Raises:
            WeightSyncError: LAYOUT_INVALID, REQUEST_INVALID, SHARD_BUSY, MEMORY_EXHAUSTED.
        """
        if len(part.shard_name.encode()) > 255:
            raise refused("shard_name is over 255 bytes; shorten it")
        large = len(part.tensors) > _INLINE_TENSORS
        entries = await asyncio.to_thread(tensor_entries, part) if large else tensor_entries(part)
        self._push.check_open()
        upload = self._upload_for(part)
        if upload.tensors is not None:
            same = upload.same_layout
            if not (await asyncio.to_thread(same, part, entries) if large else same(part, entries)):
                raise refused(
                    f"shard {part.shard} has another layout already; the layout of a shard is sent "
                    "once"
                )
            return
        upload.own(stream)
        upload.add(part, entries)
        pending = sum(other.pending_tensors for other in self._push.shards.values())
        if self._tensors + pending > self._push.limits.max_tensors:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"the version holds over {self._push.limits.max_tensors} tensors, the most there "
                "may be",
            )
        if part.last:
            parts = upload.take_parts()
            if len(parts) > _INLINE_TENSORS:
                tensors = await asyncio.to_thread(check_shard, upload.entry, parts)
                self._push.check_open()
            else:
                tensors = check_shard(upload.entry, parts)
            self._check(tensors)
            self._accept(upload, tensors)
            upload.owner = None
            if upload.checking is not None:
                await asyncio.wait([upload.checking])
                self._push.check_open()

    def _upload_for(self, part: pb.LayoutPart) -> ShardState:
        upload = self._push.shards.get(part.shard)
        if upload is not None:
            return upload
        most = self._push.shard_count or self._push.limits.max_shards
        if part.shard >= most:
            raise refused(f"shard {part.shard} of a version of at most {most} shards")
        entry = ShardEntry(part.shard_name, part.size_bytes, part.header_bytes)
        upload = self._push.shards[part.shard] = ShardState(part.shard, entry)
        return upload

    def _check(self, tensors: tuple[TensorEntry, ...]) -> None:
        if self._push.delta is not None:
            self._push.delta.check_layout(tensors)
        for tensor in tensors:
            if tensor.name in self._names:
                raise WeightSyncError(
                    Reason.LAYOUT_INVALID, f"tensor {tensor.name[:100]!r} is in the version twice"
                )
            self._names.add(tensor.name)

    def _accept(self, upload: ShardState, tensors: tuple[TensorEntry, ...]) -> None:
        self._push.declared_bytes += upload.entry.size
        if self._push.total_bytes and self._push.declared_bytes > self._push.total_bytes:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"the shards so far hold {self._push.declared_bytes} bytes, total_bytes promised "
                f"{self._push.total_bytes}; declare the right sum or none",
            )
        self._tensors += len(tensors)
        upload.describe(tensors)
        if self._push.delta is None and self._push.existing is None:
            asking = self._push.versions.accepted.check(tensors)
            upload.checking = asyncio.create_task(asking)
            upload.checking.add_done_callback(self._checked)
        if not self._push.stores or self._push.disk.covers(self._push.declared_bytes):
            upload.segment = self._push.place.reuse(upload.index, upload.entry.size)
        if upload.segment is None:
            # A task of its own, so that streams of other shards go on meanwhile.
            upload.allocation = asyncio.create_task(
                make_room(self._push, upload, self._push.declared_bytes)
            )
            upload.allocation.add_done_callback(self._allocated)

    def _checked(self, task: asyncio.Task[bool]) -> None:
        """Refuse a push whose tensors the engine does not take; label it where none tells."""
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._push.fail(to_refusal(error, "asking the engine about the layout"))
            return
        self._unchecked |= not task.result()
        checks = pb.LAYOUT_CHECK_UNCHECKED if self._unchecked else pb.LAYOUT_CHECK_PASSED
        self._push.record.layout_check = checks

    def _allocated(self, task: asyncio.Task[Segment]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._push.fail(to_refusal(error, f"reserving {self._push.declared_bytes} bytes"))

    def take(
        self, index: int, entry: ShardEntry, tensors: tuple[TensorEntry, ...]
    ) -> ShardState | None:
        """Return the upload of a shard whose checked layout is known; None: it has another.

        Raises:
            WeightSyncError: LAYOUT_INVALID, MEMORY_EXHAUSTED.
        """
        upload = self._push.shards.get(index)
        if upload is None:
            upload = self._push.shards[index] = ShardState(index, entry)
            self._check(tensors)
            self._accept(upload, tensors)
        return upload if (upload.entry, upload.tensors) == (entry, tensors) else None
