"""An origin that is a store: objects in a bucket, perhaps through a cache, or mounted files.

A version that the store keeps as a delta is fetched in full by reading the version that its chain
begins with, then one delta after the other, each proved and bound to the content that it changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from weightsync import clock, failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.kept_probes import unpack
from weightsync_server.deltas import DeltaShard, PatchInput
from weightsync_server.deltas.pushed_delta import write_layout
from weightsync_server.ops.metrics import Meters
from weightsync_server.ops.tasks import all_done, cancel_tasks
from weightsync_server.push.parts import Push
from weightsync_server.push.shard_part import ShardState
from weightsync_server.push.state import check_open
from weightsync_server.replicate.fetch_plan import Fetch
from weightsync_server.residency.slot import Slot
from weightsync_server.store.objects.piece_digests import CacheOutcome, PieceDigests
from weightsync_server.store.store_records import CommitRecord
from weightsync_server.store.version_reader import VersionReader

logger = logging.getLogger(__name__)


#: Shards under way at once; the fetchers order the work among themselves.
_AT_ONCE = 8
#: Failures after which the push goes on when it is asked for again, from what is durable of it.
_PASSING = frozenset({Reason.FAULT, Reason.FETCHER_FAILED, Reason.SHUTTING_DOWN})


class StoredBytes:
    """Fills one push from a store; `versions` is what that has, by number, as of the last look."""

    def __init__(
        self,
        store: VersionReader,
        versions: Mapping[int, CommitRecord],
        push: Push,
        fetch: Fetch,
        meters: Meters,
        cache: ShardCache | None = None,
    ) -> None:
        self._store = store
        self._versions = versions
        self._push = push
        self._version = fetch.version
        self._delta = fetch.delta
        self._meters = meters
        self._cache = cache
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def bring(self) -> None:
        push, number = self._push, self._version.version
        push.lifecycle.join()
        try:
            manifest = await self._manifest(number, delta=self._delta)
            shards = self._shards(manifest)
            # A task of the push: before that has ended, none of its memory is used otherwise.
            task = push.pipeline.start(
                self._fill(manifest, shards), f"fetching version {number}", _PASSING
            )
            for shard in shards:
                shard.parts[0].gpu_copy = task
            try:
                await asyncio.wait([task])
            finally:
                # With the caller it is called off.
                await cancel_tasks(task)
            check_open(push.state)
            task.result()
        finally:
            push.lifecycle.leave(self)

    async def _manifest(self, number: int, *, delta: bool) -> Manifest:
        """Return a manifest; that of a whole version is proved by the identity of the version."""
        read = self._store.delta if delta else self._store.manifest
        manifest = await read(self._version.model, number)
        if delta:
            return manifest
        expected = self._versions[number].content_digest
        if await asyncio.to_thread(getattr, manifest, "content_digest") != expected:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"the manifest of version {number} in {self._store.url} is not of its content; "
                "push the version there again",
            )
        return manifest

    def _shards(self, manifest: Manifest) -> list[ShardState]:
        layout, found = manifest.layout, []
        for index, (entry, tensors) in enumerate(zip(layout.shards, layout.by_shard, strict=True)):
            shard = self._push.layout.take(index, entry, tensors)
            if shard is None:
                raise WeightSyncError(
                    Reason.LAYOUT_INVALID,
                    f"shard {index} of version {self._version.version} has another layout than "
                    "when it was begun to be fetched; it is begun again",
                )
            found.append(shard)
        self._push.layout.finish()
        return found

    async def _fill(self, manifest: Manifest, shards: list[ShardState]) -> None:
        self._push.pipeline.begin_receive()
        if self._delta or not self._version.base_version:
            given = zip(shards, map(b"".join, manifest.digests_by_shard), strict=True)
            await self._each([self._arrive(*pair) for pair in given])
            return
        await self._make(manifest, shards)
        for shard in shards:
            await self._push.pipeline.ready(shard)
            await self._take_on(shard)

    async def _arrive(self, shard: ShardState, digests: bytes) -> None:
        """Read one shard, unless all of it is here already, and take it on."""
        segment = await self._push.pipeline.ready(shard)
        if not shard.complete:
            await self._read(
                shard.index, shard.entry.size, segment, self._version, delta=self._delta
            )
            # They are the trainer's, unless none were sent; those of a delta are of its own shards.
            if self._delta or self._version.trainer_verified:
                shard.parts[0].give(0, digests)
            await self._take_on(shard)

    async def _take_on(self, shard: ShardState) -> None:
        check_open(self._push.state)
        part = shard.parts[0]
        part.received_to(part.size)
        await self._push.pipeline.advance(part)

    async def _read(
        self, index: int, size: int, segment: Segment, version: CommitRecord, *, delta: bool
    ) -> None:
        path = self._store.shard_path(version.model, version.version, index, delta=delta)
        if path is None:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"follow another store: {self._store.url} keeps no shards that others can read",
            )
        await failpoints.reach("follow.shard")
        pieces = self._store.pieces(version.model, version.version, index, delta=delta)
        if self._cache is None or pieces is None or self._cache.passes(pieces):
            await self._push.model.fetch.load(path, size, segment)
        else:
            await self._read_cached(self._cache, path, pieces, size, segment)
        self._meters.add_received(size)

    async def _read_cached(
        self, cache: ShardCache, path: str, pieces: PieceDigests, size: int, segment: Segment
    ) -> None:
        url = cache.locate(path, self._store.url)
        outcome = await self._push.model.fetch.load_cached(path, url, pieces, size, segment)
        cache.note(url, outcome)

    async def _each(self, work: list[Coroutine[Any, Any, None]]) -> None:
        async def one(coroutine: Coroutine[Any, Any, None]) -> None:
            async with self._gate:
                await coroutine

        await all_done([one(coroutine) for coroutine in work])

    # A version that is kept as a delta, in full

    async def _make(self, manifest: Manifest, shards: list[ShardState]) -> None:
        chain = self._chain()
        begin = chain.pop()

        async def load(shard: ShardState) -> None:
            segment = await self._push.pipeline.ready(shard)
            await self._read(shard.index, shard.entry.size, segment, begin, delta=False)

        await self._each([load(shard) for shard in shards])
        base = begin
        for version in reversed(chain):
            await self._patch(manifest, shards, version, base)
            base = version

    def _chain(self) -> list[CommitRecord]:
        """Return the version and all that it is based on, down to one that is kept in full."""
        chain = [self._version]
        while chain[-1].base_version:
            base = self._versions.get(chain[-1].base_version)
            if base is None or base.content_digest != chain[-1].base_content_digest:
                raise WeightSyncError(
                    Reason.DATA_CORRUPT,
                    f"version {chain[-1].version} in {self._store.url} lacks its base, version "
                    f"{chain[-1].base_version}; push a version there in full",
                )
            chain.append(base)
        return chain

    async def _patch(
        self,
        manifest: Manifest,
        shards: list[ShardState],
        version: CommitRecord,
        base: CommitRecord,
    ) -> None:
        """Change the shards, which hold `base`, to what they are in `version`."""
        push = self._push
        scratch = push.model.slots.scratch()
        try:
            document = await write_layout(scratch, push.model.segments, manifest)
            delta = await self._deltas(scratch, document, manifest, version, base)
            changed = PatchInput(manifest.layout, document, [delta])

            async def one(shard: ShardState) -> None:
                segment = await push.pipeline.ready(shard)
                await push.model.materializer.patch(segment, shard.index, changed)

            await self._each([one(shard) for shard in shards])
        finally:
            push.model.slots.discard(scratch)

    async def _deltas(
        self,
        scratch: Slot,
        document: Segment,
        manifest: Manifest,
        version: CommitRecord,
        base: CommitRecord,
    ) -> list[DeltaShard]:
        """Return the delta shards of a version in memory, all proved to change its base."""
        model = self._push.model
        container = await self._manifest(version.version, delta=True)
        found = []
        for index, entry in enumerate(container.layout.shards):
            segment = await model.slots.segment(scratch, index, entry.size)
            await self._read(index, entry.size, segment, version, delta=True)
            of, shard, _ = await model.materializer.inspect(
                document, manifest.layout, index, entry, segment
            )
            if of != base.content_digest:
                raise WeightSyncError(
                    Reason.DATA_CORRUPT,
                    f"the delta of version {version.version} in {self._store.url} changes content "
                    f"{of}, but its record says {base.content_digest}; push a version there in "
                    "full",
                )
            found.append(shard)
        return found


_T = TypeVar("_T")


class StoreOrigin:
    """Follows a store, looked at for new versions each `interval_s`.

    `cache` is asked for shards first. `patience_s` is 0: what a store lacks does not come there
    because it is asked for.
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

    async def probes(self, version: CommitRecord) -> pb.Probes | None:
        """Return what its commit record has of them."""
        return unpack(version.probes)

    async def close(self) -> None:
        """Do nothing: requests end by themselves."""


async def _look(work: Coroutine[None, None, _T]) -> _T:
    """Return what a look tells; a caller that is cancelled leaves it behind, for it only reads.

    A mount whose server is gone may hold its thread for ever.
    """
    return await asyncio.shield(asyncio.create_task(work))


#: How long a cache that did not answer is asked for nothing, seconds: each try may cost five.
_AWAY_S = 30.0


class ShardCache:
    """Where shards are asked for before their store is.

    One that does not answer is asked again after half a minute; until then the store alone is.
    Below `url`, which is HTTP, lie the objects that lie below the store's URL. `count` is called
    with what came of each shard.
    """

    def __init__(self, url: str, count: Callable[[CacheOutcome], None]) -> None:
        self._url = url.rstrip("/")
        self._count = count
        self._away_until = 0.0

    def locate(self, place: str, store_url: str) -> str:
        return self._url + place.removeprefix(store_url)

    def passes(self, pieces: PieceDigests) -> bool:
        """Return whether it is not asked for a shard now, which then counts as missing there."""
        if clock.monotonic() >= self._away_until:
            return False
        self._count(CacheOutcome(0, 0, pieces.count))
        return True

    def note(self, url: str, outcome: CacheOutcome) -> None:
        """Take note of what came of a shard, by its URL in the cache."""
        self._count(outcome)
        if outcome.wrong:
            logger.error(
                "the cache returned different bytes than were stored at %s; they were read from "
                "the store instead: check who can write to the cache",
                url,
            )
        if outcome.away:
            now, known = clock.monotonic(), self._away_until
            self._away_until = now + _AWAY_S
            if now >= known:
                logger.warning(
                    "the cache did not answer a request for %s; it is not used for %g s",
                    url,
                    _AWAY_S,
                )
