"""A follower is put together and started: what cannot ever work is refused then."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.tls import ClientTls
from weightsync_server.ops.metrics import Metrics
from weightsync_server.ops.tasks import in_thread
from weightsync_server.push import PushService
from weightsync_server.replicate.fetch_plan import Fetch
from weightsync_server.replicate.follower import Follower, FollowMetrics
from weightsync_server.replicate.replica_settings import ReplicaSettings, grpc_target
from weightsync_server.replicate.store_source import ShardCache
from weightsync_server.replicate.version_source import Origin
from weightsync_server.store import open_reader
from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from weightsync_server.model import Model


logger = logging.getLogger(__name__)


#: Longest wait for the origin before this server starts without it, seconds.
_FIRST_LOOK_S = 10.0
#: A server tells of its commits by itself: it is asked so much less often than a store.
_BACKSTOP = 10
#: What no waiting changes.
_NEVER = frozenset(
    {
        Reason.MEMORY_EXHAUSTED,
        Reason.DISK_EXHAUSTED,
        Reason.MODEL_UNKNOWN,
        Reason.NOT_SUPPORTED,
    }
)


class Replica:
    """Follows what the settings name, from `start` on; until then `follower` is None."""

    follower: Follower | None = None

    async def start(
        self,
        options: ReplicaSettings,
        model: Model,
        pushes: PushService,
        metrics: Metrics,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        """Begin as `start_follower` does; the stack ends it."""
        self.follower = await start_follower(options, model, pushes, metrics)
        if self.follower is not None:
            stack.push_async_callback(self.follower.stop)


async def start_follower(
    options: ReplicaSettings, model: Model, pushes: PushService, metrics: Metrics
) -> Follower | None:
    """Begin to follow; None: this server follows none.

    Raises:
        WeightSyncError: MEMORY_EXHAUSTED, DISK_EXHAUSTED: the origin's newest version could never
            be served from here. REQUEST_INVALID, NOT_SUPPORTED: it cannot be followed like this.
    """
    if not options.url:
        return None
    follow_metrics = FollowMetrics(metrics)
    origin = _open(options, model, pushes, metrics, follow_metrics)
    follower = Follower(origin, model, pushes, follow_metrics)
    try:
        async with asyncio.timeout(_FIRST_LOOK_S):
            versions = await follower.versions()
        await _look_for_room(follower, versions, options, model)
        follow_metrics.up.set(1)
    except (WeightSyncError, TimeoutError) as error:
        if isinstance(error, WeightSyncError) and error.reason in _NEVER:
            await origin.close()
            raise
        kept = model.table.newest
        what = f"version {kept}, which it has, is served" if kept else "it has no version yet"
        logger.warning("%s does not answer (%s): %s", options.url, error or "no answer", what)
    except BaseException:
        await origin.close()
        raise
    follower.start()
    return follower


def _open(
    options: ReplicaSettings,
    model: Model,
    pushes: PushService,
    metrics: Metrics,
    follow_metrics: FollowMetrics,
) -> Origin:
    name = model.table.name
    if grpc_target(options.url):
        from weightsync_server.replicate.grpc_source import GrpcOrigin, OriginAccess

        tls = ClientTls(options.ca, options.certificate, options.key, "the origin")
        access = OriginAccess(options.url, tls, options.token_file)
        return GrpcOrigin(access, name, pushes, options.interval_s * _BACKSTOP)
    from weightsync_server.replicate.store_source import StoreOrigin

    cache = ShardCache(options.cache, follow_metrics.count_pieces) if options.cache else None
    return StoreOrigin(open_reader(options.url), name, options.interval_s, metrics, cache)


async def _look_for_room(
    follower: Follower, versions: Sequence[CommitRecord], options: ReplicaSettings, model: Model
) -> None:
    """Refuse to start for versions that this host could not hold, if it has none to serve."""
    if not (fetches := follower.plan(versions)):
        return
    try:
        _check_memory(fetches[-1].version, options, model)
        await _check_disk(follower, fetches, options, model)
    except WeightSyncError as error:
        if not model.table.newest:
            raise
        logger.warning("version %d is still served: %s", model.table.newest, error.message)


def _check_memory(newest: CommitRecord, options: ReplicaSettings, model: Model) -> None:
    slots, limit = len(model.slots.slots), model.segments.budget.limit
    needed = newest.size_bytes * slots
    if needed > limit:
        raise WeightSyncError(
            Reason.MEMORY_EXHAUSTED,
            f"version {newest.version} of {options.url} has {newest.size_bytes} bytes, in "
            f"{slots} slots {needed}; this server may use {limit}: raise "
            "memory_bytes, lower slots, or follow from a host with more memory",
        )


async def _check_disk(
    follower: Follower, fetches: Sequence[Fetch], options: ReplicaSettings, model: Model
) -> None:
    newest = fetches[-1].version
    # What is kept goes when the new one is here.
    needed = sum(_disk_bytes(one) - follower.kept_bytes(one) for one in fetches)
    left = await in_thread(model.store.free_bytes) - model.disk.floor_bytes
    if needed > left:
        raise WeightSyncError(
            Reason.DISK_EXHAUSTED,
            f"version {newest.version} of {options.url} needs {needed} bytes of disk, "
            f"{model.store.url} has room for {max(0, left)}; free space there, lower "
            "disk_floor_bytes, or keep versions elsewhere with --store",
        )


def _disk_bytes(fetch: Fetch) -> int:
    return fetch.version.delta_bytes if fetch.delta else fetch.version.size_bytes
