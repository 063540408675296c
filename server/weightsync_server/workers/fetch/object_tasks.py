"""What a fetcher does with a shard in an object store: put it, and read it back.

To name a shard by its content every byte is digested, and ranges are copied into the segment as
they come, neither of which may hold up the server's event loop.
"""

from __future__ import annotations

import json
import threading
from functools import partial

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.manifest import ShardEntry
from weightsync.wire.child_channel import read_note
from weightsync_server.store.objects.piece_digests import PieceDigests
from weightsync_server.store.objects.shard_transfer import download, receipt_at, shard_name, upload
from weightsync_server.workers.fetch.shard_tasks import look


def persist(view: memoryview, target: str, stop: threading.Event) -> None:
    """Put `view` and its receipt at `target`: all of it, or nothing that anybody sees."""
    upload(view, target, partial(look, stop))


def keep(
    view: memoryview, shard: ShardEntry, begin: int, target: str, stop: threading.Event
) -> None:
    if begin or len(view) != shard.size:
        raise WeightSyncError(
            Reason.FAULT, f"an object store cannot keep a part of shard {shard.name!r}"
        )
    header = tensor_digest(view[8 : shard.data_start]).hex()
    upload(view, target, partial(look, stop), shard, header)


def restore(view: memoryview, shard: ShardEntry, source: str, stop: threading.Event) -> int:
    """Read what was kept of a shard back into `view`; return how many bytes are as they were."""
    receipt = receipt_at(source)
    if receipt.entry != shard:
        return 0
    download(source, view, partial(look, stop))
    return shard.size if shard_name(view, partial(look, stop)) == receipt.object else 0


def load(view: memoryview, source: str, stop: threading.Event) -> None:
    download(source, view, partial(look, stop))


def load_cached(view: memoryview, place: str, note_fd: int, stop: threading.Event) -> bytes:
    """Fill `view` with a whole shard, from a cache as far as that is right; return what it was."""
    # Not at the top: only a follower with a cache speaks with one.
    from weightsync_server.store.objects.shard_transfer import download_cached

    note = read_note(note_fd)
    pieces = PieceDigests.from_json(note["pieces"])
    outcome = download_cached(place, note["url"], pieces, view, partial(look, stop))
    return json.dumps(outcome).encode()


def read(size: int, source: str, stop: threading.Event) -> memoryview:
    view = memoryview(bytearray(size))
    download(source, view, partial(look, stop))
    return view
