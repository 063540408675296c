"""The commit of a push: everything is here, proved and durable, or the commit says what is not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.pipeline import proceed, seal
from weightsync_server.push.progress import missing
from weightsync_server.push.validation import refused

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout, Manifest
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.deltas import PushedDelta
    from weightsync_server.push.lifecycle import Push

__all__ = ["answer", "check_complete", "commit"]


def answer(record: VersionRecord, *, durable: bool, already: bool) -> pb.CommitPushResponse:
    """Return what a commit tells of a committed version."""
    commit = record.commit
    if commit is None:
        raise WeightSyncError(Reason.FAULT, f"version {record.version} lost its commit; ask again")
    return pb.CommitPushResponse(
        version=commit.version,
        content_digest=commit.content_digest,
        manifest_digest=commit.manifest_digest,
        durable=durable,
        already=already,
        size_bytes=commit.size_bytes,
        tensor_count=commit.tensor_count,
        stored_bytes=commit.stored_bytes,
    )


def check_complete(push: Push, shard_count: int) -> None:
    """Refuse the commit of a push of which something has not arrived; the push stays open.

    Raises:
        WeightSyncError: PUSH_INCOMPLETE, naming what is missing; REQUEST_INVALID.
    """
    if shard_count and push.shard_count and shard_count != push.shard_count:
        raise refused(f"{shard_count} shards at the commit, {push.shard_count} at the begin")
    count = shard_count or push.shard_count
    if count > push.limits.max_shards:
        raise refused(f"{count} shards; send at most {push.limits.max_shards}")
    if count and max(push.shards, default=0) >= count:
        raise refused(f"shard {max(push.shards)} was sent, the commit tells {count} shards")
    lacking = missing(push, count)
    if lacking:
        raise WeightSyncError(
            Reason.PUSH_INCOMPLETE,
            f"version {push.record.version} is not complete, missing: {', '.join(lacking)}; send "
            "that, then commit again",
            metadata={"push_id": push.id},
        )


async def commit(push: Push, content_digest: str) -> pb.CommitPushResponse:
    """Commit a push that is complete. Belongs to no call, so that none can leave it half done.

    Raises:
        WeightSyncError: As CommitPush; the push has failed, but for FETCHER_FAILED.
    """
    if push.last_byte_at:
        # Where a restart has left nothing to send, nothing was received.
        push.meters.observe_phase("receive", push.last_byte_at - push.first_byte_at)
    # What is proved here stays so only if nobody holds it for writing any more.
    await asyncio.gather(*(writer.cease() for writer in push.writers))
    proceed(push)
    await _verified(push)
    manifest = await asyncio.shield(seal(push))
    push.check_open()
    if content_digest and content_digest != manifest.content_digest:
        raise WeightSyncError(
            Reason.DIGEST_MISMATCH,
            f"the content arrived with digest {manifest.content_digest}, the trainer computed "
            f"{content_digest}; push the version again",
        )
    durable = push.versions.store.durable
    existing = push.existing
    if existing is not None and existing.commit is not None:
        _repeat(push, existing, manifest)
        return answer(existing, durable=durable, already=True)
    delta = await _delta(push, manifest)
    # The content digest that a delta's commit must tell is made of all digests.
    each = (upload.trainer_verified for upload in push.shards.values())
    verified = delta is not None or all(each)
    if existing is not None:
        existing.push_id, existing.key = push.id, push.key
        await push.versions.orphans.revive(
            existing, manifest, epoch=push.record.epoch, trainer_verified=verified, delta=delta
        )
        push.versions.pool.release(push.record)
        return answer(existing, durable=durable, already=False)
    await push.versions.commit(push.record, manifest, trainer_verified=verified, delta=delta)
    if push.delta is not None:
        push.delta.committed()
    else:
        _remember_headers(push, manifest.layout)
    return answer(push.record, durable=durable, already=False)


async def _delta(push: Push, manifest: Manifest) -> PushedDelta | None:
    if push.delta is None or push.delta.pushed is None:
        return None
    pushed = push.delta.pushed = await push.versions.folder.admit(
        push.record, manifest, push.delta.pushed, push.disk.sibling()
    )
    return pushed


async def _verified(push: Push) -> None:
    for upload in push.shards.values():
        task = upload.verification
        failed = task is not None and task.done() and not upload.verified
        if (task is None or failed) and upload.segment is not None:
            # A fetcher was lost three times: another may live by now.
            push.verify(upload, upload.segment)
    tasks = [upload.verification for upload in push.shards.values() if upload.verification]
    await asyncio.wait(tasks)
    push.check_open()
    for task in tasks:
        task.result()


def _repeat(push: Push, existing: VersionRecord, manifest: Manifest) -> None:
    commit = existing.commit
    if commit is None or commit.content_digest != manifest.content_digest:
        raise WeightSyncError(
            Reason.VERSION_CONFLICT,
            f"version {existing.version} exists with content {existing.content_digest}, this is "
            f"{manifest.content_digest}; push it as a higher version, or as 0 for the next number",
            metadata={"content_digest": existing.content_digest},
        )
    versions = push.versions
    if versions.find(existing.version) is not existing:
        raise versions.not_above(existing.version)
    versions.hand_over(push.record, existing, manifest)


def _remember_headers(push: Push, layout: Layout) -> None:
    known = push.versions.layouts.get(layout.digest)
    if known is not None:
        known.headers |= {upload.index: upload.header_digest for upload in push.shards.values()}
