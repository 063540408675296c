"""A shard through a cache that asks nobody, and that nobody vouches for; it blocks, as fetchers do.

Each piece is compared with its BLAKE3 as it comes. What is not right, or does not come, is read
from the store itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from blake3 import blake3
from obstore import exceptions, store

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.objects.object_client import ABSENT
from weightsync_server.store.objects.piece_digests import CacheOutcome
from weightsync_server.store.objects.shard_transfer import DOWNLOADS, StoredShard

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_server.store.objects.piece_digests import PieceDigests

__all__ = ["download_cached"]

#: A cache is worth a short wait only, for each piece: the store has the same.
_CLIENT: Any = {"connect_timeout": "2s", "timeout": "20s", "user_agent": "weightsync"}
_RETRIES: Any = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}


def download_cached(
    place: str, url: str, pieces: PieceDigests, view: memoryview, look: Callable[[], None]
) -> CacheOutcome:
    """Fill `view` with a whole shard, unchanged since it was put, whatever the cache says.

    Args:
        place: Of its bytes in the store.
        url: Of the same bytes in the cache, `http://` or `https://`.
        pieces: As they were put.
        view: Takes the bytes; when this raises, it holds anything.
        look: Called between pieces; it raises to end the work.

    Raises:
        WeightSyncError: DATA_CORRUPT: the digests are of another length, or the store lacks it;
            FAULT, REQUEST_INVALID.
    """
    if not pieces.cover(len(view)):
        raise WeightSyncError(
            Reason.DATA_CORRUPT,
            f"a stored shard of {len(view)} bytes has digests of {pieces.piece_bytes} bytes each "
            "that do not cover it; push the version again",
        )
    cached = _CachedShard(url, pieces, view)
    stored = StoredShard(place, view)
    begins = range(0, len(view), pieces.piece_bytes)
    counts = {True: 0, False: 0, None: 0}
    with ThreadPoolExecutor(DOWNLOADS, "cached") as threads:
        tasks = [threads.submit(_piece, cached, stored, index) for index in range(len(begins))]
        try:
            for task in tasks:
                counts[task.result()] += 1
                look()
        finally:
            for task in tasks:
                task.cancel()
    return CacheOutcome(counts[True], counts[False], counts[None], cached.away)


def _piece(cached: _CachedShard, stored: StoredShard, index: int) -> bool | None:
    right = cached.fill(index)
    if not right:
        begin, end = cached.bounds(index)
        stored.fill(begin, end)
    return right


class _CachedShard:
    """One shard in a cache, which is asked no more once it has failed or lied.

    Attributes:
        away: It did not answer.
    """

    def __init__(self, url: str, pieces: PieceDigests, view: memoryview) -> None:
        root, _, self._key = url.rpartition("/")
        client = _CLIENT | {"allow_http": "true"}
        self._store = store.HTTPStore.from_url(root, client_options=client, retry_config=_RETRIES)
        self._pieces = pieces
        self._view = view
        self._failed = self.away = False

    def bounds(self, index: int) -> tuple[int, int]:
        """Return where a piece begins and ends."""
        begin = index * self._pieces.piece_bytes
        return begin, min(begin + self._pieces.piece_bytes, len(self._view))

    def fill(self, index: int) -> bool | None:
        """Return whether a piece came right; None: it did not come."""
        if self._failed:
            return None
        try:
            right = self._digest(*self.bounds(index)) == self._pieces[index]
        except (*ABSENT, ValueError):
            right = None
        except exceptions.BaseError:
            right, self.away = None, True
        self._failed = self._failed or not right
        return right

    def _digest(self, begin: int, end: int) -> bytes:
        """Take a piece, and return the BLAKE3 of what came, not of what lies there."""
        digest, at = blake3(), begin
        found = obstore.get(self._store, self._key, options={"range": (begin, end)})
        # As it comes: a cache may send without end.
        for data in found.stream():
            to = at + len(data)
            if to > end:
                raise ValueError("more came than was asked for")
            digest.update(data)
            self._view[at:to] = memoryview(data)
            at = to
        return digest.digest()
