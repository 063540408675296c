"""Changes that writers send of their slices: the base of each, and the slices changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Layout
from weightsync.model.tensor_slices import slice_name
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.deltas.materializer import find_base, mismatch
from weightsync_server.ops.tasks import all_done
from weightsync_server.push.shard_part import SlicePatch
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused
from weightsync_server.residency.slot import Slot, slot_of
from weightsync_server.workers.fetch.fetch_api import FetchApi, PatchOrder

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.shard_part import ShardPart, ShardState, TensorSlice
    from weightsync_server.push.state import PushState


class SliceBases:
    """The versions that writers of one push name as bases; each stays in memory until `close`."""

    def __init__(self, state: PushState, model: Model) -> None:
        self._state = state
        self._model = model
        #: Content digest of each writer's; and where they lie.
        self._named: dict[int, str] = {}
        self._leased: dict[str, Slot] = {}
        self._patches: set[Slot] = set()
        self._closed = False

    async def take(self, request: pb.BeginPushRequest) -> None:
        """Keep what a writer names as its base in memory, where it lies.

        Raises BASE_MISMATCH, having changed nothing; the writer can then send all.
        """
        digest = request.base_content_digest
        if self._closed:
            return
        if digest not in self._leased:
            await self._lease(digest, request.metadata.get("run_id", ""))
        self._named[request.writer] = digest

    async def patch(self, writer: int, shard: int, size: int) -> SlicePatch:
        """Return memory for the changes of a writer's slices of a shard, and what they change."""
        check_open(self._state)
        digest = self._named.get(writer)
        if digest is None and self._state.recovered:
            raise mismatch(
                self._model.table,
                f"the server has restarted since writer {writer} named it, and reads none again",
            )
        if digest is None:
            raise refused(
                f"writer {writer} sends changes of shard {shard} and named no base; begin with "
                "PUSH_KIND_DELTA and base_content_digest, or send the boxes as they are"
            )
        base = self._leased[digest].segments[shard]
        slots = self._model.slots
        slot = slots.scratch()
        self._patches.add(slot)
        try:
            segment = await slots.segment(slot, shard, size)
            check_open(self._state)
        except BaseException:
            self._discard(slot)
            raise
        return SlicePatch(digest, base, segment, size, lambda: self._discard(slot))

    def close(self) -> None:
        """Let go of all of them, once nothing reads them; further calls do nothing."""
        self._closed = True
        leased, self._leased = self._leased, {}
        self._named.clear()
        for slot in leased.values():
            self._model.slots.end_lease(slot)
        for slot in list(self._patches):
            self._discard(slot)

    def _discard(self, slot: Slot) -> None:
        self._patches.discard(slot)
        self._model.slots.discard(slot)
        self._model.slots.wake()

    async def _lease(self, digest: str, run_id: str) -> None:
        table, slots = self._model.table, self._model.slots
        base = find_base(table, digest, run_id)
        slot = slot_of(base) if base.slot is not None else None
        if slot is None or base.residency != pb.RESIDENCY_STAGED:
            raise mismatch(table, f"version {base.version} is no longer in memory")
        slot.leases += 1
        try:
            await self._check_layout(base)
            check_open(self._state)
        except BaseException:
            slots.end_lease(slot)
            raise
        if self._closed or digest in self._leased:
            # Another writer has named it meanwhile.
            slots.end_lease(slot)
        else:
            self._leased[digest] = slot

    async def _check_layout(self, base: VersionRecord) -> None:
        manifest = await self._model.commits.manifest(base)
        ours: Layout | None = self._state.known.layout if self._state.known else None
        if ours is None or ours.digest != manifest.layout.digest:
            raise mismatch(
                self._model.table, f"tensors are laid out differently in version {base.version}"
            )


#: What changes that are wrong in themselves show themselves as.
_WRONG = frozenset({Reason.SHARD_INVALID, Reason.DIGEST_MISMATCH, Reason.LAYOUT_INVALID})


async def lay_changes(fetch: FetchApi, shard: ShardState, segment: Segment) -> None:
    """Make the slices of writers of those of their bases, where they sent what changed in them."""
    seen: set[TensorSlice] = set()
    laid = []
    for _, part in sorted(shard.parts.items()):
        # A slice that several send is laid once: two that change it at a time make neither.
        laid.append(_lay(fetch, part, segment, frozenset(seen)))
        seen |= set(part.slices)
    await all_done(laid)


async def _lay(
    fetch: FetchApi, part: ShardPart, segment: Segment, skipped: AbstractSet[TensorSlice]
) -> None:
    patch, tensors = part.patch, part.shard.tensors or ()
    if patch is None:
        return
    kinds: dict[str, tuple[str, Sequence[int]]] = {}
    names: dict[str, str] = {}
    boxes = []
    for one, span in zip(part.slices, part.spans, strict=True):
        tensor = tensors[one.tensor]
        name = slice_name(tensor.name, one.at)
        kinds[name] = tensor.dtype, one.at.sizes
        names[name] = f"{tensor.name}{one.at}"
        if one not in skipped:
            boxes.append((name, span))
    order = PatchOrder(patch.size, patch.base_content_digest, kinds, boxes)
    try:
        await fetch.patch_slices(segment, patch.base, patch.segment, order)
    except WeightSyncError as error:
        if error.reason not in _WRONG:
            raise
        raise WeightSyncError(
            error.reason,
            f"the changes of writer {part.writer} in shard {part.shard.index}: "
            f"{_readable(error.message, names)}",
            metadata={"writer": str(part.writer)},
        ) from error
    patch.discard()
    part.patch = None


def _readable(message: str, names: Mapping[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        message = message.replace(name, names[name])
    return message
