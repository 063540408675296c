"""The commit of a push: everything is here, proved and durable, or the commit says what is not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync.model.manifest import Layout, Manifest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.epochs import ClientRuns
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.deltas import PushedDelta
from weightsync_server.ops import traces
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.ops.tasks import is_running
from weightsync_server.push.probes import packed
from weightsync_server.push.progress import missing
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.parts import Push


logger = logging.getLogger(__name__)


def answer(model: Model, record: VersionRecord, *, already: bool) -> pb.CommitPushResponse:
    commit = record.commit
    if commit is None:
        raise WeightSyncError(Reason.FAULT, f"version {record.version} lost its commit; ask again")
    other = model.runs.before(record)
    return pb.CommitPushResponse(
        other_run=other.run if other else "",
        other_version=other.version if other else 0,
        runs_alternate=other is not None and other.alternates,
        version=commit.version,
        content_digest=commit.content_digest,
        manifest_digest=commit.manifest_digest,
        durable=model.store.durable,
        already=already,
        size_bytes=commit.size_bytes,
        tensor_count=commit.tensor_count,
        stored_bytes=commit.stored_bytes,
    )


def check_complete(push: Push, shard_count: int) -> None:
    if shard_count and push.state.shard_count and shard_count != push.state.shard_count:
        raise refused(
            f"{shard_count} shards at the commit, but {push.state.shard_count} at the start"
        )
    count = shard_count or push.state.shard_count
    if count > push.limits.max_shards:
        raise refused(f"the push has {count} shards; send at most {push.limits.max_shards}")
    if count and max(push.state.shards, default=0) >= count:
        raise refused(
            f"shard {max(push.state.shards)} was sent, but the commit declares {count} shards"
        )
    lacking = missing(push.state, count)
    if lacking:
        raise WeightSyncError(
            Reason.PUSH_INCOMPLETE,
            f"version {push.state.record.version} is not complete, missing: {', '.join(lacking)}; "
            "send that, then commit again",
            metadata={"push_id": push.state.id},
        )


async def meet(push: Push, request: pb.CommitPushRequest) -> None:
    """Return when all writers of a push have brought everything and ask for its commit."""
    state, writer = push.state, request.writer
    state.writers.check(writer)
    if not state.writers.several:
        return
    each = ((index, shard.parts.get(writer)) for index, shard in sorted(state.shards.items()))
    lacking = [index for index, part in each if part is None or not part.complete]
    lacking += [index for index in range(state.shard_count) if index not in state.shards]
    if lacking:
        raise WeightSyncError(
            Reason.PUSH_INCOMPLETE,
            f"writer {writer} has not sent the boxes, bytes and digests of all {state.shard_count} "
            f"shards, as of shard {lacking[0]}; send those, then commit again",
            metadata={"push_id": state.id, "writer": str(writer)},
        )
    state.writers.commit(writer)
    with push.lifecycle.awaited():
        await state.writers.met.wait()
        covering = [shard.tasks.covering for shard in state.shards.values()]
        if running := [task for task in covering if is_running(task)]:
            await asyncio.wait(running)
    # Whoever is told that it failed finds its slot free.
    await push.lifecycle.closed()
    check_open(state)


async def commit(push: Push, content_digest: str) -> pb.CommitPushResponse:
    """Commit a complete push; it belongs to no call, so that none can leave it half done.

    If this raises anything but FETCHER_FAILED, the push has failed.
    """
    version = push.state.record.version
    try:
        with traces.within(push.state.work), traces.phase("push.commit"):
            response = await _commit(push, content_digest)
    except WeightSyncError as error:
        push.lifecycle.tasks.committing = None
        if error.reason is not Reason.FETCHER_FAILED:
            push.lifecycle.fail(error)
        raise
    except Exception as error:
        logger.exception("commit of version %d", version)
        push.lifecycle.fail(to_refusal(error, f"the commit of version {version}"))
        raise push.state.error or error from error
    push.lifecycle.succeed(response)
    logger.debug("version %d is committed", version, extra=event("push.committed"))
    # The version is there: no error may claim otherwise any more.
    with contextlib.suppress(OSError):
        await failpoints.reach("commit.reply")
    return response


async def _commit(push: Push, content_digest: str) -> pb.CommitPushResponse:
    state, model = push.state, push.model
    push.pipeline.observe_receive()
    # What is proved here stays so only if nobody holds it for writing any more.
    await asyncio.gather(*(writer.cease() for writer in push.lifecycle.writers))
    await push.layout.check_whole()
    manifest = await push.pipeline.sealed()
    check_open(state)
    if content_digest and content_digest != manifest.content_digest:
        raise WeightSyncError(
            Reason.DIGEST_MISMATCH,
            f"the content arrived with digest {manifest.content_digest}, the trainer computed "
            f"{content_digest}; push the version again",
        )
    existing = state.existing
    if existing is not None and existing.commit is not None:
        _repeat(push, existing, manifest)
        return answer(model, existing, already=True)
    delta = await _delta(push, manifest)
    # The content digest that a delta's commit must tell is made of all digests.
    each = (shard.trainer_verified for shard in state.shards.values())
    verified = (delta is not None and not state.writers.several) or all(each)
    if existing is not None:
        existing.name_push(state.id, state.request.idempotency_key)
        await model.orphans.revive(
            existing,
            manifest,
            epoch=state.record.epoch,
            trainer_verified=verified,
            delta=delta,
            probes=packed(state),
        )
        model.slots.release(state.record)
        return answer(model, existing, already=False)
    if (in_place := state.record.in_place) is not None:
        # From its commit on anybody may take it.
        await in_place.decided()
        check_open(state)
    await model.commits.commit(
        state.record, manifest, trainer_verified=verified, delta=delta, probes=packed(state)
    )
    if state.delta is not None:
        state.delta.committed()
    else:
        _remember_headers(push, manifest.layout)
    _tell_runs(state.record, model.runs)
    return answer(model, state.record, already=False)


def _tell_runs(record: VersionRecord, runs: ClientRuns) -> None:
    if (other := runs.before(record)) is None:
        return
    if other.alternates:
        logger.warning(
            "two trainers push: run %s and run %s (versions %d and %d); stop one of them, or "
            "have the right one call acquire_epoch()",
            record.client_run,
            other.run,
            record.version,
            other.version,
            extra=event("push.runs_alternate"),
        )
    else:
        # The client logs it too, and a push writes four lines at INFO at most.
        logger.debug(
            "version %d is the first of run %s; version %d came from run %s",
            record.version,
            record.client_run,
            other.version,
            other.run,
            extra=event("push.run_changed"),
        )


async def _delta(push: Push, manifest: Manifest) -> PushedDelta | None:
    delta = push.state.delta
    if delta is None or delta.pushed is None:
        return None
    delta.pushed = await push.model.compactor.admit(
        push.state.record, manifest, delta.pushed, push.reservation.disk.sibling()
    )
    return delta.pushed


def _repeat(push: Push, existing: VersionRecord, manifest: Manifest) -> None:
    commit = existing.commit
    if commit is None or commit.content_digest != manifest.content_digest:
        raise WeightSyncError(
            Reason.VERSION_CONFLICT,
            f"version {existing.version} exists with content {existing.content_digest}, this is "
            f"{manifest.content_digest}; push it as a higher version, or as 0 for the next number",
            metadata={"content_digest": existing.content_digest},
        )
    table = push.model.table
    if table.find(existing.version) is not existing:
        raise table.not_above(existing.version)
    push.model.stager.hand_over(push.state.record, existing, manifest)


def _remember_headers(push: Push, layout: Layout) -> None:
    known = push.model.layouts.get(layout.digest)
    if known is not None:
        known.headers |= {shard.index: shard.header_digest for shard in push.state.shards.values()}
