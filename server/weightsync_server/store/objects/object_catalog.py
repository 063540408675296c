"""Which versions of a model a bucket has: records are read once, because they never change."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import xxhash

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.objects.object_keys import RecordName, record_name
from weightsync_server.store.objects.stored_versions import StoredVersion

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync_server.store.objects.object_client import ObjectClient, ObjectFacts
    from weightsync_server.store.objects.object_fences import Floor, ObjectFence

    _Seen = tuple[ObjectFacts, ObjectFacts | None]

__all__ = ["ObjectCatalog"]

logger = logging.getLogger(__name__)


class ObjectCatalog:
    """The versions of one model.

    Args:
        client: The store.
        model: Its name.
        fence: Tells which records count.

    Attributes:
        known: The versions that exist, as of the last look.
        damaged: A sentence for each version whose record cannot be read.
    """

    def __init__(self, client: ObjectClient, model: str, fence: ObjectFence) -> None:
        self.known: dict[int, StoredVersion] = {}
        self.damaged: dict[int, str] = {}
        self._client = client
        self._model = model
        self._fence = fence
        #: By record, as of the last look: what the store said of it and of its fold, and what it is
        #: (None: it is damaged).
        self._seen: dict[RecordName, tuple[_Seen, StoredVersion | None]] = {}
        self._undecided = False

    async def refresh(self) -> None:
        """Look which versions exist now; records that have not changed are not read again."""
        names = await self._fence.records()
        floor, folds = await asyncio.gather(
            self._fence.floor(), self._client.list_under(f"{self._model}/full")
        )
        self._undecided = floor.undecided > 0
        seen = {
            name: (names[name], folds.get(self.key("full", name)))
            for name in names
            if self._counts(floor, name)
        }
        before = {name: known for name, known in self._seen.items() if known[0] == seen.get(name)}
        read = {one.name: one for one in await self._read(seen.keys() - before.keys())}
        now = {
            name: (facts, read.get(name))
            for name, facts in seen.items()
            if name in read or name.version in self.damaged
        }
        self._seen = now | before
        self.known = {
            name.version: version
            for name, (_, version) in sorted(self._seen.items())
            if version is not None
        }
        for version in self.damaged.keys() - {name.version for name in names}:
            del self.damaged[version]

    def _counts(self, floor: Floor, name: RecordName) -> bool:
        # Once and for ever, also where it is undecided what else does.
        return floor.counts(name) or (floor.undecided > 0 and name in self._seen)

    async def stamps(self) -> frozenset[str]:
        """Return the keys that change whenever a version comes, goes or is kept in another form.

        Which of the records count is final once they are listed: an epoch changes nothing of that.
        Where it was undecided the floors tell.
        """
        changing = ("versions", "full", *(["floors"] if self._undecided else []))
        folders = (f"{self._model}/{folder}" for folder in changing)
        listed = await asyncio.gather(*map(self._client.list_under, folders))
        return frozenset().union(*listed)

    async def all(self) -> list[StoredVersion]:
        """Return all versions that exist now.

        Raises:
            WeightSyncError: DATA_CORRUPT: a record cannot be read, so that nobody knows what it
                needs.
        """
        await self.refresh()
        for why in self.damaged.values():
            raise WeightSyncError(Reason.DATA_CORRUPT, why)
        return list(self.known.values())

    async def find(self, version: int) -> StoredVersion | None:
        """Return one version as it is in the store now, or None."""
        prefix = f"{self._model}/versions/{version}"
        listed = await self._client.list_under(prefix)
        names = {record_name(f"{version}{key[len(prefix) :]}") for key in listed} - {None}
        floor = await self._fence.floor()
        found = await self._read({name for name in names if name and self._counts(floor, name)})
        if version in self.damaged:
            raise WeightSyncError(Reason.DATA_CORRUPT, self.damaged[version])
        return found[0] if found else None

    async def _read(self, names: Iterable[RecordName]) -> list[StoredVersion]:
        """Return the versions of those records that are still there, by number."""
        ordered = sorted(names)
        bodies, folds = await asyncio.gather(
            *(
                self._client.get_all([self.key(folder, name) for name in ordered])
                for folder in ("versions", "full")
            )
        )
        facts_of = {
            name: self.facts_key(name, body)
            for name in ordered
            if (body := bodies.get(self.key("versions", name))) is not None
        }
        facts = await self._client.get_all(list(facts_of.values()))
        found = []
        for name in ordered:
            body = bodies.get(self.key("versions", name))
            if body is None:
                continue
            try:
                version = StoredVersion.parse(name, body, folds.get(self.key("full", name)))
            except ValueError as error:
                why = f"{self._model}/v{name.version} is damaged (the commit record: {error})"
                logger.error("version %s", why)  # noqa: TRY400 - the sentence says it all
                self.damaged[name.version] = why
            else:
                found.append(version.with_facts(facts.get(facts_of[name])))
                self.damaged.pop(name.version, None)
        return found

    def key(self, folder: str, name: RecordName) -> str:
        """Return the key of one of a version's objects."""
        return f"{self._model}/{folder}/{name.path}"

    def facts_key(self, name: RecordName, body: bytes) -> str:
        """Return the key of what a record does not tell: another for each content of the record.

        So who comes too late with a record of the same name leaves the facts of the first alone.
        """
        stem = f"{self._model}/facts/{name.version}/{name.epoch}"
        return f"{stem}-{xxhash.xxh3_128_hexdigest(body)}.json"
