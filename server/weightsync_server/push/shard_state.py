"""One shard on its way in: layout, then bytes, then the proof of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import DIGEST_BYTES
from weightsync.model.manifest import ShardEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.box_upload import ShardWriters
from weightsync_server.push.task_set import is_running

if TYPE_CHECKING:
    from weightsync.model.manifest import TensorEntry
    from weightsync.shm.segments import Segment

__all__ = ["ShardState", "ShardTasks"]


@dataclass(slots=True)
class ShardTasks:
    """What is under way in one shard.

    Attributes:
        allocation: Makes the segment.
        covering: Compares the boxes of all writers.
        checking: Asks the engine whether it takes such tensors.
        checkpoint: Makes more of the received bytes durable.
        restore: Reads back what survived a crash.
        gpu_copy: Copies it from the trainer's GPU.
        verification: Digests and persists it.
    """

    allocation: asyncio.Task[Segment] | None = None
    covering: asyncio.Task[None] | None = None
    checking: asyncio.Task[None] | None = None
    checkpoint: asyncio.Task[None] | None = None
    restore: asyncio.Task[Segment] | None = None
    gpu_copy: asyncio.Task[None] | None = None
    verification: asyncio.Task[None] | None = None

    @property
    def cancellable(self) -> tuple[asyncio.Task[Any] | None, ...]:
        """Those that may be at work on the segment and can be called off."""
        receiving = self.covering, self.checking, self.checkpoint, self.restore, self.gpu_copy
        return (*receiving, self.verification)


class ShardState:
    """The state of one shard of a push. Changed on the event loop only.

    Attributes:
        index: Index of the shard in the push.
        entry: Name and sizes.
        tensors: In the order of their bytes, once the layout is complete.
        segment: Where the bytes go, once it is there.
        tasks: What is under way.
        owner: The stream that sends its layout or its bytes now.
        received: Bytes received so far.
        durable_bytes: Those of them that survive a crash of the server.
        watermark: Number of received bytes at which something must be done: the end of the header,
            then each number at which bytes are made durable, then the end of the shard.
        headed: The header is proved to tell the layout.
        header_digest: Digest of the header's bytes, once they were proved.
        found: Digests that the fetchers computed.
        digested: Set once they have.
        given: Digests that the trainer sent; None where it sent none.
        writers: What each of several writers brings of it.
    """

    def __init__(self, index: int, entry: ShardEntry) -> None:
        self.index = index
        self.entry = entry
        self.tensors: tuple[TensorEntry, ...] | None = None
        self.segment: Segment | None = None
        self.tasks = ShardTasks()
        self.owner: object | None = None
        self.received = 0
        self.durable_bytes = 0
        self.watermark = 0
        self.headed = False
        self.header_digest = b""
        self.found: list[bytes] | None = None
        self.digested = asyncio.Event()
        self.given: list[bytes | None] = []
        self.writers = ShardWriters()
        self._parts: list[TensorEntry] = []

    @property
    def complete(self) -> bool:
        """All bytes are here."""
        return self.tensors is not None and self.received == self.entry.size

    @property
    def verified(self) -> bool:
        """All bytes are proved and durable."""
        task = self.tasks.verification
        return (
            task is not None and task.done() and not task.cancelled() and task.exception() is None
        )

    def described_elsewhere(self, stream: object) -> bool:
        """Whether another stream is sending its layout."""
        return self.tensors is None and self.owner not in (None, stream)

    def received_to(self, end: int) -> None:
        """Take note that all bytes before `end` are in the segment."""
        self.received = end

    def copied_by(self, task: asyncio.Task[None]) -> None:
        """Take note of the task that copies the shard from a GPU."""
        self.tasks.gpu_copy = task

    def release_copy(self) -> None:
        """Let another stream send the shard, which cannot be copied from a GPU."""
        self.tasks.gpu_copy = self.owner = None

    def resume(self, header_digest: bytes, size: int) -> None:
        """Take note that so many bytes, a proved header first, lie in the store."""
        self.headed = True
        self.header_digest = header_digest
        self.received = self.durable_bytes = size

    def go_back(self, good: int) -> None:
        """Take note that of what lies in the store only so many bytes are whole."""
        self.headed = good >= self.entry.data_start
        self.received = self.durable_bytes = good if self.headed else 0

    def own(self, stream: object) -> None:
        """Let a stream send the shard.

        Raises:
            WeightSyncError: SHARD_BUSY with the offset when another one sends it.
        """
        if self.owner is not None and self.owner is not stream:
            raise self._busy(
                f"shard {self.index} is being sent on another stream, {self.received} bytes are "
                "here; send another shard, or read the offset again when that stream has ended"
            )
        if is_running(self.tasks.gpu_copy):
            raise self._busy(
                f"shard {self.index} is being copied from a trainer's GPU; wait until it was, or "
                "until that connection has ended"
            )
        if self.segment is not None and not self.segment.taken_back():
            raise self._busy(
                f"a trainer on this host can still write into the memory of shard {self.index}; "
                "send it when that process has closed it or has ended"
            )
        self.owner = stream

    def _busy(self, why: str) -> WeightSyncError:
        return WeightSyncError(
            Reason.SHARD_BUSY,
            why,
            metadata={"shard": str(self.index), "received_bytes": str(self.received)},
            retry_after_s=0.2,
        )

    def add(self, part: pb.LayoutPart, entries: list[TensorEntry]) -> None:
        """Take a part of the layout.

        Raises:
            WeightSyncError: LAYOUT_INVALID when it contradicts an earlier part.
        """
        if self.entry != ShardEntry(part.shard_name, part.size_bytes, part.header_bytes):
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"the layout parts of shard {self.index} differ in name, size or header length; "
                "send the same in each",
            )
        self._parts += entries

    def take_parts(self) -> list[TensorEntry]:
        """Return all tensors of the parts, once."""
        parts, self._parts = self._parts, []
        return parts

    @property
    def pending_tensors(self) -> int:
        """Tensors of parts that came so far."""
        return len(self._parts)

    def describe(self, tensors: tuple[TensorEntry, ...]) -> None:
        """Take the checked layout."""
        self.tensors = tensors
        self.writers.layout_ended.set()
        self.given = [None] * len(tensors)
        self.watermark = self.entry.data_start

    def same_layout(self, part: pb.LayoutPart, entries: list[TensorEntry]) -> bool:
        """Tell whether a part that comes again says what is known already."""
        if self.entry != ShardEntry(part.shard_name, part.size_bytes, part.header_bytes):
            return False
        return set(entries) <= set(self.tensors or ())

    def give(self, first: int, digests: bytes) -> None:
        """Take digests of the trainer.

        Raises:
            WeightSyncError: REQUEST_INVALID, DIGEST_MISMATCH.
        """
        count = len(digests) // DIGEST_BYTES
        if len(digests) % DIGEST_BYTES or first + count > len(self.given):
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{len(digests)} bytes of digests from tensor {first} on do not fit the "
                f"{len(self.given)} tensors of shard {self.index}; send {DIGEST_BYTES} bytes each",
            )
        self.given[first : first + count] = [
            digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)
        ]
        self.compare()

    def compare(self) -> None:
        """Compare the trainer's digests with the fetchers', as far as both are here.

        Raises:
            WeightSyncError: DIGEST_MISMATCH, naming the tensor.
        """
        if self.found is None or self.tensors is None or self.given == self.found:
            return
        for tensor, ours, theirs in zip(self.tensors, self.found, self.given, strict=True):
            if theirs is not None and ours != theirs:
                raise WeightSyncError(
                    Reason.DIGEST_MISMATCH,
                    f"tensor {tensor.name!r} of shard {self.index} arrived with digest "
                    f"{ours.hex()}, the trainer computed {theirs.hex()}; push the version again",
                    metadata={"tensor": tensor.name[:200], "shard": str(self.index)},
                )

    @property
    def trainer_verified(self) -> bool:
        """The trainer's digests of all tensors are here and equal."""
        return self.found is not None and self.given == self.found

    def progress(self) -> pb.ShardProgress:
        """Return the wire form."""
        return pb.ShardProgress(
            shard=self.index,
            received_bytes=self.received,
            size_bytes=self.entry.size,
            verified=self.verified,
            durable_bytes=self.durable_bytes,
        )
