"""What a fetcher does with a shard in an object store: put it, and read it back.

Input and output are done here and not in the server: to name a shard by its content every byte is
digested, and ranges are copied into the segment as they come, neither of which may hold up the
server's event loop. The store's client releases the GIL.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.wire.notes import read_note
from weightsync_server.store.objects.piece_digests import PieceDigests
from weightsync_server.store.objects.shard_transfer import (
    download,
    receipt_at,
    shard_name,
    upload,
)
from weightsync_server.workers.fetch.shard_tasks import look

if TYPE_CHECKING:
    import threading

    from weightsync.model.manifest import ShardEntry

__all__ = ["keep", "load", "load_cached", "persist", "read", "restore"]


def persist(view: memoryview, target: str, stop: threading.Event) -> None:
    """Put `view` and its receipt at `target`: all of it, or nothing that anybody sees.

    Raises:
        WeightSyncError: FAULT, REQUEST_INVALID.
        Cancelled: The server no longer wants it.
    """
    upload(view, target, partial(look, stop))


def keep(
    view: memoryview, shard: ShardEntry, begin: int, target: str, stop: threading.Event
) -> None:
    """Put a whole shard, so that its push can be resumed.

    Raises:
        WeightSyncError: FAULT, REQUEST_INVALID.
        Cancelled: The server no longer wants it.
    """
    if begin or len(view) != shard.size:
        raise WeightSyncError(
            Reason.FAULT, f"a part of shard {shard.name!r} cannot be kept in an object store"
        )
    header = tensor_digest(view[8 : shard.data_start]).hex()
    upload(view, target, partial(look, stop), shard, header)


def restore(view: memoryview, shard: ShardEntry, source: str, stop: threading.Event) -> int:
    """Read what was kept of a shard back into `view`; return how many bytes are as they were.

    Raises:
        WeightSyncError: DATA_CORRUPT when nothing of it can be read; FAULT, REQUEST_INVALID.
        Cancelled: The server no longer wants it.
    """
    receipt = receipt_at(source)
    if receipt.entry != shard:
        return 0
    download(source, view, partial(look, stop))
    return shard.size if shard_name(view, partial(look, stop)) == receipt.object else 0


def load(view: memoryview, source: str, stop: threading.Event) -> None:
    """Fill `view` with a whole shard.

    Raises:
        WeightSyncError: DATA_CORRUPT when it is missing or has another length; FAULT,
            REQUEST_INVALID.
        Cancelled: The server no longer wants it.
    """
    download(source, view, partial(look, stop))


def load_cached(view: memoryview, place: str, note_fd: int, stop: threading.Event) -> bytes:
    """Fill `view` with a whole shard, from a cache as far as that is right; return what it was.

    Raises:
        WeightSyncError: As `load`.
        Cancelled: The server no longer wants it.
    """
    # Not at the top: only a follower with a cache speaks with one.
    from weightsync_server.store.objects.cached_transfer import download_cached

    note = read_note(note_fd)
    pieces = PieceDigests.from_json(note["pieces"])
    outcome = download_cached(place, note["url"], pieces, view, partial(look, stop))
    return json.dumps(outcome).encode()


def read(size: int, source: str, stop: threading.Event) -> memoryview:
    """Return the bytes of a stored delta shard; see `load`."""
    view = memoryview(bytearray(size))
    download(source, view, partial(look, stop))
    return view
