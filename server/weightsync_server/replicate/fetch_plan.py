"""Which versions a follower fetches and in which form, each as the push that receives it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.store.protocol import STORED_DAMAGE
from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.residency.slot import SlotLease


logger = logging.getLogger(__name__)


#: Deltas in a row that are fetched where the version in full would do.
LONGEST_CHAIN = 10


class Fetch(NamedTuple):
    """One version to fetch, as the origin has it.

    With `delta`, only what changes from its base is fetched; the base is here by then.
    """

    version: CommitRecord
    delta: bool


def fetch_plan(
    versions: Sequence[CommitRecord],
    highest: int,
    present: Callable[[CommitRecord], bool],
    base_here: Callable[[CommitRecord], bool],
    trusted: Callable[[CommitRecord], bool],
    wanted: CommitRecord | None = None,
) -> list[Fetch]:
    """Return what to fetch, in this order, to have one version; nothing else is.

    A chain of deltas from a version that is here, where it is short enough; else the version in
    full. Versions that no chain needs are left out.

    Args:
        versions: Those of the origin.
        highest: Highest number that was used here: what comes of a chain must lie above it.
        present: Whether a version is here, with the same content.
        base_here: Whether it is here in the same shards, too, which a delta's version has of it.
        trusted: Whether the delta of a version may be fetched.
        wanted: That version, one of `versions`, whatever its number; None: the newest, if it lies
            above all that was used here.
    """
    by_number = {version.version: version for version in versions}
    newest = by_number[max(by_number)] if by_number else None
    target = wanted or newest
    if target is None or present(target) or (wanted is None and target.version <= highest):
        return []
    chain: list[Fetch] = []
    at = target
    while (at is wanted or at.version > highest) and trusted(at) and len(chain) < LONGEST_CHAIN:
        base = by_number.get(at.base_version)
        if base is None or base.content_digest != at.base_content_digest:
            break
        chain.append(Fetch(at, delta=True))
        if base_here(base):
            return chain[::-1]
        at = base
    return [Fetch(target, delta=False)]


def push_key(fetch: Fetch) -> str:
    """Return the idempotency key of the push that a fetch is, the same after a restart."""
    # With its number: an origin may have one content under several.
    version, form = fetch.version, "delta" if fetch.delta else "full"
    return f"follow-{version.version}-{version.content_digest}-{form}"


def begin_request(fetch: Fetch, key: str) -> pb.BeginPushRequest:
    """Return the call that opens the push of a version; the same one finds it again."""
    version = fetch.version
    request = pb.BeginPushRequest(
        model=version.model,
        version=version.version,
        kind=pb.PUSH_KIND_DELTA if fetch.delta else pb.PUSH_KIND_FULL,
        total_bytes=version.delta_bytes if fetch.delta else version.size_bytes,
        metadata=version.metadata,
        idempotency_key=key,
    )
    if fetch.delta:
        request.base_content_digest = version.base_content_digest
    else:
        request.shard_count = version.shard_count
    return request


#: Longest wait until the newest version, which is kept here, is staged, seconds.
_STAGE_S = 60.0


class NewestStaging:
    """Has the newest version in memory before anybody asks for it.

    What is damaged here and whole in the origin comes from there once more, under the same number
    and with the same digests; then the store's copy is written anew. `fetch` brings it.
    """

    def __init__(self, model: Model, fetch: Callable[[CommitRecord], Awaitable[None]]) -> None:
        self._model = model
        self._fetch = fetch

    async def stage(self, versions: Sequence[CommitRecord]) -> None:
        """Return when the newest version is in memory, and whole in a store that is a folder.

        `versions` are those of the origin; empty: it cannot be asked.
        """
        record = self._model.table.find(self._model.table.newest)
        if record is None or (_is_staged(record) and not record.damaged):
            return
        try:
            lease = await self._staged(record)
        except WeightSyncError as error:
            if not self._is_damaged(record, error):
                raise
            await self._fetch_again(record, versions, error)
            lease = await self._staged(record)
        with lease:
            if record.damaged and self._model.store.local:
                await self._model.compactor.rewrite(record)

    async def _staged(self, record: VersionRecord) -> SlotLease:
        return await self._model.stager.stage(record.version, _STAGE_S, for_engine=False)

    def _is_damaged(self, record: VersionRecord, error: WeightSyncError) -> bool:
        """Tell whether no copy here is whole, of those that make the version."""
        there = self._model.table.find(record.version) is record
        # What was in memory alone, and is not what it was.
        failed = record.durability == pb.DURABILITY_FAILED
        return there and (failed or error.reason in STORED_DAMAGE)

    async def _fetch_again(
        self, record: VersionRecord, versions: Sequence[CommitRecord], damage: WeightSyncError
    ) -> None:
        same = [one for one in versions if _is_same(one, record.commit)]
        if not same:
            raise damage
        logger.warning("version %d is fetched again: %s", record.version, damage.message)
        if self._model.store.durable:
            record.damage(record.damaged or damage.message)
        await self._fetch(same[0])


def _is_staged(record: VersionRecord) -> bool:
    return record.residency == pb.RESIDENCY_STAGED


def _is_same(one: CommitRecord, ours: CommitRecord | None) -> bool:
    """Tell whether it is the version that is here, in the same shards."""
    return (
        ours is not None
        and one.version == ours.version
        and one.content_digest == ours.content_digest
        and one.manifest_digest == ours.manifest_digest
    )
