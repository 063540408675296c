"""A follower is put together and started: what cannot ever work is refused then."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.client_tls import ClientTls
from weightsync_server.catalog.local_numbers import FIRST_LOCAL
from weightsync_server.follow.follow_metrics import FollowMetrics
from weightsync_server.follow.follow_url import grpc_target
from weightsync_server.follow.follower import Follower
from weightsync_server.follow.shard_cache import ShardCache
from weightsync_server.ops.tasks import in_thread
from weightsync_server.store import open_reader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightsync_server.follow.fetch_plan import Fetch
    from weightsync_server.follow.origin import Origin
    from weightsync_server.model import Model
    from weightsync_server.ops.metrics import Metrics
    from weightsync_server.push import PushService
    from weightsync_server.store.store_records import CommitRecord

__all__ = ["FollowOptions", "start_follower"]

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


class FollowOptions(NamedTuple):
    """What a follower needs to know of the settings.

    Attributes:
        url: The origin; empty: this server follows none.
        interval_s: How often a store is looked for new versions, seconds.
        ca: Authorities of the origin's certificate, PEM.
        certificate: The chain that it is shown, PEM.
        key: Its key, PEM.
        token_file: Holds the token for the origin.
        slots: Versions held in memory at once.
        disk_floor_bytes: Free space that nothing may use.
        cache: Where shards of a store are asked for first; empty: nowhere.
    """

    url: str
    interval_s: float
    ca: Path | None
    certificate: Path | None
    key: Path | None
    token_file: Path | None
    slots: int
    disk_floor_bytes: int
    cache: str = ""


async def start_follower(
    options: FollowOptions, model: Model, pushes: PushService, metrics: Metrics
) -> Follower | None:
    """Begin to follow; None: this server follows none.

    Args:
        options: What, and how.
        model: Where versions go.
        pushes: Receives them.
        metrics: The server's.

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
            versions = [v for v in await origin.versions() if v.version < FIRST_LOCAL]
        await _look_for_room(follower, versions, options, model)
        follow_metrics.set_up(up=True)
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
    model.adoption.origin = follower
    follower.start()
    return follower


def _open(
    options: FollowOptions,
    model: Model,
    pushes: PushService,
    metrics: Metrics,
    follow_metrics: FollowMetrics,
) -> Origin:
    name = model.table.name
    if grpc_target(options.url):
        from weightsync_server.follow.grpc_origin import GrpcOrigin, OriginAccess

        tls = ClientTls(options.ca, options.certificate, options.key, "the origin")
        access = OriginAccess(options.url, tls, options.token_file)
        return GrpcOrigin(access, name, pushes, options.interval_s * _BACKSTOP)
    from weightsync_server.follow.store_origin import StoreOrigin

    cache = ShardCache(options.cache, follow_metrics.count_pieces) if options.cache else None
    return StoreOrigin(open_reader(options.url), name, options.interval_s, metrics, cache)


async def _look_for_room(
    follower: Follower, versions: Sequence[CommitRecord], options: FollowOptions, model: Model
) -> None:
    """Refuse to start for versions that this host could not hold, if it has none to serve.

    Raises:
        WeightSyncError: MEMORY_EXHAUSTED, DISK_EXHAUSTED.
    """
    if not (fetches := follower.plan(versions)):
        return
    try:
        _check_memory(fetches[-1].version, options, model)
        await _check_disk(follower, fetches, options, model)
    except WeightSyncError as error:
        if not model.table.newest:
            raise
        logger.warning("version %d is served on: %s", model.table.newest, error.message)


def _check_memory(newest: CommitRecord, options: FollowOptions, model: Model) -> None:
    needed, limit = newest.size_bytes * options.slots, model.segments.budget.limit
    if needed > limit:
        raise WeightSyncError(
            Reason.MEMORY_EXHAUSTED,
            f"version {newest.version} of {options.url} has {newest.size_bytes} bytes, in "
            f"{options.slots} slots {needed}; this server may use {limit}: raise "
            "memory_bytes, lower slots, or follow from a host with more memory",
        )


async def _check_disk(
    follower: Follower, fetches: Sequence[Fetch], options: FollowOptions, model: Model
) -> None:
    newest = fetches[-1].version
    # What is kept goes when the new one is here.
    needed = sum(_disk_bytes(one) - follower.kept_bytes(one) for one in fetches)
    left = await in_thread(model.store.free_bytes) - options.disk_floor_bytes
    if needed > left:
        raise WeightSyncError(
            Reason.DISK_EXHAUSTED,
            f"version {newest.version} of {options.url} needs {needed} bytes of disk, "
            f"{model.store.url} has room for {max(0, left)}; free space there, lower "
            "disk_floor_bytes, or keep versions elsewhere with --store",
        )


def _disk_bytes(fetch: Fetch) -> int:
    return fetch.version.delta_bytes if fetch.delta else fetch.version.size_bytes
