"""What a fetcher makes of the tensors that several writers brought: a delta of their base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.delta import DenseDelta, DenseTensor
from weightsync.wire.notes import read_note
from weightsync_server.workers.fetch.shard_tasks import look

if TYPE_CHECKING:
    import threading

__all__ = ["compose"]


def compose(view: memoryview, source: memoryview, fd: int, stop: threading.Event) -> None:
    """Fill `view` with the delta shard that makes tensors what they are in `source`.

    Args:
        view: Takes the delta shard, which has just its size.
        source: The shard in which the tensors lie.
        fd: File that tells which they are, as `FetchApi.compose` writes it.
        stop: Set when the server no longer wants the result.

    Raises:
        Cancelled: The server no longer wants it.
    """
    order = read_note(fd)
    tensors = [
        DenseTensor(name, dtype, tuple(shape), begin, end, bytes.fromhex(digest))
        for name, dtype, shape, begin, end, digest in order["tensors"]
    ]
    facts = order["shard"], order["base_content_digest"], order["layout_digest"]
    DenseDelta(*facts, tensors).write(view, source, lambda: look(stop))
