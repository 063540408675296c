"""Digests of a shard's pieces, and receipts of uploads, to know bytes that others keep.

XXH3 finds damage, but other bytes with the same digest can be made; with BLAKE3 they cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from weightsync.model.manifest import ShardEntry
from weightsync_server.store.objects.object_keys import ShardName
from weightsync_server.store.store_records import decode_document, encode_document

#: Of the pieces of shards that are put from now on.
PIECE_BYTES = 64 << 20
#: Of a BLAKE3.
DIGEST_BYTES = 32


@dataclass(frozen=True)
class PieceDigests:
    """The BLAKE3 of each piece of one shard, joined; all pieces but the last have `piece_bytes`."""

    piece_bytes: int
    digests: bytes

    def __getitem__(self, index: int) -> bytes:
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def cover(self, size: int) -> bool:
        """Tell whether these are the digests of a shard of `size` bytes, each of it in one."""
        pieces, rest = divmod(len(self.digests), DIGEST_BYTES)
        return not rest and self.piece_bytes > 0 and pieces == -(-size // self.piece_bytes)

    @property
    def count(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def to_json(self) -> dict[str, Any]:
        return {"piece_bytes": self.piece_bytes, "blake3": self.digests.hex()}

    @classmethod
    def from_json(cls, document: Any) -> PieceDigests:
        try:
            piece_bytes, digests = document["piece_bytes"], document["blake3"]
            if type(piece_bytes) is not int:
                raise ValueError(f"pieces have {piece_bytes!r} bytes")
            return cls(piece_bytes, bytes.fromhex(digests))
        except (KeyError, TypeError) as error:
            raise ValueError(f"digests of pieces are incomplete: {error}") from error


class CacheOutcome(NamedTuple):
    """How many pieces of a shard a cache gave: right, with other bytes, or not at all.

    `missing` includes those not asked for after the first failure. `away` tells that it did not
    answer in time, and would take as long for the next shard.
    """

    right: int
    wrong: int
    missing: int
    away: bool = False


@dataclass(frozen=True)
class ShardReceipt:
    """Proves that a whole shard was put: `object` names its bytes, `name` the shard in its push.

    `header_digest` is a hexadecimal xxh3-128. It, `name` and `header_size` are empty or 0 if the
    push cannot be resumed. `pieces` is None where an earlier release put the shard.
    """

    object: ShardName
    name: str = ""
    header_size: int = 0
    header_digest: str = ""
    pieces: PieceDigests | None = None

    @property
    def entry(self) -> ShardEntry:
        return ShardEntry(self.name, self.object.size, self.header_size)

    def encode(self) -> bytes:
        document = {
            "object": str(self.object),
            "name": self.name,
            "header_size": self.header_size,
            "header_digest": self.header_digest,
        }
        if self.pieces is not None:
            document["pieces"] = self.pieces.to_json()
        return encode_document(document)

    @classmethod
    def decode(cls, data: bytes) -> ShardReceipt:
        document = decode_document(data)
        try:
            name, header_size = document["name"], document["header_size"]
            digest = document["header_digest"]
            if not (type(name) is type(digest) is str and type(header_size) is int):
                raise ValueError("a receipt has a field of another type")
            found = document.get("pieces")
            pieces = PieceDigests.from_json(found) if found is not None else None
            return cls(ShardName.parse(document["object"]), name, header_size, digest, pieces)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a receipt is incomplete: {error}") from error
