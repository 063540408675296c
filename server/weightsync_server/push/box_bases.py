"""What writers send changes of: a version each, and memory for the changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.deltas.bases import find_base, mismatch
from weightsync_server.push.box_upload import BoxPatch
from weightsync_server.push.validation import refused
from weightsync_server.residency.slot import slot_of

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import Model
    from weightsync_server.push.state import PushState
    from weightsync_server.residency.slot import Slot

__all__ = ["BoxBases"]


class _Base(NamedTuple):
    content_digest: str
    slot: Slot


class BoxBases:
    """The versions that writers of one push name as bases; each stays in memory until `close`.

    Args:
        state: The push.
        model: What all of them are versions of.
    """

    def __init__(self, state: PushState, model: Model) -> None:
        self._state = state
        self._model = model
        self._of_writers: dict[int, _Base] = {}
        self._patches: set[Slot] = set()
        self._closed = False

    async def take(self, request: pb.BeginPushRequest) -> None:
        """Keep what a writer names as its base in memory, where it lies.

        Raises:
            WeightSyncError: BASE_MISMATCH; nothing is different then, and the writer can send all.
        """
        digest, writer = request.base_content_digest, request.writer
        table, known = self._model.table, self._of_writers.get(writer)
        if self._closed or (known is not None and known.content_digest == digest):
            return
        base = find_base(table, digest, request.metadata.get("run_id", ""))
        slot = slot_of(base) if base.slot is not None else None
        if slot is None or base.residency != pb.RESIDENCY_STAGED:
            raise mismatch(table, f"version {base.version} does not lie in memory any more")
        slot.leases += 1
        try:
            await self._check_layout(base)
            if self._closed:
                raise self._state.error or mismatch(table, "the push has ended")
        except BaseException:
            self._model.slots.end_lease(slot)
            raise
        self._let_go(writer)
        self._of_writers[writer] = _Base(digest, slot)

    async def patch(self, writer: int, shard: int, size: int) -> BoxPatch:
        """Return memory for the changes of a writer's boxes of a shard, and what they change.

        Raises:
            WeightSyncError: REQUEST_INVALID, MEMORY_EXHAUSTED.
        """
        base = self._of_writers.get(writer)
        if base is None:
            raise refused(
                f"writer {writer} sends changes of shard {shard} and named no base; begin with "
                "PUSH_KIND_DELTA and base_content_digest, or send the boxes as they are"
            )
        slots = self._model.slots
        slot = slots.scratch()
        self._patches.add(slot)
        segment = await slots.segment(slot, shard, size)
        facts = base.content_digest, base.slot.segments[shard], segment, size
        return BoxPatch(*facts, lambda: self._discard(slot))

    def close(self) -> None:
        """Let go of all of them, once nothing reads them; further calls do nothing."""
        self._closed = True
        for writer in list(self._of_writers):
            self._let_go(writer)
        for slot in list(self._patches):
            self._discard(slot)

    def _discard(self, slot: Slot) -> None:
        self._patches.discard(slot)
        self._model.slots.discard(slot)
        self._model.slots.wake()

    def _let_go(self, writer: int) -> None:
        base = self._of_writers.pop(writer, None)
        if base is not None:
            self._model.slots.end_lease(base.slot)

    async def _check_layout(self, base: VersionRecord) -> None:
        manifest = await self._model.commits.manifest(base)
        ours: Layout | None = self._state.known.layout if self._state.known else None
        if ours is None or ours.digest != manifest.layout.digest:
            raise mismatch(self._model.table, f"tensors lie otherwise in version {base.version}")
