"""What one writer of several brings of a shard: its boxes, then their bytes, then their digests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import DIGEST_BYTES
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.task_set import is_running

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightsync.model.box_spans import BoxSpan
    from weightsync.model.boxes import Box
    from weightsync.shm.segments import Segment

__all__ = ["BoxPatch", "BoxUpload", "BoxWindow", "ShardWriters", "TensorBox", "window"]


class TensorBox(NamedTuple):
    """A box of one of a shard's tensors.

    Attributes:
        tensor: Position of the tensor in the shard.
        box: The part of it.
    """

    tensor: int
    box: Box


class BoxPatch(NamedTuple):
    """A delta shard that makes a writer's boxes of what they were in another version.

    Attributes:
        base_content_digest: Content digest of that version.
        base: The shard as that version has it.
        segment: Where the delta shard goes.
        size: Its bytes.
        discard: Gives the memory of it back.
    """

    base_content_digest: str
    base: Segment
    segment: Segment
    size: int
    discard: Callable[[], None]


@dataclass(slots=True, eq=False)
class BoxUpload:
    """A writer's part of one shard. Changed on the event loop only.

    Attributes:
        writer: The writer.
        shard: Index of the shard.
        sent: Boxes whose bytes the writer sends.
        replicas: Boxes that a lower writer sends.
        spans: Where the bytes of `sent` lie in the shard.
        size: Bytes that the writer sends: those of `sent`, or of what changed in them.
        given: Digests that the writer sent, of `sent` and then of `replicas`.
        sends_changes: The writer sends what changed.
        patch: What changed, where it is not in the shard yet.
        gpu_copy: Copies the bytes of `sent` from the writer's GPU.
        by_server: The server has copied them by itself: the writer gives no digests of them.
        wants_digests: It gets them instead.
        kept: The shard outlived the server: no bytes of it are to come.
        borrower: Process that was given the shard's memory to write them, 0 where the kernel does
            not tell which; None: none was.
        owner: The stream that sends them now.
        received: Bytes received so far.
    """

    writer: int
    shard: int
    sent: tuple[TensorBox, ...]
    replicas: tuple[TensorBox, ...]
    spans: tuple[BoxSpan, ...]
    size: int
    given: list[bytes | None]
    sends_changes: bool = False
    patch: BoxPatch | None = None
    gpu_copy: asyncio.Task[None] | None = None
    by_server: bool = False
    wants_digests: bool = False
    kept: bool = False
    borrower: int | None = None
    owner: object | None = None
    received: int = 0

    @property
    def watermark(self) -> int:
        """Number of received bytes at which something must be done."""
        return self.size

    @property
    def complete(self) -> bool:
        """All bytes and all digests are here."""
        lacking = self.given[len(self.sent) :] if self.by_server else self.given
        return self.received == self.size and None not in lacking

    @property
    def covered_bytes(self) -> int:
        """Bytes of the boxes that are here; those that changes stand for as far as these came."""
        size = sum(span.size for span in self.spans)
        return size * self.received // self.size if self.size else 0

    def own(self, stream: object) -> None:
        """Let a stream send the boxes.

        Raises:
            WeightSyncError: SHARD_BUSY with the offset when another one sends them.
        """
        if is_running(self.gpu_copy):
            raise self._busy(
                f"the boxes of writer {self.writer} in shard {self.shard} are being copied from a "
                "GPU; wait until they were, or until that connection has ended"
            )
        if self.owner is not None and self.owner is not stream:
            raise self._busy(
                f"writer {self.writer} is sending its boxes of shard {self.shard} on another "
                f"stream, {self.received} bytes are here; give each process a number of its own"
            )
        self.owner = stream

    def _busy(self, why: str) -> WeightSyncError:
        return WeightSyncError(
            Reason.SHARD_BUSY,
            why,
            metadata={"shard": str(self.shard), "received_bytes": str(self.received)},
            retry_after_s=0.2,
        )

    def received_to(self, end: int) -> None:
        """Take note that all bytes before `end` are in the segment."""
        self.received = end

    def keep(self, size: int) -> None:
        """Take note that no bytes are to come, of so many that the writer has of it.

        It may tell other numbers in turn: as its boxes are, or of what changed in them.
        """
        self.kept = True
        # Never less: nowhere may a byte be written that was here.
        self.size = self.received = max(self.size, size)

    def give(self, first: int, digests: bytes) -> None:
        """Take digests of the writer.

        Raises:
            WeightSyncError: REQUEST_INVALID; DIGEST_MISMATCH: it sent others before.
        """
        count = len(digests) // DIGEST_BYTES
        if len(digests) % DIGEST_BYTES or first + count > len(self.given):
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{len(digests)} bytes of digests from box {first} on do not fit the "
                f"{len(self.given)} boxes of writer {self.writer} in shard {self.shard}; send "
                f"{DIGEST_BYTES} bytes each",
            )
        starts = range(0, len(digests), DIGEST_BYTES)
        for at, digest in enumerate((digests[at : at + DIGEST_BYTES] for at in starts), first):
            if self.given[at] not in (None, digest):
                raise WeightSyncError(
                    Reason.DIGEST_MISMATCH,
                    f"writer {self.writer} sent two digests of one box in shard {self.shard}: two "
                    "processes have its number, or its tensors changed; give each process a number "
                    "of its own, and push the version again",
                    metadata={"writer": str(self.writer)},
                )
            self.given[at] = digest

    def progress(self) -> pb.ShardProgress:
        """Return the wire form."""
        return pb.ShardProgress(
            shard=self.shard, received_bytes=self.received, size_bytes=self.size
        )


@dataclass(slots=True, eq=False)
class ShardWriters:
    """What several writers bring of one shard.

    Attributes:
        boxes: By writer, once it has declared them.
        header: Once the boxes of all writers are the shard's tensors, what comes before those.
        layout_ended: Set once its layout is here, or the stream that sent it left before that.
    """

    boxes: dict[int, BoxUpload] = field(default_factory=dict)
    header: bytes = b""
    layout_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def complete(self) -> bool:
        """All boxes of all writers are here."""
        return bool(self.header) and all(boxes.complete for boxes in self.boxes.values())


def window(view: memoryview, upload: BoxUpload) -> memoryview | BoxWindow:
    """Return where the bytes go that a writer sends of a shard.

    Args:
        view: The shard, or the memory of what changed in its boxes.
        upload: What the writer sends.
    """
    return view if upload.sends_changes else BoxWindow(view, upload.spans)


class BoxWindow:
    """A shard's memory as the row of bytes that a writer's boxes are.

    Args:
        view: The shard.
        spans: Where the boxes lie in it.
    """

    def __init__(self, view: memoryview, spans: Sequence[BoxSpan]) -> None:
        self._view = view
        self._spans = spans
        self._index = self._start = 0

    def __setitem__(self, where: slice, data: memoryview | bytes) -> None:
        """Write bytes `where.start` to `where.stop` of the boxes."""
        begin, rest = where.start, memoryview(data)
        if begin < self._start:
            self._index = self._start = 0
        while rest:
            span = self._spans[self._index]
            if begin >= self._start + span.size:
                self._start += span.size
                self._index += 1
                continue
            piece = rest[: self._start + span.size - begin]
            span.put(self._view, begin - self._start, piece)
            begin, rest = begin + len(piece), rest[len(piece) :]
