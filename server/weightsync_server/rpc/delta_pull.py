"""The delta that the store keeps of a version, back out: for followers that have its base."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from weightsync.model.manifest import Manifest
    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import Model

__all__ = ["stored_delta"]


@contextlib.asynccontextmanager
async def stored_delta(
    model: Model, record: VersionRecord
) -> AsyncIterator[tuple[Manifest, Sequence[Segment]]]:
    """Give the manifest and the bytes of the delta shards of a version, in memory of their own.

    Args:
        model: What it is a version of.
        record: The version.

    Raises:
        WeightSyncError: BASE_MISMATCH: it is kept in full. MEMORY_EXHAUSTED, DATA_CORRUPT, ...
    """
    scratch = model.slots.scratch()
    try:
        # Who takes the bytes may be slow: the store's own work waits for the reading alone.
        async with model.materializer.lock:
            if record.base is None or not model.store.durable:
                raise WeightSyncError(
                    Reason.BASE_MISMATCH,
                    f"version {record.version} of model {record.model} is kept in full here, not "
                    "as a delta; pull it in full",
                    metadata={"version": str(record.version)},
                )
            manifest = await model.store.delta(record.model, record.version)
            for index, entry in enumerate(manifest.layout.shards):
                path = model.store.shard_path(record.model, record.version, index, delta=True)
                segment = await model.slots.segment(scratch, index, entry.size)
                await model.fetch.load(path or "", entry.size, segment)
        yield manifest, scratch.ordered()
    finally:
        model.slots.discard(scratch)
