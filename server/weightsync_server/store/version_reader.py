"""A store as whoever follows it sees it: it belongs to another server, and is only read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from weightsync.model.manifest import Manifest
    from weightsync_server.store.objects.piece_digests import PieceDigests


class VersionReader(Protocol):
    """What is asked of a store that somebody else owns: it is never opened, nor changed."""

    url: str

    async def committed(self, model: str) -> list[CommitRecord]:
        """Return the versions that exist now, by number; their store need not be opened."""

    async def stamps(self, model: str) -> frozenset[str]:
        """Return what changes with the versions that exist, for little."""

    async def manifest(self, model: str, version: int) -> Manifest:
        """See `Store.manifest`."""

    async def delta(self, model: str, version: int) -> Manifest:
        """See `Store.delta`."""

    def shard_path(
        self, model: str, version: int, shard: int, *, delta: bool = False
    ) -> str | None:
        """See `Store.shard_path`."""

    def pieces(
        self, model: str, version: int, shard: int, *, delta: bool = False
    ) -> PieceDigests | None:
        """Return the digests of a shard's pieces; None: the store has none of that shard."""
