"""Whole shards between memory and an object store, in pieces; it blocks, so fetchers do it.

Nothing is copied as a whole: pieces of the memory are uploaded as parts, and ranges are written
where they belong as they come.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
import xxhash
from blake3 import blake3

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.objects.object_client import ABSENT, connect, refusing, split_url
from weightsync_server.store.objects.object_keys import ShardName, is_receipt, object_of
from weightsync_server.store.objects.piece_digests import PIECE_BYTES, PieceDigests
from weightsync_server.store.objects.shard_receipts import ShardReceipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from obstore.store import ObjectStore as Bucket

    from weightsync.model.manifest import ShardEntry

__all__ = [
    "DOWNLOADS",
    "REUSED_FOR",
    "StoredShard",
    "download",
    "receipt_at",
    "shard_name",
    "upload",
]

#: Age up to which bytes that are there are not put again. A collector removes them at twice that.
REUSED_FOR = timedelta(hours=12)

#: Parts of an upload, and ranges of a download.
_RANGE = 16 << 20
_UPLOADS, DOWNLOADS = 6, 8


def shard_name(view: memoryview, look: Callable[[], None]) -> ShardName:
    """Return the name of bytes.

    Args:
        view: The bytes.
        look: Called between pieces; it raises to end the work.
    """
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
    young enough are not put again.

    Args:
        view: The shard.
        place: What `ObjectStore.shard_path` returned. Of a version that is committed nothing is
            written.
        look: Called between pieces; it raises to end the work.
        entry: Name and sizes, of a shard whose push can be resumed.
        header_digest: xxh3-128 of its header, hexadecimal, of such a shard.

    Raises:
        WeightSyncError: FAULT, REQUEST_INVALID; VERSION_CONFLICT: its version is committed with
            other bytes.
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
    """Return the receipt at `place`.

    Raises:
        WeightSyncError: DATA_CORRUPT: there is none; FAULT, REQUEST_INVALID.
    """
    bucket, key = _at(place)
    with refusing("reading the receipt of a shard"):
        try:
            return ShardReceipt.decode(bytes(obstore.get(bucket, key).bytes()))
        except (*ABSENT, ValueError) as error:
            raise WeightSyncError(
                Reason.DATA_CORRUPT, f"nothing is known of {key}; send the shard again"
            ) from error


def download(place: str, view: memoryview, look: Callable[[], None]) -> None:
    """Fill `view` with a whole shard.

    Args:
        place: Of its bytes, from `ObjectStore.shard_path` for a committed version, or of a receipt.
        view: Takes the bytes; when this raises, it holds anything.
        look: Called between ranges; it raises to end the work.

    Raises:
        WeightSyncError: DATA_CORRUPT when it is missing or has another length; FAULT,
            REQUEST_INVALID.
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
    """The bytes of a shard in the store, and the memory that takes them.

    Args:
        place: Of its bytes.
        view: Of as many bytes as it should have.
    """

    def __init__(self, place: str, view: memoryview) -> None:
        self._bucket, self._key = _at(place)
        self._view = view

    def check_size(self) -> None:
        """Refuse it if it has another size.

        Raises:
            WeightSyncError: DATA_CORRUPT, FAULT, REQUEST_INVALID.
        """
        size = _size(self._bucket, self._key)
        if size != len(self._view):
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"a stored shard has {size} bytes and should have {len(self._view)}; push the "
                "version again or restore the object",
            )

    def fill(self, begin: int, end: int) -> None:
        """Read some bytes to where they belong.

        Raises:
            WeightSyncError: DATA_CORRUPT: it is not there; FAULT, REQUEST_INVALID.
        """
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
