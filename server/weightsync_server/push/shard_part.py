"""One shard on its way in, and its writers' parts of it; a lone writer brings its file.

Layout first, then bytes, then the proof of them.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import DIGEST_BYTES
from weightsync.model.manifest import ShardEntry, TensorEntry
from weightsync.model.tensor_slices import Box, SliceSpan, problem_of
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ops.tasks import is_running


class PartFraming(enum.Enum):
    """How a writer sends its part of a shard.

    Attributes:
        FILE: The shard's file, with its header: goes on from any byte, and is durable on the way.
        SLICES: The bytes of slices, one after the other; the header is made here.
        CHANGES: A delta shard that makes the slices from another version's.
    """

    FILE = enum.auto()
    SLICES = enum.auto()
    CHANGES = enum.auto()


class TensorSlice(NamedTuple):
    tensor: int
    at: Box


class SlicePatch(NamedTuple):
    """A delta shard that makes a writer's slices of what they were in another version.

    `base` is the shard in the version of `base_content_digest`. The delta shard goes into
    `segment`; `discard` frees that.
    """

    base_content_digest: str
    base: Segment
    segment: Segment
    size: int
    discard: Callable[[], None]


@dataclass(slots=True, eq=False)
class ShardPart:
    """What one writer brings of a shard. Changed on the event loop only.

    Attributes:
        slices: What it sends; a file has all tensors, and names none.
        replicas: Slices that a lower writer sends.
        spans: Where the bytes of a file, or of `slices`, lie in the shard.
        size: Bytes that the writer sends: those of `spans`, or of what changed in them.
        digests: What the writer says of the file's tensors, or of `slices` and then `replicas`.
        watermark: Number of received bytes at which something must be done.
        patch: What changed, where it is not in the shard yet.
        gpu_copy: Copies the bytes from the writer's GPU, or a file's from a store.
        wants_digests: The writer gets the digests of what was copied from its GPU.
        kept: The shard outlived the server: no bytes of it are to come.
        holder: Process that was given the shard's memory to write its part, 0 where the kernel does
            not say which; None: none was.
        owner: The stream that sends it now.
    """

    shard: ShardState
    writer: int
    framing: PartFraming
    slices: tuple[TensorSlice, ...]
    replicas: tuple[TensorSlice, ...]
    spans: tuple[SliceSpan, ...]
    size: int
    digests: list[bytes | None]
    watermark: int
    received: int = 0
    patch: SlicePatch | None = None
    gpu_copy: asyncio.Task[None] | None = None
    wants_digests: bool = False
    kept: bool = False
    holder: int | None = None
    owner: object | None = None

    @classmethod
    def whole(cls, shard: ShardState, tensors: int) -> ShardPart:
        entry = shard.entry
        digests: list[bytes | None] = [None] * tensors
        facts = (), (), (SliceSpan(0, entry.size, (), ()),), entry.size, digests, entry.data_start
        return cls(shard, 0, PartFraming.FILE, *facts)

    @classmethod
    def of_slices(
        cls,
        shard: ShardState,
        writer: int,
        slices: Sequence[TensorSlice],
        replicas: Sequence[TensorSlice],
        spans: Sequence[SliceSpan],
    ) -> ShardPart:
        size = sum(span.size for span in spans)
        digests: list[bytes | None] = [None] * (len(slices) + len(replicas))
        facts = tuple(slices), tuple(replicas), tuple(spans), size, digests, size
        return cls(shard, writer, PartFraming.SLICES, *facts)

    @property
    def by_server(self) -> bool:
        """The server copies slices by itself: the writer gives no digests of them."""
        return self.gpu_copy is not None and self.framing is not PartFraming.FILE

    @property
    def complete(self) -> bool:
        """All bytes are here; of slices, all digests that its writer owes too."""
        if self.framing is PartFraming.FILE:
            return self.received == self.size
        lacking = self.digests[len(self.slices) :] if self.by_server else self.digests
        return self.received == self.size and None not in lacking

    @property
    def digested_by_writer(self) -> bool:
        return not self.by_server and None not in self.digests

    @property
    def covered_bytes(self) -> int:
        """Bytes of the shard that are here; those that changes stand for as far as these came."""
        size = sum(span.size for span in self.spans)
        return size * self.received // self.size if self.size else 0

    @property
    def targets(self) -> Sequence[SliceSpan]:
        """Where the bytes go, one after the other; none: each to its own offset."""
        return self.spans if self.framing is PartFraming.SLICES else ()

    def window(self, view: memoryview) -> memoryview | SliceWindow:
        """Return where the bytes go; `view` is the shard, or the memory of what changed in it."""
        return SliceWindow(view, self.targets) if self.targets else view

    def own(self, stream: object) -> None:
        """Let a stream send the part, unless another does; nobody need own a complete file."""
        if self.framing is not PartFraming.FILE:
            self._refuse_slices_in_use(stream)
        elif self.complete:
            return
        else:
            self._refuse_file_in_use(stream)
        self.owner = stream

    def _refuse_slices_in_use(self, stream: object) -> None:
        if is_running(self.gpu_copy):
            raise self.shard.busy(
                self.received,
                f"the boxes of writer {self.writer} in shard {self.shard.index} are being copied "
                "from a GPU; wait until that is done, or until that connection has ended",
            )
        if self.owner is not None and self.owner is not stream:
            raise self.shard.busy(
                self.received,
                f"writer {self.writer} is sending its boxes of shard {self.shard.index} on another "
                f"stream, {self.received} bytes are here; give each process a number of its own",
            )

    def _refuse_file_in_use(self, stream: object) -> None:
        if self.owner is not None and self.owner is not stream:
            raise self.shard.sent_elsewhere(self.received)
        if is_running(self.gpu_copy):
            raise self.shard.busy(
                self.received,
                f"shard {self.shard.index} is being copied from a trainer's GPU; wait until that "
                "is done, or until that connection has ended",
            )
        segment = self.shard.segment
        if segment is not None and not segment.taken_back():
            raise self.shard.busy(
                self.received,
                f"send shard {self.shard.index} when that process has closed the memory or has "
                "ended: a trainer on this host can still write into it",
            )

    def received_to(self, end: int) -> None:
        """Take note that all bytes before `end` are in the segment."""
        self.received = end

    def release_copy(self) -> None:
        """Let another stream send what cannot be copied from a GPU."""
        self.gpu_copy = self.owner = None
        self.wants_digests = False

    def expect_changes(self, patch: SlicePatch) -> None:
        self.framing, self.patch = PartFraming.CHANGES, patch
        self.size = self.watermark = patch.size

    def keep(self, size: int) -> None:
        """Take note that no bytes are to come of the `size` that the writer has of it.

        `size` may differ between calls: of its slices, or of what changed in them.
        """
        self.kept = True
        # Never less: nowhere may a byte be written that was here.
        self.size = self.received = self.watermark = max(self.size, size)

    def give(self, first: int, digests: bytes) -> None:
        """Take digests of the writer, which must be those that it gave before."""
        count = len(digests) // DIGEST_BYTES
        what, where = "box", f"boxes of writer {self.writer} in shard {self.shard.index}"
        if is_file := self.framing is PartFraming.FILE:
            what, where = "tensor", f"tensors of shard {self.shard.index}"
        if len(digests) % DIGEST_BYTES or first + count > len(self.digests):
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"the {len(digests)} bytes of digests from {what} {first} do not match the "
                f"{len(self.digests)} {where}; send {DIGEST_BYTES} bytes for each",
            )
        starts = range(0, len(digests), DIGEST_BYTES)
        for at, digest in enumerate((digests[at : at + DIGEST_BYTES] for at in starts), first):
            if not is_file and self.digests[at] not in (None, digest):
                raise WeightSyncError(
                    Reason.DIGEST_MISMATCH,
                    f"writer {self.writer} sent two different digests for one box of shard "
                    f"{self.shard.index}: two processes use this number, or its tensors changed; "
                    "give each process its own number, and push the version again",
                    metadata={"writer": str(self.writer)},
                )
            self.digests[at] = digest


class SliceWindow:
    """A shard's memory, `view`, as the row of bytes that a writer's slices, at `spans`, are."""

    def __init__(self, view: memoryview, spans: Sequence[SliceSpan]) -> None:
        self._view = view
        self._spans = spans
        self._index = self._start = 0

    def __setitem__(self, where: slice, data: memoryview | bytes) -> None:
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


@dataclass(slots=True)
class ShardTasks:
    """What is under way in one shard.

    `allocation` makes the segment, `covering` compares the slices of all writers, `checking` asks
    the engine whether it takes such tensors, `checkpoint` makes received bytes durable, `restore`
    reads back what survived a crash, and `verification` digests and persists.
    """

    allocation: asyncio.Task[Segment] | None = None
    covering: asyncio.Task[None] | None = None
    checking: asyncio.Task[None] | None = None
    checkpoint: asyncio.Task[None] | None = None
    restore: asyncio.Task[Segment] | None = None
    verification: asyncio.Task[None] | None = None


class ShardState:
    """The state of one shard of a push. Changed on the event loop only.

    Attributes:
        tensors: In the order of their bytes, once the layout is complete.
        describer: The stream that sends its layout now.
        layout_ended: Set once the layout is here, or the stream that sent it left before that.
        parts: By writer: of one its file, of several what each has declared.
        header: What comes before the slices of all writers; None for a file, or while it is not
            known whether what comes is the whole shard.
        whole: All of the slices is here, or outlived the server.
        durable_bytes: Those received that survive a crash of the server.
        headed: The header is proved to match the layout.
        header_digest: Set once the header's bytes were proved.
        found: Digests that the fetchers computed; `digested` is set once they have.
    """

    def __init__(self, index: int, entry: ShardEntry) -> None:
        self.index = index
        self.entry = entry
        self.tensors: tuple[TensorEntry, ...] | None = None
        self.segment: Segment | None = None
        self.tasks = ShardTasks()
        self.describer: object | None = None
        self.layout_ended = asyncio.Event()
        self.parts: dict[int, ShardPart] = {}
        self.header: bytes | None = None
        self.whole = False
        self.durable_bytes = 0
        self.headed = False
        self.header_digest = b""
        self.found: list[bytes] | None = None
        self.digested = asyncio.Event()
        self._described: list[TensorEntry] = []

    # What came of it

    @property
    def file(self) -> ShardPart | None:
        part = self.parts.get(0)
        return part if part is not None and part.framing is PartFraming.FILE else None

    @property
    def received(self) -> int:
        """Bytes that are here without a gap, from the first one on."""
        if (file := self.file) is not None:
            return file.received
        return self.entry.size if self.whole else 0

    @property
    def complete(self) -> bool:
        return self.tensors is not None and self.received == self.entry.size

    @property
    def arrived(self) -> bool:
        """All that its writers bring is here, which is all of it."""
        return self.header is not None and all(part.complete for part in self.parts.values())

    @property
    def covered_bytes(self) -> int:
        """Bytes of it that are here, wherever; a slice that changed counts for all of it."""
        if self.complete:
            return self.entry.size
        # Several may send one slice, which is compared.
        return min(sum(part.covered_bytes for part in self.parts.values()), self.entry.size)

    @property
    def verified(self) -> bool:
        task = self.tasks.verification
        return (
            task is not None and task.done() and not task.cancelled() and task.exception() is None
        )

    @property
    def trainer_verified(self) -> bool:
        """The digests of its writers, of all of it, are here and equal."""
        given = all(part.digested_by_writer for part in self.parts.values())
        return self.found is not None and given

    @property
    def cancellable(self) -> list[asyncio.Task[Any] | None]:
        """Those that may be at work on the segment and can be called off."""
        tasks = self.tasks
        receiving = [tasks.covering, tasks.checking, tasks.checkpoint, tasks.restore]
        return [*receiving, *(part.gpu_copy for part in self.parts.values()), tasks.verification]

    def progress(self, writer: int) -> pb.ShardProgress | None:
        """Return a writer's progress in wire form, or None if it has declared nothing.

        Of what outlived the server all is here, whatever the writer sends.
        """
        part = self.file or self.parts.get(writer)
        if part is None and not self.whole:
            return None
        received = part.received if part is not None else self.entry.size
        size = part.size if part is not None else self.entry.size
        return pb.ShardProgress(
            shard=self.index,
            received_bytes=received,
            size_bytes=size,
            verified=self.verified,
            # A file as far as it is, slices all at once.
            durable_bytes=size * self.durable_bytes // self.entry.size,
        )

    def resume(self, header_digest: bytes, size: int) -> None:
        """Take note that so many bytes, a proved header first, lie in the store."""
        self.headed = True
        self.header_digest = header_digest
        self._lie_in_store(size)

    def go_back(self, good: int) -> None:
        """Take note that of what lies in the store only so many bytes are whole."""
        # Of what several writers bring, shards are kept whole.
        self.headed = self.file is not None and good >= self.entry.data_start
        self._lie_in_store(good if self.headed else 0)

    def _lie_in_store(self, size: int) -> None:
        self.durable_bytes = size
        if (file := self.file) is not None:
            file.received = size
        else:
            self.whole = size == self.entry.size

    # Refusals

    def sent_elsewhere(self, received: int = 0) -> WeightSyncError:
        return self.busy(
            received,
            f"shard {self.index} is being sent on another stream, {received} bytes are "
            "here; send another shard, or read the offset again when that stream has ended",
        )

    def busy(self, received: int, why: str) -> WeightSyncError:
        return WeightSyncError(
            Reason.SHARD_BUSY,
            why,
            metadata={"shard": str(self.index), "received_bytes": str(received)},
            retry_after_s=0.2,
        )

    # Its layout

    def described_elsewhere(self, stream: object) -> bool:
        return self.tensors is None and self.describer not in (None, stream)

    def add(self, part: pb.LayoutPart, entries: list[TensorEntry]) -> None:
        if self.entry != ShardEntry(part.shard_name, part.size_bytes, part.header_bytes):
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"the layout parts of shard {self.index} differ in name, size or header length; "
                "send the same in each",
            )
        self._described += entries

    def take_described(self) -> list[TensorEntry]:
        """Return all tensors of the layout's parts, once."""
        described, self._described = self._described, []
        return described

    @property
    def pending_tensors(self) -> int:
        return len(self._described)

    def describe(self, tensors: tuple[TensorEntry, ...], *, as_file: bool) -> None:
        """Take the checked layout; one writer sends it as a file."""
        self.tensors = tensors
        self.describer = None
        self.layout_ended.set()
        if as_file:
            self.parts[0] = ShardPart.whole(self, len(tensors))
            self.header = b""

    def same_layout(self, part: pb.LayoutPart, entries: list[TensorEntry]) -> bool:
        if self.entry != ShardEntry(part.shard_name, part.size_bytes, part.header_bytes):
            return False
        return set(entries) <= set(self.tensors or ())


def check_cover(
    tensors: Sequence[TensorEntry], parts: Collection[ShardPart], *, partial: bool = False
) -> None:
    """Refuse slices of which an element is in none or in two, or a replica that nobody sends.

    With `partial` a tensor of which no writer sends a slice is not part of the push.
    """
    boxes: list[list[Box]] = [[] for _ in tensors]
    senders: dict[TensorSlice, int] = {}
    ordered = sorted(parts, key=lambda part: part.writer)
    for part in ordered:
        for one in part.slices:
            if one not in senders:
                boxes[one.tensor].append(one.at)
            elif senders[one] == part.writer and one.at.elements:
                raise _refused(
                    f"writer {part.writer} sends {named(tensors, one)} twice", part.writer
                )
            # One that others send as well is a replica that knows it not.
            senders.setdefault(one, part.writer)
    for position, tensor in enumerate(tensors):
        if partial and not boxes[position]:
            continue
        if problem := problem_of(tensor.shape, boxes[position]):
            holders = sorted(
                {part.writer for part in ordered for one in part.slices if one.tensor == position}
            )
            who = (
                f"which writers {', '.join(map(str, holders))} send" if holders else "of no writer"
            )
            raise _refused(
                f"tensor {tensor.name[:100]!r}, {who}, is not sent whole: {problem}; send every "
                "element from exactly one writer"
            )
    for part in ordered:
        for one in part.replicas:
            sender = senders.get(one)
            if one.at.elements and (sender is None or sender >= part.writer):
                raise _refused(
                    f"writer {part.writer} holds a replica of {named(tensors, one)}, which no "
                    "lower writer sends; push all of it in the same boxes",
                    part.writer,
                )


def named(tensors: Sequence[TensorEntry], one: TensorSlice) -> str:
    return f"{one.at} of tensor {tensors[one.tensor].name[:100]!r}"


def _refused(message: str, writer: int | None = None) -> WeightSyncError:
    metadata = {} if writer is None else {"writer": str(writer)}
    return WeightSyncError(Reason.LAYOUT_INVALID, message, metadata=metadata)
