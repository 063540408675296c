"""What a trainer declares of the shards of a push is checked, and then there is room for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import check_shard
from weightsync.model.manifest import ShardEntry, TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.commits import KnownLayout
from weightsync_server.push.shard_part import ShardState
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused, tensor_entries

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.pipeline import ShardPipeline
    from weightsync_server.push.push_settings import PushSettings
    from weightsync_server.push.reservation import PushReservation
    from weightsync_server.push.state import PushState


#: Of a push whose engines nobody could ask for so long no more is asked, seconds.
_PATIENCE_S = 5.0
#: Layouts with more tensors than this are worked on in a thread.
_INLINE_TENSORS = 256


class PushLayout:
    """The layout of one push, as far as it was declared; it fills the `shards` of `state`."""

    def __init__(
        self,
        state: PushState,
        reservation: PushReservation,
        model: Model,
        limits: PushSettings,
        pipeline: ShardPipeline,
    ) -> None:
        self._state = state
        self._reservation = reservation
        self._model = model
        self._limits = limits
        self._pipeline = pipeline
        self._tensors = 0
        self._names: set[str] = set()
        self._unchecked = False
        # For how long engines were waited for in vain.
        self._waited_s = 0.0

    def clear(self) -> None:
        for shard in self._state.shards.values():
            # They name each other: thousands of digests would stay until the next collection.
            shard.parts = {}
        self._state.shards = {}
        self._state.known = None
        self._tensors, self._names = 0, set()
        self._unchecked, self._waited_s = False, 0.0

    def restart(self) -> None:
        """Let go of all shards; the same will be declared again."""
        self.clear()
        self._state.shard_count = self._state.request.shard_count
        self._state.declared_bytes = 0

    def finish(self) -> None:
        self._state.shard_count = len(self._state.shards)

    def take_known(self, known: KnownLayout) -> None:
        if self._state.shard_count not in (0, len(known.layout.shards)):
            raise refused(
                f"shard_count is {self._state.shard_count}, the layout named by layout_digest has "
                f"{len(known.layout.shards)} shards"
            )
        self._state.known = known
        self._state.shard_count = len(known.layout.shards)
        for index, (entry, tensors) in enumerate(
            zip(known.layout.shards, known.layout.by_shard, strict=True)
        ):
            shard = self._state.shards[index] = ShardState(index, entry)
            self._accept(shard, tensors)

    async def add(self, part: pb.LayoutPart, stream: object, writer: int = 0) -> None:
        """Take a part of a shard's layout; the last one is checked and reserves memory.

        Each writer may send it: it is compared with what is known.
        """
        if len(part.shard_name.encode()) > 255:
            raise refused("shard_name is over 255 bytes; shorten it")
        large = len(part.tensors) > _INLINE_TENSORS
        entries = await asyncio.to_thread(tensor_entries, part) if large else tensor_entries(part)
        check_open(self._state)
        shard = await self._turn(part, stream)
        if shard.tensors is not None:
            same = shard.same_layout
            if not (await asyncio.to_thread(same, part, entries) if large else same(part, entries)):
                if self._state.writers.several:
                    raise _contradicted(shard, entries, writer)
                raise refused(
                    f"shard {part.shard} already has a different layout; send the layout of a "
                    "shard once"
                )
            return
        shard.describer = stream
        shard.add(part, entries)
        pending = sum(other.pending_tensors for other in self._state.shards.values())
        if self._tensors + pending > self._limits.max_tensors:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"the version holds over {self._limits.max_tensors} tensors, the most there may be",
            )
        if part.last:
            parts = shard.take_described()
            if len(parts) > _INLINE_TENSORS:
                tensors = await asyncio.to_thread(check_shard, shard.entry, parts)
                check_open(self._state)
            else:
                tensors = check_shard(shard.entry, parts)
            self._check(tensors)
            self._accept(shard, tensors)
            if shard.tasks.checking is not None:
                await asyncio.wait([shard.tasks.checking])
                check_open(self._state)

    async def _turn(self, part: pb.LayoutPart, stream: object) -> ShardState:
        """Return a shard; where several writers send its layout, when no other is doing so."""
        shard = self._shard_for(part)
        while shard.described_elsewhere(stream):
            if not self._state.writers.several:
                raise shard.sent_elsewhere()
            await shard.layout_ended.wait()
            check_open(self._state)
            shard = self._shard_for(part)
        return shard

    def _shard_for(self, part: pb.LayoutPart) -> ShardState:
        shard = self._state.shards.get(part.shard)
        if shard is not None:
            return shard
        most = self._state.shard_count or self._limits.max_shards
        if part.shard >= most:
            raise refused(f"shard {part.shard} of a version of at most {most} shards")
        entry = ShardEntry(part.shard_name, part.size_bytes, part.header_bytes)
        shard = self._state.shards[part.shard] = ShardState(part.shard, entry)
        return shard

    def _check(self, tensors: tuple[TensorEntry, ...]) -> None:
        if self._state.delta is not None:
            self._state.delta.check_layout(tensors)
        for tensor in tensors:
            if tensor.name in self._names:
                raise WeightSyncError(
                    Reason.LAYOUT_INVALID, f"tensor {tensor.name[:100]!r} is in the version twice"
                )
            self._names.add(tensor.name)

    def _accept(self, shard: ShardState, tensors: tuple[TensorEntry, ...]) -> None:
        self._state.declared_bytes += shard.entry.size
        promised = self._state.request.total_bytes
        if promised and self._state.declared_bytes > promised:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"the shards so far hold {self._state.declared_bytes} bytes, total_bytes promised "
                f"{promised}; declare the right sum or none",
            )
        self._tensors += len(tensors)
        shard.describe(tensors, as_file=not self._state.writers.several)
        if self._asks:
            shard.tasks.checking = self._pipeline.start(
                self._ask_engine(tensors, whole=self._is_whole(self._state.shard_count)),
                "asking the engine about the layout",
            )
        shard.segment = self._reservation.reuse(shard)
        if shard.segment is None:
            # A task of its own, so that streams of other shards go on meanwhile.
            total = self._state.declared_bytes
            shard.tasks.allocation = self._pipeline.start(
                self._reservation.allocate(shard, total), f"reserving {total} bytes"
            )

    @property
    def _asks(self) -> bool:
        # What an engine's memory has, it takes; nor could it be asked in a transaction.
        asked = self._state.delta is None and not self._state.record.in_place
        return asked and self._state.existing is None

    def _is_whole(self, shard_count: int) -> bool:
        """Whether all tensors of the version are described, of which it lacks none on purpose."""
        shards, part = self._state.shards.values(), self._state.request.partial
        described = len(shards) == shard_count and all(s.tensors is not None for s in shards)
        # What comes of an origin is what that has.
        return described and not part and not self._state.record.backfill

    async def check_whole(self) -> None:
        """Refuse a push that lacks tensors, of which it was not known before how many there are."""
        known = self._state.request.shard_count or self._state.known
        asks = self._asks and not self._unchecked
        if asks and not known and self._is_whole(len(self._state.shards)):
            await self._refuse_lacking()

    async def _refuse_lacking(self) -> None:
        known = self._state.known.layout if self._state.known is not None else None
        tensors = [t for shard in self._state.shards.values() for t in shard.tensors or ()]
        await self._model.engine_layouts.check_whole(tensors, known)

    async def _ask_engine(self, tensors: tuple[TensorEntry, ...], *, whole: bool) -> None:
        """Refuse a push whose tensors the engine does not take; label it where none tells."""
        if self._waited_s < _PATIENCE_S:
            began = clock.monotonic()
            if not await self._model.accepted.check(tensors):
                # With dozens of shards each would wait for what has the engine, one by one.
                self._waited_s += clock.monotonic() - began
                self._unchecked = True
        if whole and not self._unchecked:
            await self._refuse_lacking()
        checks = pb.LAYOUT_CHECK_UNCHECKED if self._unchecked else pb.LAYOUT_CHECK_PASSED
        self._state.record.check_layout(checks)

    def take(
        self, index: int, entry: ShardEntry, tensors: tuple[TensorEntry, ...]
    ) -> ShardState | None:
        """Return a shard whose checked layout is known; None: it has another."""
        shard = self._state.shards.get(index)
        if shard is None:
            shard = self._state.shards[index] = ShardState(index, entry)
            self._check(tensors)
            self._accept(shard, tensors)
        return shard if (shard.entry, shard.tensors) == (entry, tensors) else None


def _contradicted(shard: ShardState, entries: list[TensorEntry], writer: int) -> WeightSyncError:
    known = {tensor.name: tensor for tensor in shard.tensors or ()}
    what = f"shard {shard.index} in another way"
    for tensor in entries:
        other = known.get(tensor.name)
        if other is None:
            what = f"tensor {tensor.name[:100]!r} in shard {shard.index}, where others have it not"
        elif other != tensor:
            what = (
                f"tensor {tensor.name[:100]!r} as {tensor.dtype} {list(tensor.shape)}, others as "
            )
            what += f"{other.dtype} {list(other.shape)}"
        else:
            continue
        break
    return WeightSyncError(
        Reason.LAYOUT_INVALID,
        f"writer {writer} declares {what}; all writers push tensors of the same names, dtypes and "
        "whole shapes, in the same order",
        metadata={"writer": str(writer)},
    )
