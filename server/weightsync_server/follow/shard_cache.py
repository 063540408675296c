"""A cache before the store that is followed, which may lack shards, and may lie about them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync_server.store.objects.piece_digests import CacheOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_server.store.objects.piece_digests import PieceDigests

__all__ = ["ShardCache"]

logger = logging.getLogger(__name__)

#: How long a cache that did not answer is asked for nothing, seconds: each try may cost five.
_AWAY_S = 30.0


def _ignore(_: CacheOutcome) -> None: ...


class ShardCache:
    """Where shards are asked for before their store is.

    One that does not answer is asked again after half a minute; until then the store alone is.

    Args:
        url: `http://` or `https://`; below it lie the objects that lie below the store's URL.
        count: Called with what came of each shard.
    """

    def __init__(self, url: str, count: Callable[[CacheOutcome], None] = _ignore) -> None:
        self._url = url.rstrip("/")
        self._count = count
        self._away_until = 0.0

    def locate(self, place: str, store_url: str) -> str:
        """Return where the cache has what the store has at `place`."""
        return self._url + place.removeprefix(store_url)

    def passes(self, pieces: PieceDigests) -> bool:
        """Return whether it is not asked for a shard now, which then counts as missing there."""
        if clock.monotonic() >= self._away_until:
            return False
        self._count(CacheOutcome(0, 0, pieces.count))
        return True

    def note(self, url: str, outcome: CacheOutcome) -> None:
        """Take note of what came of a shard.

        Args:
            url: Of the shard in the cache.
            outcome: What came.
        """
        self._count(outcome)
        if outcome.wrong:
            logger.error(
                "the cache gave other bytes than were put at %s; they came from the store instead: "
                "look who may write to it",
                url,
            )
        if outcome.away:
            now, known = clock.monotonic(), self._away_until
            self._away_until = now + _AWAY_S
            if now >= known:
                logger.warning(
                    "the cache does not answer, asked for %s; it gets %g s", url, _AWAY_S
                )
