"""What a push of a delta has besides its shards: a base, memory of its own, a version to make.

The delta's shards go into scratch memory. The version's slot gets the base meanwhile, and is
patched when every shard is here and proved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest, ShardEntry, TensorEntry
from weightsync.shm.segments import Segment
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.deltas import DeltaShard, PatchInput, PushedDelta
from weightsync_server.deltas.materializer import mismatch
from weightsync_server.deltas.pushed_delta import write_layout
from weightsync_server.ops.metrics import Meters
from weightsync_server.ops.tasks import cancel_tasks, is_running, start_task
from weightsync_server.residency.slot import slot_of
from weightsync_server.residency.stager import compare
from weightsync_server.workers.fetch.fetch_api import TensorDelta

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.shard_part import ShardState


logger = logging.getLogger(__name__)

_PREFIX = "wsd1."
#: Tries before a lost fetcher, or a base that was not what it should be, is more than bad luck.
_ATTEMPTS = 3
#: What a base that is not what it should be shows itself as.
_WRONG = frozenset({Reason.DATA_CORRUPT, Reason.SHARD_INVALID})


class DeltaPush:
    """The part of a push that deltas alone have; its base stays for as long as it is open.

    `scratch` is the memory of its own shards. `pushed` is set from when the version is made until
    the push ends.
    """

    def __init__(
        self, model: Model, record: VersionRecord, base: VersionRecord, meters: Meters
    ) -> None:
        self.scratch = model.slots.scratch()
        self.pushed: PushedDelta | None = None
        self._model = model
        self._record = record
        self.base = base
        self._digest = base.content_digest
        # With memory:// the base may lose its slot to this very push.
        self._manifest = base.manifest
        self._meters = meters
        self._shards: dict[int, tuple[DeltaShard, list[TensorDelta]]] = {}
        self._base_build: asyncio.Task[None] | None = None
        self._ended = False
        base.retain()
        record.base_on(base)

    def check_layout(self, tensors: Sequence[TensorEntry]) -> None:
        if len(tensors) != 3 or not all(tensor.name.startswith(_PREFIX) for tensor in tensors):
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"a shard of a delta holds three tensors {_PREFIX}*, as "
                "docs/reference/delta-format.md says; "
                "push other tensors in full",
            )

    async def equip(self) -> None:
        """Get memory for the whole version, in the record's slot, and begin to lay the base."""
        self._manifest = self._manifest or await self._model.commits.manifest(self.base)
        await self._model.slots.promise(slot_of(self._record), self._manifest.layout.size)
        await write_layout(self.scratch, self._model.segments, self._manifest)
        # Whoever needs the base asks for the outcome.
        self._base_build = start_task(self._build_base(prove=False))

    def renewed(self) -> DeltaPush:
        """Return the same with nothing of it here yet; this one is to be ended."""
        return DeltaPush(self._model, self._record, self.base, self._meters)

    async def inspect(self, upload: ShardState, segment: Segment) -> None:
        await self._inspect(upload.index, upload.entry, segment)

    async def build(self, container: Manifest) -> Manifest:
        """Make the version in its slot; return its manifest, proved by all its digests.

        `container` is the manifest of the delta's own shards.
        """
        started = time.perf_counter()
        base = self._base_manifest
        changes = [changes for _, changes in self._shards.values()]
        # In a thread: there may be 2,000,000 tensors.
        pushed = await asyncio.to_thread(
            partial(PushedDelta.merged, kept=self._model.store.durable),
            self.base,
            base,
            container,
            changes,
        )
        manifest = await self._model.commits.seal(base.layout, pushed.digests)
        await self._make(manifest)
        self.pushed = pushed
        self._meters.observe_phase("patch", time.perf_counter() - started)
        return manifest

    def committed(self) -> None:
        if self.pushed is not None:
            if self.pushed.kept:
                self._model.materializer.remember(self._record, self._ordered())
            self._meters.count_delta(self.pushed.counts)

    @property
    def is_building_base(self) -> bool:
        return is_running(self._base_build)

    async def cease(self) -> None:
        await cancel_tasks(self._base_build)

    def end(self) -> None:
        """Let go of the base and of what came, give the memory back; further calls do nothing."""
        if not self._ended:
            self._ended = True
            self.base.let_go()
            self._model.slots.discard(self.scratch)
            self._model.slots.wake()
            # Pushes that have ended are remembered by the hundred.
            self._shards, self._manifest, self.pushed = {}, None, None

    # Inside

    async def _inspect(self, index: int, entry: ShardEntry, segment: Segment) -> None:
        base, shard, changes = await self._model.materializer.inspect(
            self._document, self._base_manifest.layout, index, entry, segment
        )
        if base != self._digest:
            raise WeightSyncError(
                Reason.SHARD_INVALID,
                f"shard {index} changes content {base}, the push was begun for {self._digest}; "
                "push the version again",
            )
        self._shards[index] = shard, changes

    @property
    def _base_manifest(self) -> Manifest:
        if self._manifest is None:
            raise WeightSyncError(Reason.FAULT, "the delta lost its base; push the version in full")
        return self._manifest

    @property
    def _document(self) -> Segment:
        if self.scratch.document is None:
            raise WeightSyncError(Reason.FAULT, "the delta lost its layout; push the version again")
        return self.scratch.document

    def _ordered(self) -> list[DeltaShard]:
        return [self._shards[index][0] for index in sorted(self._shards)]

    async def _make(self, manifest: Manifest) -> None:
        slot = slot_of(self._record)
        changed = PatchInput(manifest.layout, self._document, [self._ordered()])
        for left in reversed(range(_ATTEMPTS)):
            # What was laid meanwhile is proved with the rest; when that fails, it is laid again.
            begun, self._base_build = self._base_build, None
            try:
                await (begun if begun is not None else self._build_base(prove=True))
                compare(manifest, await self._model.materializer.change(slot, changed), "changed")
            except WeightSyncError as error:
                lost = error.reason is Reason.FETCHER_FAILED
                wrong = error.reason in _WRONG and begun is not None
                if left and (lost or wrong):
                    logger.warning(
                        "a delta is applied again, to a base that is read again: %s", error.message
                    )
                    continue
                if error.reason is Reason.DATA_CORRUPT:
                    raise self._mistaken(error) from error
                raise
            else:
                return

    async def _build_base(self, *, prove: bool) -> None:
        slot, base = slot_of(self._record), self.base
        try:
            await self._model.materializer.build(slot, base, self._base_manifest, prove=prove)
        except WeightSyncError as error:
            if error.reason is not Reason.DATA_CORRUPT:
                raise
            raise mismatch(
                self._model.table, f"version {base.version} cannot be read ({error.message})"
            ) from error

    def _mistaken(self, error: WeightSyncError) -> WeightSyncError:
        return WeightSyncError(
            Reason.DIGEST_MISMATCH,
            f"applying the delta does not reproduce its declared digest: {error.message}; "
            "push the version in full",
        )
