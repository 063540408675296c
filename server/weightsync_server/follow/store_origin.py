"""An origin that is a store: objects in a bucket, or files that this host mounts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from weightsync.errors import WeightSyncError
from weightsync_server.follow.stored_bytes import StoredBytes

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from weightsync_server.follow.fetch_plan import Fetch
    from weightsync_server.follow.shard_cache import ShardCache
    from weightsync_server.ops.meters import Meters
    from weightsync_server.push.parts import Push
    from weightsync_server.store.store_records import CommitRecord
    from weightsync_server.store.version_reader import VersionReader

__all__ = ["StoreOrigin"]

_T = TypeVar("_T")


class StoreOrigin:
    """Follows a store.

    Args:
        store: The store.
        model: Name of the model in it.
        interval_s: How often it is looked for new versions, seconds.
        meters: Counts the bytes that come.
        cache: Is asked for shards first; None: there is no such.

    Attributes:
        patience_s: What lacks in a store, nobody brings there because it is asked for.
    """

    patience_s = 0.0

    def __init__(
        self,
        store: VersionReader,
        model: str,
        interval_s: float,
        meters: Meters,
        cache: ShardCache | None = None,
    ) -> None:
        self.url = store.url
        self._store = store
        self._model = model
        self._interval_s = interval_s
        self._meters = meters
        self._cache = cache
        self._stamps: frozenset[str] = frozenset()
        self._versions: dict[int, CommitRecord] = {}

    async def versions(self) -> Sequence[CommitRecord]:
        """Return the versions that exist now; what a fenced writer committed does not."""
        found = await _look(self._store.committed(self._model))
        self._versions = {record.version: record for record in found}
        return found

    async def changed(self) -> None:
        """Look now and then; return when something has changed since, or cannot be seen."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                stamps = await _look(self._store.stamps(self._model))
            except WeightSyncError:
                # Whoever asks for the versions is told why.
                return
            if stamps != self._stamps:
                self._stamps = stamps
                return

    async def bring(self, push: Push, fetch: Fetch) -> None:
        """Have fetchers read the shards into the segments of the push."""
        store, versions = self._store, self._versions
        await StoredBytes(store, versions, push, fetch, self._meters, self._cache).bring()

    async def close(self) -> None:
        """Do nothing: requests end by themselves."""


async def _look(work: Coroutine[None, None, _T]) -> _T:
    """Return what a look tells; a caller that is cancelled leaves it behind, for it only reads.

    A mount whose server is gone may hold its thread for ever.
    """
    return await asyncio.shield(asyncio.create_task(work))
