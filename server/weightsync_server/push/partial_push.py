"""What a push of some tensors by several writers has besides its shards: it is made a delta.

Their slices are put together and proved in memory of their own. Tensors that are not the base's
make a delta shard of each; then the push is what one process that sends that delta has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import check_shard, check_version, parse_header
from weightsync.model.manifest import Manifest, ShardEntry, TensorEntry
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.deltas.materializer import find_base, mismatch
from weightsync_server.ops.metrics import Meters
from weightsync_server.push.delta_push import DeltaPush
from weightsync_server.workers.fetch.fetch_api import ComposeOrder

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.shard_part import ShardState
    from weightsync_server.push.state import PushState


#: What a delta shard may take besides what its tensors take in a shard of their own.
_HEAD_BYTES = 4 << 10


@dataclass(slots=True)
class ComposedShard:
    entry: ShardEntry
    segment: Segment
    digests: list[bytes]


class PartPush(DeltaPush):
    """The part of a push that those of some tensors by several writers alone have.

    The version keeps the other tensors of `base`. `declared_bytes` and `shard_count` are of shards
    with pushed tensors.
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
        self._made: dict[int, asyncio.Future[ComposedShard]] = {}
        #: Each tensor of the base, with its digest.
        self._tensors: Mapping[str, tuple[TensorEntry, bytes]] = {}

    async def equip(self) -> None:
        await super().equip()
        total = self._declared_bytes + _HEAD_BYTES * self._shard_count
        await self._model.slots.promise(self._composed, total)
        self._tensors = await asyncio.to_thread(_by_name, self._base_manifest)

    def check_layout(self, tensors: Sequence[TensorEntry]) -> None:
        """Refuse a tensor that the base has not, or has otherwise, before its bytes come."""
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
        """Make a delta shard of a shard that is here, its `digests` proved, and prove it."""
        order = await asyncio.to_thread(self._order, shard, digests)
        size, header_size = await asyncio.to_thread(_sizes, order)
        target = await self._model.slots.segment(self._composed, shard.index, size)
        await self._model.fetch.compose(target, size, segment, order)
        entry = ShardEntry(f"delta-{shard.index:05}.safetensors", size, header_size)
        await self._inspect(shard.index, entry, target)
        found = await self._model.fetch.digest(target, entry)
        if self._pending(shard.index).done():
            # Made again because a write failed.
            del self._made[shard.index]
        self._pending(shard.index).set_result(ComposedShard(entry, target, found))

    async def composed(self, index: int) -> ComposedShard:
        return await asyncio.shield(self._pending(index))

    async def build(self, container: Manifest) -> Manifest:
        """See `DeltaPush`; what is kept are the shards that were made, not those that came."""
        made = [await self.composed(index) for index in range(len(container.layout.shards))]
        groups = [_entries(index, shard) for index, shard in enumerate(made)]
        layout = await asyncio.to_thread(check_version, [shard.entry for shard in made], groups)
        digests = tuple(digest for shard in made for digest in shard.digests)
        return await super().build(Manifest(layout, digests))

    def end(self) -> None:
        if not self._ended:
            self._model.slots.discard(self._composed)
            self._tensors, self._made = {}, {}
        super().end()

    def _pending(self, index: int) -> asyncio.Future[ComposedShard]:
        return self._made.setdefault(index, asyncio.get_running_loop().create_future())

    def _order(self, shard: ShardState, digests: list[bytes]) -> ComposeOrder:
        brought = {one.tensor for part in shard.parts.values() for one in part.slices}
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


def part_base(model: Model, request: pb.BeginPushRequest) -> VersionRecord:
    """Return the version that the first writer to come names, else the live one."""
    table, digest = model.table, request.base_content_digest
    if digest and not request.base_version:
        return find_base(table, digest, request.metadata.get("run_id", ""))
    wanted = request.base_version or model.serving.live
    base = table.find(wanted)
    if base is None or base.commit is None:
        which = f"version {wanted}" if wanted else "a live version"
        raise WeightSyncError(
            Reason.VERSION_UNKNOWN,
            f"a partial push keeps the tensors of {which}, which the server does not have; name "
            "another one with base=, or push all tensors",
        )
    damaged = next((record for record in base.chain if record.damaged), None)
    if damaged is not None:
        raise mismatch(table, f"version {damaged.version} is damaged in the store")
    if digest not in ("", base.content_digest):
        raise mismatch(table, f"version {wanted} has content {base.content_digest}, not {digest}")
    return base


def check_same_part(state: PushState, request: pb.BeginPushRequest) -> None:
    """Refuse a writer that keeps other tensors, or of another base, than those before it."""
    first, base = state.request.writer, state.record.base
    if request.partial != state.request.partial:
        some, whole = (request.writer, first) if request.partial else (first, request.writer)
        raise _refused(
            request.writer,
            f"writer {some} pushes some tensors, writer {whole} all of them; all writers of a push "
            "do the same",
        )
    if not request.partial or base is None:
        return
    version, digest = request.base_version, request.base_content_digest
    if version in (0, base.version) and digest in ("", base.content_digest):
        return
    named = f"version {version}" if version else "a version"
    content = f" with content {digest}" if digest else ""
    raise _refused(
        request.writer,
        f"writer {request.writer} keeps the other tensors of {named}{content}, writer {first} "
        f"those of version {base.version} with content {base.content_digest}; all writers of a "
        "push name one base with base=, or none",
    )


def _refused(writer: int, problem: str) -> WeightSyncError:
    return WeightSyncError(Reason.LAYOUT_INVALID, problem, metadata={"writer": str(writer)})
