"""The engine's checkpoint: adopted as a committed version, or only borrowed for a proof."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import MAX_HEADER_BYTES, check_shard, check_version, parse_header
from weightsync.model.manifest import ShardEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ops.tasks import all_done
from weightsync_server.residency.loading import load_shard
from weightsync_server.store.damage import SHARD_DAMAGE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from weightsync.model.manifest import Layout, Manifest, TensorEntry
    from weightsync.shm.segment_socket import OfferedFile
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import ModelVersions
    from weightsync_server.residency.leases import SlotLease
    from weightsync_server.residency.slot import Slot
    from weightsync_server.residency.stager import Stager

__all__ = ["adopt", "borrow"]

_SLOT_WAIT_S = 60.0


def _read_shard(index: int, file: OfferedFile) -> tuple[ShardEntry, tuple[TensorEntry, ...]]:
    name, size, fd = file
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise WeightSyncError(
            Reason.SHARD_INVALID,
            f"{json.dumps(name[:100])} is no safetensors file: {length} bytes of header in {size}",
        )
    shard = ShardEntry(name[:255], size, length)
    return shard, check_shard(shard, parse_header(os.pread(fd, length, 8), index))


def _read_layout(files: Sequence[OfferedFile]) -> Layout:
    read = [_read_shard(index, file) for index, file in enumerate(files)]
    return check_version([shard for shard, _ in read], [tensors for _, tensors in read])


async def _read(versions: ModelVersions, slot: Slot, files: Sequence[OfferedFile]) -> Manifest:
    """Read files, sorted by name, into a slot and return what they turned out to be."""
    try:
        return await _read_whole(versions, slot, files)
    except WeightSyncError as error:
        if error.reason not in SHARD_DAMAGE:
            raise
        raise WeightSyncError(
            error.reason,
            f"the engine's checkpoint cannot be read: {error.message}; "
            "restore its files, or restart vLLM on a whole checkpoint",
        ) from error


async def _read_whole(
    versions: ModelVersions, slot: Slot, files: Sequence[OfferedFile]
) -> Manifest:
    layout = await asyncio.to_thread(_read_layout, files)
    await versions.pool.promise(slot, layout.size)
    loads = [
        load_shard(versions, slot, layout, shard, fd) for shard, (_, _, fd) in enumerate(files)
    ]
    digests = [digest for found in await all_done(loads) for digest in found]
    if len(digests) != len(layout.tensors):
        raise WeightSyncError(Reason.SHARD_INVALID, "it changed meanwhile")
    return await versions.seal(layout, digests)


async def adopt(
    versions: ModelVersions, files: Sequence[OfferedFile], version: int
) -> VersionRecord:
    """Commit a checkpoint or find the version that it is; see `ModelVersions.adopt`."""
    # Registered only when it turns out to be new: what it is, its content tells.
    record = versions.unlisted(version)
    slot = await versions.pool.take(record, _SLOT_WAIT_S)
    try:
        manifest = await _read(versions, slot, sorted(files))
        known = versions.same_content(manifest.content_digest)
        if known is not None:
            versions.hand_over(record, known, manifest)
            return known
        return await _commit_new(versions, record, manifest)
    except BaseException:
        if record.durability != pb.DURABILITY_COMMITTED:
            await versions.drop(record)
        raise


@contextlib.asynccontextmanager
async def borrow(
    versions: ModelVersions, stager: Stager, files: Sequence[OfferedFile]
) -> AsyncIterator[SlotLease]:
    """Lend a checkpoint in memory to an engine; see `ModelVersions.borrow_checkpoint`."""
    record = versions.unlisted(0)
    slot = versions.pool.borrow(record)
    try:
        versions.staged(record, await _read(versions, slot, sorted(files)))
        # It is staged, so nothing is waited for.
        with await stager.stage(record, 0, for_engine=True, durable=False) as lease:
            yield lease
    finally:
        versions.pool.give_back(slot)


async def _commit_new(
    versions: ModelVersions, record: VersionRecord, manifest: Manifest
) -> VersionRecord:
    # No await between here and `enlist`: a push may take the number meanwhile.
    if record.version and record.version < versions.next_version():
        raise versions.not_above(record.version)
    record.version = record.version or versions.adoption_version()
    versions.enlist(record)
    segments = record.place.ordered()
    writes = []
    for index, shard in enumerate(manifest.layout.shards):
        target = versions.store.shard_target(versions.name, record.version, index)
        if target is not None:
            writes.append(versions.fetchers.persist(segments[index], shard.size, target))
    await all_done(writes)
    await versions.commit(record, manifest, adopted=True)
    return record
