"""Whole shards between memory and an object store, in pieces; it blocks, so fetchers do it.

Nobody vouches for a cache: each piece from there is compared with its BLAKE3, and what is not
right, or does not come, is read from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import obstore
import xxhash
from blake3 import blake3
from obstore import exceptions, store

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import ShardEntry
from weightsync_server.store.objects.object_client import ABSENT, connect, refusing, split_url
from weightsync_server.store.objects.object_keys import ShardName, is_receipt, object_of
from weightsync_server.store.objects.piece_digests import (
    PIECE_BYTES,
    CacheOutcome,
    PieceDigests,
    ShardReceipt,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket


#: Age up to which bytes that are there are not put again. A collector removes them at twice that.
REUSED_FOR = timedelta(hours=12)

#: Parts of an upload, and ranges of a download.
_RANGE = 16 << 20
_UPLOADS, DOWNLOADS = 6, 8


def shard_name(view: memoryview, look: Callable[[], None]) -> ShardName:
    """Return the name of bytes; `look` is called between pieces, and raises to end the work."""
    digest = xxhash.xxh3_128()
    for piece in _ranges(view, look):
        digest.update(piece)
    return ShardName(digest.hexdigest(), len(view))


def _digests(view: memoryview, look: Callable[[], None]) -> PieceDigests:
    found = []
    for begin in range(0, len(view), PIECE_BYTES):
        digest = blake3()
        for piece in _ranges(view[begin : begin + PIECE_BYTES], look):
            digest.update(piece)
        found.append(digest.digest())
    return PieceDigests(PIECE_BYTES, b"".join(found))


def upload(
    view: memoryview,
    place: str,
    look: Callable[[], None],
    entry: ShardEntry | None = None,
    header_digest: str = "",
) -> None:
    """Put a whole shard under the name of its content, then its receipt at `place`.

    Until that is done nobody sees any of it; repeating it is harmless. Bytes that are there and
    young enough are not put again. Nothing is written for a committed version: VERSION_CONFLICT if
    that has other bytes. `look` is called between pieces and raises to end the work. `entry` and
    `header_digest` (hexadecimal xxh3-128) are given for a shard whose push can be resumed.
    """
    name = shard_name(view, look)
    if not is_receipt(place):
        _check_same(name, place)
        return
    pieces = _digests(view, look)
    receipt = ShardReceipt(name, header_digest=header_digest, pieces=pieces)
    if entry is not None:
        receipt = ShardReceipt(name, entry.name, entry.header_size, header_digest, pieces)
    bucket, target = _at(object_of(place, name))
    _, key = _at(place)
    with refusing(f"writing shard {place.rpartition('/')[2]}"):
        put_at = _modified(bucket, target, name.size)
        if put_at is None:
            _put(bucket, target, view, look)
        _put_small(bucket, key, receipt.encode())
        # Both times are the store's own.
        if put_at is not None and (_modified(bucket, key) or put_at) - put_at >= REUSED_FOR:
            _put(bucket, target, view, look)


def receipt_at(place: str) -> ShardReceipt:
    """Return the receipt at `place`; DATA_CORRUPT: there is none."""
    bucket, key = _at(place)
    with refusing("reading the receipt of a shard"):
        try:
            return ShardReceipt.decode(bytes(obstore.get(bucket, key).bytes()))
        except (*ABSENT, ValueError) as error:
            raise WeightSyncError(
                Reason.DATA_CORRUPT, f"there is no record of {key}; send the shard again"
            ) from error


def download(place: str, view: memoryview, look: Callable[[], None]) -> None:
    """Fill `view` with a whole shard; when this raises, `view` holds anything.

    `place` is that of a committed version's bytes, or of a receipt. `look`, called between ranges,
    raises to end the work. Raises DATA_CORRUPT for a missing shard or another length.
    """
    if is_receipt(place):
        place = object_of(place, receipt_at(place).object)
    shard = StoredShard(place, view)
    shard.check_size()
    with ThreadPoolExecutor(DOWNLOADS, "download") as threads:
        begins = range(0, len(view), _RANGE)
        ranges = [threads.submit(shard.fill, at, min(at + _RANGE, len(view))) for at in begins]
        try:
            for one in ranges:
                one.result()
                look()
        finally:
            for one in ranges:
                one.cancel()


class StoredShard:
    def __init__(self, place: str, view: memoryview) -> None:
        self._bucket, self._key = _at(place)
        self._view = view

    def check_size(self) -> None:
        size = _size(self._bucket, self._key)
        if size != len(self._view):
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"a stored shard has {size} bytes and should have {len(self._view)}; push the "
                "version again or restore the object",
            )

    def fill(self, begin: int, end: int) -> None:
        """Read some bytes to where they belong; DATA_CORRUPT: it is not there."""
        with refusing("reading a stored shard"):
            try:
                for at in range(begin, end, _RANGE):
                    to = min(at + _RANGE, end)
                    data = obstore.get_range(self._bucket, self._key, start=at, end=to)
                    self._view[at:to] = memoryview(data)
            except ABSENT as error:
                raise _missing(self._key) from error


def _check_same(name: ShardName, place: str) -> None:
    if place.rpartition("/")[2] != str(name):
        raise WeightSyncError(
            Reason.VERSION_CONFLICT,
            "the version was committed with other content meanwhile, through another server; push "
            "a higher version",
        )


def _size(bucket: Bucket, key: str) -> int:
    with refusing("asking for a stored shard"):
        try:
            return obstore.head(bucket, key)["size"]
        except ABSENT as error:
            raise _missing(key) from error


def _modified(bucket: Bucket, key: str, size: int | None = None) -> datetime | None:
    try:
        meta = obstore.head(bucket, key)
    except ABSENT:
        return None
    return meta["last_modified"] if size in (None, meta["size"]) else None


def _put(bucket: Bucket, key: str, view: memoryview, look: Callable[[], None]) -> None:
    if len(view) <= _RANGE:
        _put_small(bucket, key, bytes(view))
        return
    ranges = _ranges(view, look)
    obstore.put(bucket, key, ranges, chunk_size=_RANGE, max_concurrency=_UPLOADS)


def _put_small(bucket: Bucket, key: str, data: bytes) -> None:
    obstore.put(bucket, key, data, use_multipart=False)


def _ranges(view: memoryview, look: Callable[[], None]) -> Iterator[memoryview]:
    for begin in range(0, len(view), _RANGE):
        look()
        yield view[begin : begin + _RANGE]


def _at(place: str) -> tuple[Bucket, str]:
    bucket, key = split_url(place)
    return connect(bucket), key


def _missing(key: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.DATA_CORRUPT,
        f"{key.rpartition('/')[2]} is not in the store; push the version again or restore the "
        "object",
    )


#: A cache is worth a short wait only, for each piece: the store has the same.
_CLIENT: Any = {"connect_timeout": "2s", "timeout": "20s", "user_agent": "weightsync"}
_RETRIES: Any = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}


def download_cached(
    place: str, url: str, pieces: PieceDigests, view: memoryview, look: Callable[[], None]
) -> CacheOutcome:
    """Fill `view` with a whole shard, unchanged since it was put, whatever the cache says.

    `url` is where the cache has the bytes; `pieces` are their digests. `look` is called between
    pieces and raises to end the work. When this raises, `view` holds anything.
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
    """One shard in a cache, which is asked no more once it has failed or lied."""

    def __init__(self, url: str, pieces: PieceDigests, view: memoryview) -> None:
        root, _, self._key = url.rpartition("/")
        client = _CLIENT | {"allow_http": "true"}
        self._store = store.HTTPStore.from_url(root, client_options=client, retry_config=_RETRIES)
        self._pieces = pieces
        self._view = view
        self._failed = self.away = False

    def bounds(self, index: int) -> tuple[int, int]:
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
                raise ValueError("more bytes arrived than were requested")
            digest.update(data)
            self._view[at:to] = memoryview(data)
            at = to
        return digest.digest()
