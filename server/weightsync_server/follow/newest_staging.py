"""The newest version of a follower stays in memory, and whole in its store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.store.damage import STORED_DAMAGE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import Model
    from weightsync_server.residency.leases import SlotLease
    from weightsync_server.store.store_records import CommitRecord

__all__ = ["NewestStaging"]

logger = logging.getLogger(__name__)

#: Longest wait until the newest version, which is kept here, is staged, seconds.
_STAGE_S = 60.0


class NewestStaging:
    """Has the newest version in memory before anybody asks for it.

    What is damaged here and whole in the origin comes from there once more, under the same number
    and with the same digests; then the store's copy is written anew.

    Args:
        model: Has the version.
        fetch: Brings a version that is committed here already into memory, from the origin.
    """

    def __init__(self, model: Model, fetch: Callable[[CommitRecord], Awaitable[None]]) -> None:
        self._model = model
        self._fetch = fetch

    async def stage(self, versions: Sequence[CommitRecord]) -> None:
        """Return when the newest version is in memory, and whole in a store that is a folder.

        Args:
            versions: Those of the origin; empty: it cannot be asked.

        Raises:
            WeightSyncError: It cannot be had; also if it is damaged here, and the origin has no
                such version. NO_SLOT, DISK_EXHAUSTED, ...
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
            record.damaged = record.damaged or damage.message
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
