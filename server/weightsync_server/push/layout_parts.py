"""What a trainer declares of the shards of a push is checked, and then there is room for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import check_shard
from weightsync.model.manifest import ShardEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.shard_state import ShardState
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused, tensor_entries

if TYPE_CHECKING:
    from weightsync.model.manifest import TensorEntry
    from weightsync_server.catalog.accepted_tensors import AcceptedTensors
    from weightsync_server.catalog.engine_layouts import EngineLayouts
    from weightsync_server.catalog.layout_cache import KnownLayout
    from weightsync_server.push.limits import PushLimits
    from weightsync_server.push.pipeline import ShardPipeline
    from weightsync_server.push.reservation import PushReservation
    from weightsync_server.push.state import PushState

__all__ = ["PushLayout"]

#: Of a push whose engines nobody could ask for so long no more is asked, seconds.
_PATIENCE_S = 5.0
#: Layouts with more tensors than this are worked on in a thread.
_INLINE_TENSORS = 256


class PushLayout:
    """The layout of one push, as far as it was declared.

    Args:
        state: The push, whose `shards` this fills.
        reservation: Where they go.
        accepted: Asks the engine whether it takes their tensors.
        engine_layouts: Asks it whether they are all that it needs.
        limits: Bounds on it.
        pipeline: Runs what takes time.
    """

    def __init__(
        self,
        state: PushState,
        reservation: PushReservation,
        accepted: AcceptedTensors,
        engine_layouts: EngineLayouts,
        limits: PushLimits,
        pipeline: ShardPipeline,
    ) -> None:
        self._state = state
        self._reservation = reservation
        self._accepted = accepted
        self._engine_layouts = engine_layouts
        self._limits = limits
        self._pipeline = pipeline
        self._tensors = 0
        self._names: set[str] = set()
        self._unchecked = False
        # For how long engines were waited for in vain.
        self._waited_s = 0.0

    def clear(self) -> None:
        """Let go of all shards, once nothing works on them."""
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
        """Take no more shards than there are."""
        self._state.shard_count = len(self._state.shards)

    def take_known(self, known: KnownLayout) -> None:
        """Take a whole layout that the server knows.

        Raises:
            WeightSyncError: LAYOUT_INVALID, MEMORY_EXHAUSTED.
        """
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

        Of several writers each may send it: it is compared with what is known.

        Args:
            part: The part.
            stream: Brings it.
            writer: Who sends that.

        Raises:
            WeightSyncError: LAYOUT_INVALID, REQUEST_INVALID, SHARD_BUSY, MEMORY_EXHAUSTED.
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
                if self._state.writers is not None:
                    raise _contradicted(shard, entries, writer)
                raise refused(
                    f"shard {part.shard} has another layout already; the layout of a shard is sent "
                    "once"
                )
            return
        shard.own(stream)
        shard.add(part, entries)
        pending = sum(other.pending_tensors for other in self._state.shards.values())
        if self._tensors + pending > self._limits.max_tensors:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"the version holds over {self._limits.max_tensors} tensors, the most there may be",
            )
        if part.last:
            parts = shard.take_parts()
            if len(parts) > _INLINE_TENSORS:
                tensors = await asyncio.to_thread(check_shard, shard.entry, parts)
                check_open(self._state)
            else:
                tensors = check_shard(shard.entry, parts)
            self._check(tensors)
            self._accept(shard, tensors)
            shard.owner = None
            if shard.tasks.checking is not None:
                await asyncio.wait([shard.tasks.checking])
                check_open(self._state)

    async def _turn(self, part: pb.LayoutPart, stream: object) -> ShardState:
        """Return a shard; where several writers send its layout, when no other is doing so."""
        shard = self._shard_for(part)
        while self._state.writers is not None and shard.described_elsewhere(stream):
            await shard.writers.layout_ended.wait()
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
        shard.describe(tensors)
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
        """Whether the engine is asked."""
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
        """Refuse a push that lacks tensors, of which it was not known before how many there are.

        Raises:
            WeightSyncError: ENGINE_REFUSED, naming them.
        """
        known = self._state.request.shard_count or self._state.known
        asks = self._asks and not self._unchecked
        if asks and not known and self._is_whole(len(self._state.shards)):
            await self._refuse_lacking()

    async def _refuse_lacking(self) -> None:
        known = self._state.known.layout if self._state.known is not None else None
        tensors = [t for shard in self._state.shards.values() for t in shard.tensors or ()]
        await self._engine_layouts.check_whole(tensors, known)

    async def _ask_engine(self, tensors: tuple[TensorEntry, ...], *, whole: bool) -> None:
        """Refuse a push whose tensors the engine does not take; label it where none tells."""
        if self._waited_s < _PATIENCE_S:
            began = clock.monotonic()
            if not await self._accepted.check(tensors):
                # With dozens of shards each would wait for what has the engine, one by one.
                self._waited_s += clock.monotonic() - began
                self._unchecked = True
        if whole and not self._unchecked:
            await self._refuse_lacking()
        checks = pb.LAYOUT_CHECK_UNCHECKED if self._unchecked else pb.LAYOUT_CHECK_PASSED
        self._state.record.layout_check = checks

    def take(
        self, index: int, entry: ShardEntry, tensors: tuple[TensorEntry, ...]
    ) -> ShardState | None:
        """Return a shard whose checked layout is known; None: it has another.

        Raises:
            WeightSyncError: LAYOUT_INVALID, MEMORY_EXHAUSTED.
        """
        shard = self._state.shards.get(index)
        if shard is None:
            shard = self._state.shards[index] = ShardState(index, entry)
            self._check(tensors)
            self._accept(shard, tensors)
        return shard if (shard.entry, shard.tensors) == (entry, tensors) else None


def _contradicted(shard: ShardState, entries: list[TensorEntry], writer: int) -> WeightSyncError:
    """Return the refusal of a writer whose layout is not that of the others."""
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
