"""Digests of a shard's pieces: whoever reads it through others' hands knows that it is unchanged.

XXH3 finds damage, and whoever wants to can make other bytes with the same digest; of BLAKE3 nobody
can. What lists a version's shards carries them, because that comes from the store itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["DIGEST_BYTES", "PIECE_BYTES", "CacheOutcome", "PieceDigests"]

#: Of the pieces of shards that are put from now on.
PIECE_BYTES = 64 << 20
#: Of a BLAKE3.
DIGEST_BYTES = 32


@dataclass(frozen=True)
class PieceDigests:
    """The BLAKE3 of each piece of one shard.

    Attributes:
        piece_bytes: Size of all pieces but the last one, in bytes.
        digests: 32 bytes for each piece, joined.
    """

    piece_bytes: int
    digests: bytes

    def __getitem__(self, index: int) -> bytes:
        """Return the digest of one piece."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def cover(self, size: int) -> bool:
        """Tell whether these are the digests of a shard of `size` bytes, each of it in one."""
        pieces, rest = divmod(len(self.digests), DIGEST_BYTES)
        return not rest and self.piece_bytes > 0 and pieces == -(-size // self.piece_bytes)

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return len(self.digests) // DIGEST_BYTES

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {"piece_bytes": self.piece_bytes, "blake3": self.digests.hex()}

    @classmethod
    def from_json(cls, document: Any) -> PieceDigests:
        """Read what `to_json` returned.

        Raises:
            ValueError: It is no such document.
        """
        try:
            piece_bytes, digests = document["piece_bytes"], document["blake3"]
            if type(piece_bytes) is not int:
                raise ValueError(f"pieces have {piece_bytes!r} bytes")
            return cls(piece_bytes, bytes.fromhex(digests))
        except (KeyError, TypeError) as error:
            raise ValueError(f"digests of pieces are incomplete: {error}") from error


class CacheOutcome(NamedTuple):
    """How many pieces of a shard a cache gave, and whether it is worth being asked again.

    Attributes:
        right: As they were put.
        wrong: With other bytes; they were read from the store.
        missing: Not at all; neither were those that were not asked for after the first failure.
        away: It did not answer, or not in time: asking it for the next shard takes as long.
    """

    right: int
    wrong: int
    missing: int
    away: bool = False
