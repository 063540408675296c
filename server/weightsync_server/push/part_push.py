"""What a push of some tensors by several writers has besides its shards: it is made a delta.

Their boxes are put together and proved as those of a whole version are, in memory of their own. The
tensors that came so, where they are not the base's, make a delta shard of each; from there on the
push is what one process that sends that delta has.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import check_shard, check_version, parse_header
from weightsync.model.manifest import Manifest, ShardEntry
from weightsync_server.push.delta_push import DeltaPush
from weightsync_server.workers.fetch.fetch_api import ComposeOrder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.model.manifest import TensorEntry
    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import Model
    from weightsync_server.ops.meters import Meters
    from weightsync_server.push.shard_state import ShardState

__all__ = ["ComposedShard", "PartPush"]

#: What a delta shard may take besides what its tensors take in a shard of their own.
_HEAD_BYTES = 4 << 10


@dataclass(slots=True)
class ComposedShard:
    """The delta shard that the tensors of one shard make.

    Attributes:
        entry: Its name and sizes.
        segment: Where it lies.
        digests: Of its three tensors.
    """

    entry: ShardEntry
    segment: Segment
    digests: list[bytes]


@dataclass(slots=True)
class _PendingShard:
    shard: ComposedShard | None = None
    composed: asyncio.Event = field(default_factory=asyncio.Event)


class PartPush(DeltaPush):
    """The part of a push that those of some tensors by several writers alone have.

    Args:
        model: What both are versions of.
        record: The version that it brings.
        base: The version whose other tensors it keeps.
        meters: Durations.
        declared_bytes: Of the shards with the tensors.
        shard_count: Of those.
    """

    def __init__(
        self,
        model: Model,
        record: VersionRecord,
        base: VersionRecord,
        meters: Meters,
        declared_bytes: int,
        shard_count: int,
    ) -> None:
        super().__init__(model, record, base, meters)
        self._composed = model.slots.scratch()
        self._declared_bytes = declared_bytes
        self._shard_count = shard_count
        self._made: dict[int, _PendingShard] = {}
        #: Each tensor of the base, with its digest.
        self._tensors: Mapping[str, tuple[TensorEntry, bytes]] = {}

    async def equip(self) -> None:
        """See `DeltaPush`; and get memory for the delta that is made.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED, DATA_CORRUPT.
        """
        await super().equip()
        total = self._declared_bytes + _HEAD_BYTES * self._shard_count
        await self._model.slots.promise(self._composed, total)
        self._tensors = await asyncio.to_thread(_by_name, self._base_manifest)

    def check_layout(self, tensors: Sequence[TensorEntry]) -> None:
        """Refuse a tensor that the base has not, or has otherwise, before its bytes come.

        Raises:
            WeightSyncError: LAYOUT_INVALID, naming it.
        """
        for tensor in tensors:
            known = self._tensors.get(tensor.name)
            if known is not None and _kind(known[0]) == _kind(tensor):
                continue
            kept = f"{known[0].dtype} {list(known[0].shape)}" if known else "not at all"
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"tensor {tensor.name[:100]!r} is {tensor.dtype} {list(tensor.shape)}, in version "
                f"{self.base.version}, whose other tensors this push keeps, it is {kept}; leave it "
                "out, or push all tensors",
            )

    async def compose(self, shard: ShardState, segment: Segment, digests: list[bytes]) -> None:
        """Make a delta shard of a shard that is here, and prove it.

        Args:
            shard: The shard.
            segment: Where it lies.
            digests: Of its tensors, proved.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED, FETCHER_FAILED, SHUTTING_DOWN, ...
        """
        order = await asyncio.to_thread(self._order, shard, digests)
        size, header_size = await asyncio.to_thread(_sizes, order)
        target = await self._model.slots.segment(self._composed, shard.index, size)
        await self._model.fetch.compose(target, size, segment, order)
        entry = ShardEntry(f"delta-{shard.index:05}.safetensors", size, header_size)
        await self._inspect(shard.index, entry, target)
        found = await self._model.fetch.digest(target, entry)
        pending = self._pending(shard.index)
        pending.shard = ComposedShard(entry, target, found)
        pending.composed.set()

    async def composed(self, index: int) -> ComposedShard:
        """Return what `compose` made of a shard, once it has."""
        pending = self._pending(index)
        while pending.shard is None:
            await pending.composed.wait()
        return pending.shard

    async def build(self, container: Manifest) -> Manifest:
        """See `DeltaPush`; what is kept are the shards that were made, not those that came.

        Raises:
            WeightSyncError: As `DeltaPush`.
        """
        made = [await self.composed(index) for index in range(len(container.layout.shards))]
        groups = [_entries(index, shard) for index, shard in enumerate(made)]
        layout = await asyncio.to_thread(check_version, [shard.entry for shard in made], groups)
        digests = tuple(digest for shard in made for digest in shard.digests)
        return await super().build(Manifest(layout, digests))

    def end(self) -> None:
        """See `DeltaPush`."""
        if not self._ended:
            self._model.slots.discard(self._composed)
            self._tensors, self._made = {}, {}
        super().end()

    def _pending(self, index: int) -> _PendingShard:
        return self._made.setdefault(index, _PendingShard())

    def _order(self, shard: ShardState, digests: list[bytes]) -> ComposeOrder:
        brought = {one.tensor for boxes in shard.writers.boxes.values() for one in boxes.sent}
        start, tensors = shard.entry.data_start, []
        for at, (tensor, digest) in enumerate(zip(shard.tensors or (), digests, strict=True)):
            # Those that nobody sends stay what they are, as do those that are the same.
            if at in brought and digest != self._tensors[tensor.name][1]:
                where = start + tensor.begin, start + tensor.end
                tensors.append((tensor.name, *_kind(tensor), *where, digest.hex()))
        signature = self._base_manifest.layout.signature
        return ComposeOrder(shard.index, self.base.content_digest, signature, tensors)


def _by_name(manifest: Manifest) -> dict[str, tuple[TensorEntry, bytes]]:
    pairs = zip(manifest.layout.tensors, manifest.digests, strict=True)
    return {tensor.name: (tensor, digest) for tensor, digest in pairs}


def _kind(tensor: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _sizes(order: ComposeOrder) -> tuple[int, int]:
    # Not at the top: the codec is only for who gets such pushes.
    from weightsync.delta import DenseDelta, DenseTensor

    tensors = [
        DenseTensor(name, dtype, tuple(shape), begin, end, bytes.fromhex(digest))
        for name, dtype, shape, begin, end, digest in order.tensors
    ]
    made = DenseDelta(order.shard, order.base_content_digest, order.layout_digest, tensors)
    return made.size, made.header_size


def _entries(index: int, shard: ComposedShard) -> tuple[TensorEntry, ...]:
    header = shard.segment.view[8 : shard.entry.data_start]
    return check_shard(shard.entry, parse_header(header, index))
