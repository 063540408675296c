"""What writers send changes of: a version each, and memory for the changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.deltas.bases import find_base, mismatch
from weightsync_server.push.box_upload import BoxPatch
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused
from weightsync_server.residency.slot import slot_of

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import Model
    from weightsync_server.push.state import PushState
    from weightsync_server.residency.slot import Slot

__all__ = ["BoxBases"]


class BoxBases:
    """The versions that writers of one push name as bases; each stays in memory until `close`.

    Args:
        state: The push.
        model: What all of them are versions of.
    """

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

        Raises:
            WeightSyncError: BASE_MISMATCH; nothing is different then, and the writer can send all.
        """
        digest = request.base_content_digest
        if self._closed:
            return
        if digest not in self._leased:
            await self._lease(digest, request.metadata.get("run_id", ""))
        self._named[request.writer] = digest

    async def patch(self, writer: int, shard: int, size: int) -> BoxPatch:
        """Return memory for the changes of a writer's boxes of a shard, and what they change.

        Raises:
            WeightSyncError: REQUEST_INVALID, MEMORY_EXHAUSTED; or why the push has failed.
        """
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
        return BoxPatch(digest, base, segment, size, lambda: self._discard(slot))

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
            raise mismatch(table, f"version {base.version} does not lie in memory any more")
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
            raise mismatch(self._model.table, f"tensors lie otherwise in version {base.version}")
