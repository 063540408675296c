"""One shard on its way in: layout, then bytes, then the proof of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import DIGEST_BYTES
from weightsync.model.manifest import ShardEntry
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from weightsync.model.manifest import TensorEntry
    from weightsync.shm.segments import Segment

__all__ = ["ShardState"]


class ShardState:
    """The state of one shard of a push. Changed on the event loop only.

    Attributes:
        index: Index of the shard in the push.
        entry: Name and sizes.
        tensors: In the order of their bytes, once the layout is complete.
        segment: Where the bytes go, once it is there.
        allocation: The task that makes the segment.
        checking: The task that asks the engine whether it takes such tensors.
        owner: The stream that sends its layout or its bytes now.
        received: Bytes received so far.
        kept: Those of them that survive a crash of the server.
        keeping: The task that makes more of them so.
        restoring: The task that reads back what survived a crash.
        collecting: The task that copies it from the trainer's GPU.
        mark: Number of received bytes at which something must be done: the end of the header,
            then each number at which bytes are made durable, then the end of the shard.
        headed: The header is proved to tell the layout.
        header_digest: Digest of the header's bytes, once they were proved.
        verification: The task that digests and persists it.
        found: Digests that the fetchers computed.
        digested: Set once they have.
        given: Digests that the trainer sent; None where it sent none.
    """

    def __init__(self, index: int, entry: ShardEntry) -> None:
        self.index = index
        self.entry = entry
        self.tensors: tuple[TensorEntry, ...] | None = None
        self.segment: Segment | None = None
        self.allocation: asyncio.Task[Segment] | None = None
        self.checking: asyncio.Task[bool] | None = None
        self.owner: object | None = None
        self.received = 0
        self.kept = 0
        self.keeping: asyncio.Task[None] | None = None
        self.restoring: asyncio.Task[Segment] | None = None
        self.collecting: asyncio.Task[None] | None = None
        self.mark = 0
        self.headed = False
        self.header_digest = b""
        self.verification: asyncio.Task[None] | None = None
        self.found: list[bytes] | None = None
        self.digested = asyncio.Event()
        self.given: list[bytes | None] = []
        self._parts: list[TensorEntry] = []

    @property
    def complete(self) -> bool:
        """All bytes are here."""
        return self.tensors is not None and self.received == self.entry.size

    @property
    def verified(self) -> bool:
        """All bytes are proved and durable."""
        return (
            self.verification is not None
            and self.verification.done()
            and not self.verification.cancelled()
            and self.verification.exception() is None
        )

    @property
    def working(self) -> tuple[asyncio.Task[Any] | None, ...]:
        """Tasks that may be at work on its segment and can be called off."""
        return self.checking, self.verification, self.keeping, self.restoring, self.collecting

    def own(self, stream: object) -> None:
        """Let a stream send the shard.

        Raises:
            WeightSyncError: SHARD_BUSY with the offset when another one sends it.
        """
        if self.owner is not None and self.owner is not stream:
            raise WeightSyncError(
                Reason.SHARD_BUSY,
                f"shard {self.index} is being sent on another stream, {self.received} bytes are "
                "here; send another shard, or read the offset again when that stream has ended",
                metadata={"shard": str(self.index), "received_bytes": str(self.received)},
                retry_after_s=0.2,
            )
        if self.collecting is not None and not self.collecting.done():
            raise WeightSyncError(
                Reason.SHARD_BUSY,
                f"shard {self.index} is being copied from a trainer's GPU; wait until it was, or "
                "until that connection has ended",
                metadata={"shard": str(self.index), "received_bytes": str(self.received)},
                retry_after_s=0.2,
            )
        if self.segment is not None and not self.segment.taken_back():
            raise WeightSyncError(
                Reason.SHARD_BUSY,
                f"a trainer on this host can still write into the memory of shard {self.index}; "
                "send it when that process has closed it or has ended",
                metadata={"shard": str(self.index), "received_bytes": str(self.received)},
                retry_after_s=0.2,
            )
        self.owner = stream

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
        self.given = [None] * len(tensors)
        self.mark = self.entry.data_start

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
            durable_bytes=self.kept,
        )
