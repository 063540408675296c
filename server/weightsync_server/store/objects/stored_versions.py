"""Commit records as objects: what of them is the same whoever writes it, and what is not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weightsync_server.store.documents import decode_document, encode_document
from weightsync_server.store.objects.object_keys import RecordName, ShardName
from weightsync_server.store.objects.piece_digests import PieceDigests
from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync_server.store.objects.shard_receipts import ShardReceipt

__all__ = ["StoredForm", "StoredVersion"]

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
    """The objects of a version, in full or as a delta.

    Attributes:
        manifest: xxh3-128 of the manifest as it was written, hexadecimal.
        shards: In the order of their index.
        pieces: Digests of their pieces, in the same order; empty: not known.
    """

    manifest: str
    shards: tuple[ShardName, ...]
    pieces: tuple[PieceDigests, ...] = ()

    @classmethod
    def of(cls, manifest: str, receipts: Sequence[ShardReceipt]) -> StoredForm:
        """Return the form whose shards were put as receipts tell."""
        pieces = tuple(one.pieces for one in receipts if one.pieces is not None)
        known = pieces if len(pieces) == len(receipts) else ()
        return cls(manifest, tuple(one.object for one in receipts), known)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        document: dict[str, Any] = {
            "manifest": self.manifest,
            "shards": [str(name) for name in self.shards],
        }
        if self.pieces:
            document["pieces"] = [pieces.to_json() for pieces in self.pieces]
        return document

    @classmethod
    def from_json(cls, document: Any) -> StoredForm:
        """Read what `to_json` returned.

        Raises:
            ValueError: It is no such document.
        """
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
    """One commit record, and where its parts are.

    Attributes:
        name: Of the record.
        record: What makes the version exist.
        full: Its whole manifest, and its whole shards where they are kept.
        delta: Its delta shards, where these are kept instead.
    """

    name: RecordName
    record: CommitRecord
    full: StoredForm
    delta: StoredForm | None

    @property
    def kept(self) -> StoredForm:
        """The form whose shards are kept."""
        return self.full if self.delta is None else self.delta

    @property
    def manifests(self) -> set[str]:
        """The manifests that it needs."""
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
        """Return what the commit record does not tell, for an object of its own."""
        record = self.record.to_json()
        return encode_document({name: record[name] for name in _FACTS})

    def folded(self, record: CommitRecord, form: StoredForm) -> StoredVersion:
        """Return it kept in full from now on, with the shards of `form`."""
        full = replace(form, manifest=self.full.manifest)
        return replace(self, record=record, full=full, delta=None)

    def with_facts(self, facts: bytes | None) -> StoredVersion:
        """Return it with what `facts` returned; None or damaged: those are not known."""
        try:
            known = decode_document(facts or b"{}")
            record = self.record.to_json() | {n: v for n, v in known.items() if n in _FACTS}
            return replace(self, record=CommitRecord.from_json(record))
        except ValueError:
            return self

    @classmethod
    def parse(cls, name: RecordName, body: bytes, full: bytes | None = None) -> StoredVersion:
        """Read what `body` returned, and what a fold added to it.

        Args:
            name: Of the record.
            body: The record.
            full: The form that a fold has made; None: there was none.

        Raises:
            ValueError: It is damaged, of a newer release, or another version's.
        """
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
        raise ValueError("it tells nothing of its version")  # noqa: TRY004 - of a document
    return value
