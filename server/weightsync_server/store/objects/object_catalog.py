"""Which versions of a model a bucket has, and removal of objects that nothing names any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import xxhash

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.objects.object_client import ObjectClient, ObjectFacts
from weightsync_server.store.objects.object_fences import Floor, ObjectFence
from weightsync_server.store.objects.object_keys import (
    RecordName,
    ShardName,
    record_name,
    shard_key,
)
from weightsync_server.store.objects.object_pushes import ObjectPushes
from weightsync_server.store.objects.piece_digests import PieceDigests, ShardReceipt
from weightsync_server.store.objects.shard_transfer import REUSED_FOR
from weightsync_server.store.store_records import CommitRecord, decode_document, encode_document

if TYPE_CHECKING:
    _Seen = tuple[ObjectFacts, ObjectFacts | None]


logger = logging.getLogger(__name__)


#: Who wrote a version, when, and what they knew besides: these may differ between two writers of
#: the same content.
_FACTS = (
    "commit_time_ns",
    "push_id",
    "idempotency_key",
    "trainer_verified",
    "client_run",
    "epoch_taken",
)


@dataclass(frozen=True)
class StoredForm:
    """The objects of a version, in full or as a delta, in the order of the shards' index.

    `pieces` is empty if their digests are not known.
    """

    manifest: str
    shards: tuple[ShardName, ...]
    pieces: tuple[PieceDigests, ...] = ()

    @classmethod
    def of(cls, manifest: str, receipts: Sequence[ShardReceipt]) -> StoredForm:
        pieces = tuple(one.pieces for one in receipts if one.pieces is not None)
        known = pieces if len(pieces) == len(receipts) else ()
        return cls(manifest, tuple(one.object for one in receipts), known)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "manifest": self.manifest,
            "shards": [str(name) for name in self.shards],
        }
        if self.pieces:
            document["pieces"] = [pieces.to_json() for pieces in self.pieces]
        return document

    @classmethod
    def from_json(cls, document: Any) -> StoredForm:
        try:
            manifest, names = document["manifest"], document["shards"]
            if type(manifest) is not str or "/" in manifest or type(names) is not list:
                raise ValueError("a form has a field of another type")
            shards = tuple(ShardName.parse(str(name)) for name in names)
            pieces = tuple(map(PieceDigests.from_json, document.get("pieces", ())))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a form is incomplete: {error}") from error
        if pieces:
            pairs = zip(pieces, shards, strict=True)
            if not all(one.cover(name.size) for one, name in pairs):
                raise ValueError("digests of pieces do not cover their shard")
        return cls(manifest, shards, pieces)


@dataclass(frozen=True)
class StoredVersion:
    """One commit record and its parts; `full` has whole shards only if `delta` is None."""

    name: RecordName
    record: CommitRecord
    full: StoredForm
    delta: StoredForm | None

    @property
    def kept(self) -> StoredForm:
        return self.full if self.delta is None else self.delta

    @property
    def manifests(self) -> set[str]:
        return {self.full.manifest, self.kept.manifest}

    def body(self) -> bytes:
        """Return the commit record as it is stored: the same bytes for the same content."""
        record = self.record.to_json()
        document: dict[str, Any] = {
            "format": 1,
            "record": {name: record[name] for name in sorted(record) if name not in _FACTS},
            "full": self.full.to_json(),
        }
        document["record"]["metadata"] = dict(sorted(self.record.metadata.items()))
        if self.delta is not None:
            document["delta"] = self.delta.to_json()
        return encode_document(document)

    def facts(self) -> bytes:
        record = self.record.to_json()
        return encode_document({name: record[name] for name in _FACTS})

    def folded(self, record: CommitRecord, form: StoredForm) -> StoredVersion:
        full = replace(form, manifest=self.full.manifest)
        return replace(self, record=record, full=full, delta=None)

    def with_facts(self, facts: bytes | None) -> StoredVersion:
        try:
            known = decode_document(facts or b"{}")
            record = self.record.to_json() | {n: v for n, v in known.items() if n in _FACTS}
            return replace(self, record=CommitRecord.from_json(record))
        except ValueError:
            return self

    @classmethod
    def parse(cls, name: RecordName, body: bytes, full: bytes | None = None) -> StoredVersion:
        """Read what `body` returned, and what a fold added to it; ValueError: it is damaged."""
        document = decode_document(body)
        if document.get("format") != 1:
            raise ValueError(f"it has format {document.get('format')!r}")
        unknown = {"commit_time_ns": 0, "trainer_verified": False}
        record = CommitRecord.from_json(unknown | _mapping(document.get("record")))
        if record.version != name.version:
            raise ValueError(f"it is of version {record.version}")
        form = StoredForm.from_json(document.get("full"))
        delta = StoredForm.from_json(document["delta"]) if "delta" in document else None
        found = cls(name, record, form, delta)
        if delta is None or full is None:
            return found
        whole = replace(record, base_version=0, base_content_digest="", delta_bytes=0)
        return found.folded(whole, StoredForm.from_json(decode_document(full)))


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it does not name its version")  # noqa: TRY004 - of a document
    return value


#: Age, by the store's clock, up to which bytes that no version names may belong to one that comes.
UNCOMMITTED_FOR = 2 * REUSED_FOR


class ObjectCatalog:
    """The versions of one model, as of the last look.

    `damaged` has a sentence for each version whose record cannot be read.
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
        """Return the keys that change whenever a version comes, goes or is kept in another form."""
        changing = ("versions", "full", *(["floors"] if self._undecided else []))
        folders = (f"{self._model}/{folder}" for folder in changing)
        listed = await asyncio.gather(*map(self._client.list_under, folders))
        return frozenset().union(*listed)

    async def all(self) -> list[StoredVersion]:
        """Return all versions that exist now; DATA_CORRUPT: what one needs cannot be read."""
        await self.refresh()
        for why in self.damaged.values():
            raise WeightSyncError(Reason.DATA_CORRUPT, why)
        return list(self.known.values())

    async def find(self, version: int) -> StoredVersion | None:
        prefix = f"{self._model}/versions/{version}"
        listed = await self._client.list_under(prefix)
        names = {record_name(f"{version}{key[len(prefix) :]}") for key in listed} - {None}
        floor = await self._fence.floor()
        found = await self._read({name for name in names if name and self._counts(floor, name)})
        if version in self.damaged:
            raise WeightSyncError(Reason.DATA_CORRUPT, self.damaged[version])
        return found[0] if found else None

    async def _read(self, names: Iterable[RecordName]) -> list[StoredVersion]:
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

    async def remove_unnamed(self, gone: StoredVersion, pushes: ObjectPushes) -> None:
        """Remove the bytes of `gone`, without records by now, but for those that others need."""
        # Receipts first: they go when the record that needs the same is there.
        needed, _ = await pushes.all_receipts()
        left = await self.all()
        needed |= {name for version in left for name in version.kept.shards}
        manifests = {digest for version in left for digest in version.manifests}
        shards = {*gone.full.shards, *gone.kept.shards} - needed
        doomed = {shard_key(self._model, name) for name in shards}
        doomed |= {self.manifest_key(digest) for digest in gone.manifests - manifests}
        await self._client.delete(sorted(doomed))

    async def sweep(self, clock: str, pushes: ObjectPushes) -> None:
        """Remove what pushes left that never came to their commit, once it is old enough.

        Only the server that has the epoch may do that. It lists first what may go, and then asks
        what is needed. An old object that is put again in between is removed all the same: the
        commit that needs it finds it missing and is refused, unless two servers check and remove
        it at the same moment.

        `clock` is the key of an object that is put to learn the store's time.
        """
        now = await store_time(self._client, clock)
        found: dict[str, ObjectFacts] = {}
        for folder in ("shards", "manifests", "facts", "full"):
            found |= await self._client.list_under(f"{self._model}/{folder}")
        old = _older(found, now, UNCOMMITTED_FOR)
        _, evidence = await pushes.all_receipts()
        # A push whose server never came back for it.
        abandoned = _abandoned(evidence, now)
        await self._client.delete(sorted(abandoned))
        needed, _ = await pushes.all_receipts()
        kept = {shard_key(self._model, name) for name in needed}
        # After the receipts: these go when the record that needs the same is there.
        for version in await self.all():
            kept |= {shard_key(self._model, name) for name in version.kept.shards}
            kept |= {self.manifest_key(digest) for digest in version.manifests}
            number = version.record.version
            kept |= {key for key in old if key.startswith(_of_version(self._model, number))}
        doomed = sorted(key for key in old - kept if _is_ours(key))
        if doomed:
            logger.info("removing %d objects of %s that no version names", len(doomed), self._model)
            await self._client.delete(doomed)

    def key(self, folder: str, name: RecordName) -> str:
        return f"{self._model}/{folder}/{name.path}"

    def manifest_key(self, digest: str) -> str:
        return f"{self._model}/manifests/{digest}.json"

    def facts_key(self, name: RecordName, body: bytes) -> str:
        """Return the key of the facts beside a record; it differs with the content of the record.

        So a server that is late with the same record name leaves the first one's facts alone.
        """
        stem = f"{self._model}/facts/{name.version}/{name.epoch}"
        return f"{stem}-{xxhash.xxh3_128_hexdigest(body)}.json"


async def store_time(client: ObjectClient, key: str) -> datetime:
    """Return the time by the store's clock: that of an object which is put for it."""
    await client.put(key, b"{}")
    facts = await client.head(key)
    if facts is None:
        # It was removed at once, by nobody that this server knows of.
        return await store_time(client, key)
    return facts.modified


def _of_version(model: str, version: int) -> tuple[str, str]:
    return f"{model}/facts/{version}/", f"{model}/full/{version}/"


def _older(found: dict[str, ObjectFacts], now: datetime, age: timedelta) -> set[str]:
    return {key for key, facts in found.items() if now - facts.modified >= age}


def _abandoned(found: dict[str, ObjectFacts], now: datetime) -> set[str]:
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
