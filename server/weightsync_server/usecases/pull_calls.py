"""Bytes of a version back out, shard by shard: from the slot they lie in, or of a stored delta."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import DIGEST_BYTES
from weightsync.model.manifest import Manifest
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import Caller
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.model import Model
from weightsync_server.usecases.core import ServerCore
from weightsync_server.usecases.version_calls import chosen, layout_parts

_CHUNK = 1 << 20
_MAX_CHUNK = 2 << 20
_LOAD_S = 600.0


async def pull_weights(
    core: ServerCore, caller: Caller, request: pb.PullWeightsRequest
) -> AsyncIterator[pb.PullWeightsResponse]:
    core.check_model(request.model)
    async for message in pull(core.versions.model, request, caller.left_s()):
        yield message


async def pull(
    model: Model, request: pb.PullWeightsRequest, deadline_s: float | None = None
) -> AsyncIterator[pb.PullWeightsResponse]:
    """Yield the version, then layout, bytes and digests of each shard, or of its delta's.

    The version stays in its slot until the last message is taken or the call ends.

    Raises:
        WeightSyncError: VERSION_UNKNOWN, REQUEST_INVALID; NO_SLOT at once where the version lies in
            no slot and none is free; BASE_MISMATCH where there is no delta of it.
    """
    record = chosen(model.table, model.serving, request.version)
    if request.delta:
        async with _stored_delta(model, record) as (delta, segments):
            for message in _messages(request, record, delta, segments):
                yield message
        return
    # A little less than the caller waits, so that it is told why.
    longest = _LOAD_S if deadline_s is None else min(_LOAD_S, deadline_s * 0.95)
    if record.commit is not None:
        # Whoever waits for bytes is told that there is no place for them, not kept waiting.
        model.slots.check_room(record)
    lease = await model.stager.stage(record.version, longest, for_engine=False)
    try:
        manifest = record.manifest
        if manifest is None:
            msg = "a staged version has a manifest"
            raise AssertionError(msg)
        for message in _messages(request, record, manifest, lease.segments):
            yield message
    finally:
        lease.release()


@contextlib.asynccontextmanager
async def _stored_delta(
    model: Model, record: VersionRecord
) -> AsyncIterator[tuple[Manifest, Sequence[Segment]]]:
    """Give the manifest and the bytes of a version's delta shards, in memory of their own."""
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


def _messages(
    request: pb.PullWeightsRequest,
    record: VersionRecord,
    manifest: Manifest,
    segments: Sequence[Segment],
) -> Iterator[pb.PullWeightsResponse]:
    size = min(request.chunk_bytes or _CHUNK, _MAX_CHUNK)
    shards = _wanted(request, manifest)
    yield pb.PullWeightsResponse(version=record.to_info())
    for shard in shards:
        for part in layout_parts(manifest.layout, shard):
            yield pb.PullWeightsResponse(layout=part)
        yield from _chunks(segments[shard], manifest, shard, request.offset, size)
        for digests in _digests(manifest, shard):
            yield pb.PullWeightsResponse(digests=digests)


def _wanted(request: pb.PullWeightsRequest, manifest: Manifest) -> Sequence[int]:
    count = len(manifest.layout.shards)
    if not request.HasField("shard"):
        if request.offset:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, "offset needs shard: name the shard to resume"
            )
        return range(count)
    if request.shard >= count:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"shard {request.shard} does not exist; the version has {count}, numbered from 0",
        )
    return (request.shard,)


def _chunks(
    segment: Segment, manifest: Manifest, shard: int, offset: int, size: int
) -> Iterator[pb.PullWeightsResponse]:
    view = segment.view
    end = manifest.layout.shards[shard].size
    for start in range(offset, end, size):
        message = pb.PullWeightsResponse()
        message.chunk.shard, message.chunk.offset = shard, start
        message.chunk.data = bytes(view[start : min(start + size, end)])
        yield message


def _digests(manifest: Manifest, shard: int) -> Iterator[pb.ShardDigests]:
    digests = manifest.digests_by_shard[shard]
    per_message = (1 << 20) // DIGEST_BYTES // 2
    for first in range(0, len(digests), per_message):
        part = b"".join(digests[first : first + per_message])
        yield pb.ShardDigests(shard=shard, first=first, digests=part)
