"""A cache before the store that is followed, which may lack shards, and may lie about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync_server.store.objects.piece_digests import CacheOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ShardCache"]


def _ignore(_: CacheOutcome) -> None: ...


@dataclass(frozen=True)
class ShardCache:
    """Where shards are asked for before their store is.

    Attributes:
        url: `http://` or `https://`; below it lie the objects that lie below the store's URL.
        count: Called with what came of each shard.
    """

    url: str
    count: Callable[[CacheOutcome], None] = _ignore

    def locate(self, place: str, store_url: str) -> str:
        """Return where the cache has what the store has at `place`."""
        return self.url.rstrip("/") + place.removeprefix(store_url)
