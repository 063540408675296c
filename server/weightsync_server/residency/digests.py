"""Digests of a version in shared memory, begun shard by shard while its readers read on.

What readers made of the bytes is proved by digests that were begun after the last of them had read
them: a digest of before may have seen other bytes than they did.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from weightsync_server.ops.tasks import all_done

if TYPE_CHECKING:
    from weightsync.model.manifest import Manifest
    from weightsync_server.residency.leases import SlotLease
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["StagedDigests"]


class StagedDigests:
    """Digests each shard of a leased version once, in the order of `Layout.largest_first`.

    The lease outlives it: call `cancel` before it is released.

    Args:
        lease: Where the shards lie.
        manifest: Of the version.
        fetchers: Compute them.
    """

    def __init__(self, lease: SlotLease, manifest: Manifest, fetchers: FetchApi) -> None:
        self._shards = list(zip(lease.segments, manifest.layout.shards, strict=True))
        self._manifest = manifest
        #: What the manifest tells of the shards that readers have proved.
        self._trusted: dict[int, list[bytes]] = {}
        self._order = manifest.layout.largest_first
        self._fetchers = fetchers
        self._begun: list[asyncio.Task[list[bytes]]] = []

    def trust(self, shards: frozenset[int]) -> None:
        """Take note that every reader has proved by itself what it has of these shards.

        Wherever it has that from: if not from the segments, they are as they were when they came.
        """
        declared = _by_shard(self._manifest) if shards else []
        self._trusted = {index: declared[index] for index in shards}

    def begin(self, count: int) -> None:
        """Begin with those of the first `count` shards that are not begun yet."""
        for index in self._order[len(self._begun) : max(0, count)]:
            self._begun.append(asyncio.create_task(self._digest(index)))

    async def all(self) -> list[list[bytes]]:
        """Return the digests of all tensors, shard by shard.

        Raises:
            WeightSyncError: What a fetcher says; all of them have come to an end then.
        """
        self.begin(len(self._shards))
        found = dict(zip(self._order, await all_done(self._begun), strict=True))
        return [found[index] for index in range(len(self._shards))]

    async def _digest(self, index: int) -> list[bytes]:
        if index in self._trusted:
            return self._trusted[index]
        return await self._fetchers.digest(*self._shards[index])

    async def cancel(self) -> None:
        """Forget what was begun; afterwards no fetcher is at a segment for it."""
        begun, self._begun = self._begun, []
        self._trusted = {}
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


def _by_shard(manifest: Manifest) -> list[list[bytes]]:
    digests = iter(manifest.digests)
    return [list(itertools.islice(digests, len(t))) for t in manifest.layout.by_shard]
