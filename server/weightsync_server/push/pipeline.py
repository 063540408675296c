"""A push becomes a staged version when every byte of it is here and proved, durable or not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason
from weightsync.model.layout import check_version
from weightsync.model.manifest import Manifest
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.push.progress import missing

if TYPE_CHECKING:
    from weightsync_server.push.lifecycle import Push

__all__ = ["proceed", "seal"]


def proceed(push: Push) -> None:
    """Stage the version if all its shards are known and proved. Call it after each digest."""
    # Without a count, a sum or a commit there may be shards of which nothing came yet.
    if not (push.shard_count or push.total_bytes) or push.error is not None:
        return
    if all(upload.found is not None for upload in push.shards.values()) and not missing(push):
        seal(push)


def seal(push: Push) -> asyncio.Task[Manifest]:
    """Return the task that makes the manifest, once; what is in it does not change any more."""
    if push.sealing is None:
        push.sealing = asyncio.create_task(_seal(push))
        # The commit asks for its outcome, if there is one.
        push.sealing.add_done_callback(lambda task: task.cancelled() or task.exception())
    return push.sealing


async def _seal(push: Push) -> Manifest:
    ordered = [push.shards[index] for index in sorted(push.shards)]
    found = [digest for upload in ordered for digest in upload.found or ()]
    try:
        await failpoints.reach("commit.seal")
        if push.known is not None:
            layout = push.known.layout
        else:
            layout = await asyncio.to_thread(
                check_version,
                [upload.entry for upload in ordered],
                [upload.tensors or () for upload in ordered],
            )
        if push.delta is not None:
            manifest = await push.delta.build(Manifest(layout, tuple(found)))
        else:
            manifest = await push.versions.seal(layout, found)
    except Exception as error:
        told = to_refusal(error, f"sealing version {push.record.version}")
        if told.reason in (Reason.FETCHER_FAILED, Reason.SHUTTING_DOWN):
            # The next commit tries again.
            push.sealing = None
        else:
            push.fail(told)
        if told is error:
            raise
        raise told from error
    if push.existing is None and push.error is None:
        push.versions.staged(push.record, manifest)
    return manifest
