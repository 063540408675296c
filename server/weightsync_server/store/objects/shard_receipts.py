"""What is written down of a shard that was uploaded for a version which is not committed yet."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.model.manifest import ShardEntry
from weightsync_server.store.documents import decode_document, encode_document
from weightsync_server.store.objects.object_keys import ShardName
from weightsync_server.store.objects.piece_digests import PieceDigests

__all__ = ["ShardReceipt"]


@dataclass(frozen=True)
class ShardReceipt:
    """Proves that a whole shard was put.

    Attributes:
        object: Name of its bytes.
        name: Name of the shard in its push; empty: it came with no push that can be resumed.
        header_size: Bytes of its header; 0: as above.
        header_digest: xxh3-128 of the header, hexadecimal; empty: as above.
        pieces: Digests of its pieces; None: it was put by an earlier release.
    """

    object: ShardName
    name: str = ""
    header_size: int = 0
    header_digest: str = ""
    pieces: PieceDigests | None = None

    @property
    def entry(self) -> ShardEntry:
        """Name and sizes of the shard, as its push declared them."""
        return ShardEntry(self.name, self.object.size, self.header_size)

    def encode(self) -> bytes:
        """Return what `decode` reads."""
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
        """Read what `encode` returned.

        Raises:
            ValueError: It is no receipt.
        """
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
