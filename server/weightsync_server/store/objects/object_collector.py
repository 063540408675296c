"""Removes the objects of a model that nothing names any more."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from weightsync_server.store.objects.object_keys import ShardName, shard_key
from weightsync_server.store.objects.shard_transfer import REUSED_FOR

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from datetime import datetime

    from weightsync_server.store.objects.object_client import ObjectClient, ObjectFacts
    from weightsync_server.store.objects.object_pushes import ObjectPushes
    from weightsync_server.store.objects.stored_versions import StoredVersion

__all__ = ["UNCOMMITTED_FOR", "remove_unnamed", "store_time", "sweep"]

logger = logging.getLogger(__name__)

#: Age, by the store's clock, up to which bytes that no version names may belong to one that comes.
UNCOMMITTED_FOR = 2 * REUSED_FOR


async def store_time(client: ObjectClient, key: str) -> datetime:
    """Return the time by the store's clock: that of an object which is put for it."""
    await client.put(key, b"{}")
    facts = await client.head(key)
    if facts is None:
        # It was removed at once, by nobody that this server knows of.
        return await store_time(client, key)
    return facts.modified


async def remove_unnamed(
    client: ObjectClient,
    model: str,
    gone: Iterable[StoredVersion],
    versions: Callable[[], Awaitable[Iterable[StoredVersion]]],
    pushes: ObjectPushes,
) -> None:
    """Remove the bytes that versions had, but for those that others need.

    Args:
        client: The store.
        model: Name of the model.
        gone: As they were: their records are removed already, or name others now.
        versions: Returns all that exist, when it is asked.
        pushes: Those that are open.
    """
    # Receipts first: they go when the record that needs the same is there.
    needed, _ = await pushes.all_receipts()
    left = list(await versions())
    needed |= {name for version in left for name in version.kept.shards}
    manifests = {digest for version in left for digest in version.manifests}
    doomed: set[str] = set()
    for version in gone:
        shards = set(version.full.shards) | set(version.kept.shards)
        doomed |= {shard_key(model, name) for name in shards - needed}
        digests = version.manifests - manifests
        doomed |= {f"{model}/manifests/{digest}.json" for digest in digests}
    await client.delete(sorted(doomed))


async def sweep(
    client: ObjectClient,
    model: str,
    clock: str,
    versions: Callable[[], Awaitable[Iterable[StoredVersion]]],
    pushes: ObjectPushes,
) -> None:
    """Remove what pushes left that never came to their commit, once it is old enough.

    Only the server that has the epoch may do that. It lists first what may go, and asks what is
    needed afterwards. An old object that is put again between that and its removal is removed: the
    commit that needs it finds it missing and is refused, unless it was checked and removed at the
    same moment, by two servers.

    Args:
        client: The store.
        model: Name of the model.
        clock: Key of an object of this server.
        versions: Returns all that exist, when it is asked.
        pushes: Those that are open.
    """
    now = await store_time(client, clock)
    found: dict[str, ObjectFacts] = {}
    for folder in ("shards", "manifests", "facts", "full"):
        found |= await client.list_under(f"{model}/{folder}")
    old = _older(found, now, UNCOMMITTED_FOR)
    _, evidence = await pushes.all_receipts()
    # A push whose server never came back for it.
    abandoned = _abandoned(evidence, now)
    await client.delete(sorted(abandoned))
    needed, _ = await pushes.all_receipts()
    kept = {shard_key(model, name) for name in needed}
    # After the receipts: these go when the record that needs the same is there.
    for version in await versions():
        kept |= {shard_key(model, name) for name in version.kept.shards}
        kept |= {f"{model}/manifests/{digest}.json" for digest in version.manifests}
        number = version.record.version
        kept |= {key for key in old if key.startswith(_of_version(model, number))}
    doomed = sorted(key for key in old - kept if _is_ours(key))
    if doomed:
        logger.info("removing %d objects of %s that no version names", len(doomed), model)
        await client.delete(doomed)


def _of_version(model: str, version: int) -> tuple[str, str]:
    """Return what the keys begin with that tell of a version, beside its record."""
    return f"{model}/facts/{version}/", f"{model}/full/{version}/"


def _older(found: dict[str, ObjectFacts], now: datetime, age: timedelta) -> set[str]:
    return {key for key, facts in found.items() if now - facts.modified >= age}


def _abandoned(found: dict[str, ObjectFacts], now: datetime) -> set[str]:
    """Return the objects of pushes of which nothing was put for long."""
    newest: dict[str, datetime] = {}
    for key, facts in found.items():
        push = key.rpartition("/")[0]
        newest[push] = max(facts.modified, newest.get(push, facts.modified))
    old = {push for push, modified in newest.items() if now - modified >= UNCOMMITTED_FOR}
    return {key for key in found if key.rpartition("/")[0] in old}


def _is_ours(key: str) -> bool:
    if "/shards/" not in key:
        return True
    try:
        ShardName.parse(key.rpartition("/")[2])
    except ValueError:
        return False
    return True
