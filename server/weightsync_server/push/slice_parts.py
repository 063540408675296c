"""What each of several writers declares of a shard is checked, and compared with the others'."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.layout import MAX_DIMS, build_header
from weightsync.model.manifest import TensorEntry
from weightsync.model.tensor_slices import Box, SliceSpan, span_of
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.shard_part import ShardPart, ShardState, TensorSlice, check_cover
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused

if TYPE_CHECKING:
    from weightsync_server.push.pipeline import ShardPipeline
    from weightsync_server.push.push_settings import PushSettings
    from weightsync_server.push.slice_changes import SliceBases
    from weightsync_server.push.state import PushState


#: Slices over so many bytes come in blocks of rows of at least so many: each is a step of Python.
_LARGE_BYTES, _LEAST_BLOCK_BYTES = 1 << 20, 1 << 10


#: What a delta shard may have beside the bytes of its slices, and for each, most of it its name.
_PATCH_BYTES, _BOX_BYTES = 4 << 10, 2 << 10


@dataclass(slots=True)
class _Declared:
    sent: list[pb.Box] = field(default_factory=list)
    replicas: list[pb.Box] = field(default_factory=list)


class PushSlices:
    """The slices of one push, as far as declared; `pipeline` takes on a shard with all of them."""

    def __init__(
        self, state: PushState, limits: PushSettings, bases: SliceBases, pipeline: ShardPipeline
    ) -> None:
        self._state = state
        self._limits = limits
        self._bases = bases
        self._pipeline = pipeline
        self._count = 0
        #: What came of a shard on a stream, until its last part.
        self._declared: dict[tuple[int, object], _Declared] = {}

    def find(self, index: int, writer: int, what: str = "bytes") -> ShardPart:
        """Return what a writer brings of a shard; `what` names what it sends in the refusal."""
        shard = self._state.shards.get(index)
        part = shard.parts.get(writer) if shard is not None else None
        if part is not None:
            return part
        if not self._state.writers.several:
            raise refused(f"{what} before the last part of its layout; send it first")
        raise refused(
            f"send the last part of writer {writer}'s boxes before bytes or digests of shard "
            f"{index}"
        )

    async def add(self, part: pb.BoxPart, writer: int, stream: object) -> None:
        """Take a part of what a writer declares of a shard; the last one is checked."""
        writers, shard = self._state.writers, self._state.shards.get(part.shard)
        if not writers.several:
            raise refused("begin the push with writers: boxes belong to a push of several writers")
        if shard is None or shard.tensors is None:
            raise refused(f"boxes of shard {part.shard} before the last part of its layout")
        more = len(part.sent) + len(part.replicas)
        if self._count + more > self._limits.max_boxes:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"the writers declare over {self._limits.max_boxes} boxes, the most there may be; "
                "join those that touch",
            )
        self._count += more
        declared = self._declared.setdefault((part.shard, stream), _Declared())
        declared.sent += part.sent
        declared.replicas += part.replicas
        if not part.last:
            return
        del self._declared[part.shard, stream]
        try:
            mine = await asyncio.to_thread(_slices, shard, declared, writer)
            check_open(self._state)
            if shard.tasks.restore is not None:
                # Whether all of it was kept; see below.
                await asyncio.wait([shard.tasks.restore])
                check_open(self._state)
            if part.patch_bytes:
                _check_patch(mine, part.patch_bytes)
            if part.patch_bytes and writer not in shard.parts and not shard.complete:
                patch = await self._bases.patch(writer, shard.index, part.patch_bytes)
                mine.expect_changes(patch)
        except BaseException:
            # Also of a stream that was cut: what it declared comes again.
            self._count -= len(declared.sent) + len(declared.replicas)
            raise
        check_open(self._state)
        size = part.patch_bytes or mine.size
        known = shard.parts.setdefault(writer, mine)
        if known is not mine:
            self._count -= len(mine.digests)
            if mine.patch is not None:
                mine.patch.discard()
            _refuse_other(known, mine, size)
        else:
            writers.declare(writer)
        if known.kept or (known is mine and shard.complete):
            # The shard outlived the server, and the digests that follow prove it again.
            known.keep(size)
        if len(shard.parts) == writers.count and shard.tasks.covering is None:
            # A task of the push: whoever declared the last of it may leave at any time.
            shard.tasks.covering = self._pipeline.start(
                self._cover(shard, shard.tensors), f"comparing the boxes of shard {shard.index}"
            )
        if shard.tasks.covering is not None:
            await asyncio.wait([shard.tasks.covering])
            check_open(self._state)

    def forget(self, stream: object) -> None:
        for key in [key for key in self._declared if key[1] is stream]:
            declared = self._declared.pop(key)
            self._count -= len(declared.sent) + len(declared.replicas)

    def clear(self) -> None:
        """Let go of all of them, once nothing works on them."""
        self._declared, self._count = {}, 0

    async def _cover(self, shard: ShardState, tensors: tuple[TensorEntry, ...]) -> None:
        """Prove, once all writers have declared it, that a shard will be whole."""
        partial = self._state.request.partial
        shard.header = await asyncio.to_thread(_checked_header, shard, tensors, partial=partial)
        # All may be here by now.
        self._pipeline.take_arrived(shard)


def _slices(shard: ShardState, declared: _Declared, writer: int) -> ShardPart:
    slices, spans = _tensor_slices(shard, declared.sent, writer)
    replicas, _ = _tensor_slices(shard, declared.replicas, writer)
    return ShardPart.of_slices(shard, writer, slices, replicas, spans)


def _check_patch(part: ShardPart, size: int) -> None:
    # In one shard all may have changed, and what tells of it comes on top.
    if size > part.size + _PATCH_BYTES + _BOX_BYTES * len(part.slices):
        raise refused(
            f"writer {part.writer} has {size} bytes of changes for boxes of {part.size} in "
            f"shard {part.shard.index}; send those"
        )


def _refuse_other(known: ShardPart, part: ShardPart, size: int) -> None:
    slices = part.slices, part.replicas
    # Of what was kept it sends nothing, whichever way it would.
    if (known.slices, known.replicas) != slices or (known.size != size and not known.kept):
        raise WeightSyncError(
            Reason.LAYOUT_INVALID,
            f"writer {part.writer} declared other boxes of shard {part.shard.index} before, or "
            "other changes in them; give each process a number of its own, and each push a key "
            "of its own",
            metadata={"writer": str(part.writer)},
        )


def _checked_header(shard: ShardState, tensors: tuple[TensorEntry, ...], *, partial: bool) -> bytes:
    check_cover(tensors, list(shard.parts.values()), partial=partial)
    json_header, entries = build_header(((t.name, t.dtype, t.shape) for t in tensors), shard.index)
    if len(json_header) != shard.entry.header_size or entries != tensors:
        raise WeightSyncError(
            Reason.LAYOUT_INVALID,
            f"the header of shard {shard.index} takes {len(json_header)} bytes with its tensors "
            f"in a row, but the layout declares {shard.entry.header_size} or other places; lay "
            "tensors out one after the other, as weightsync.model.layout.build_header does",
        )
    return len(json_header).to_bytes(8, "little") + json_header


def _tensor_slices(
    shard: ShardState, declared: Iterable[pb.Box], writer: int
) -> tuple[list[TensorSlice], list[SliceSpan]]:
    tensors: Sequence[TensorEntry] = shard.tensors or ()
    slices, spans = [], []
    for wire in declared:
        if wire.tensor >= len(tensors):
            raise _outside(
                writer,
                f"a box of tensor {wire.tensor} of shard {shard.index}, which has "
                f"{len(tensors)} tensors",
            )
        tensor = tensors[wire.tensor]
        box = Box(tuple(wire.offsets), tuple(wire.sizes))
        same = len(box.offsets) == len(box.sizes) == len(tensor.shape) <= MAX_DIMS
        if not same or any(end > size for end, size in zip(box.ends, tensor.shape, strict=True)):
            raise _outside(
                writer,
                f"the box {_shown(wire)} of tensor {tensor.name[:100]!r}, whose shape is "
                f"{list(tensor.shape)}",
            )
        begin = shard.entry.data_start + tensor.begin
        name = tensor.name[:100]
        if not box.elements and 0 not in tensor.shape:
            raise _outside(writer, f"an empty box of tensor {name!r}; leave it out")
        try:
            span = span_of(box, tensor.shape, DTYPE_BITS[tensor.dtype], begin)
        except ValueError as error:
            raise _outside(writer, f"tensor {name!r}, where {error}") from None
        block = span.run * (span.counts[-1] if span.counts else 1)
        if span.size > _LARGE_BYTES and block < _LEAST_BLOCK_BYTES:
            raise _outside(
                writer, f"{box} of tensor {name!r}, which is stored in blocks of {block} bytes"
            )
        spans.append(span)
        slices.append(TensorSlice(wire.tensor, box))
    return slices, spans


def _shown(wire: pb.Box) -> str:
    return f"at {list(wire.offsets[:MAX_DIMS])} of sizes {list(wire.sizes[:MAX_DIMS])}"


def _outside(writer: int, what: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.LAYOUT_INVALID,
        f"writer {writer} declares {what}; push again with boxes inside the tensors",
        metadata={"writer": str(writer)},
    )
