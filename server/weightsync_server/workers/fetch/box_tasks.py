"""What a fetcher does with the boxes that several writers have put into a segment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.model.box_spans import BoxSpan
from weightsync.model.digest import TensorDigester
from weightsync.wire.notes import read_note
from weightsync_server.workers.fetch.shard_tasks import look

if TYPE_CHECKING:
    import threading

__all__ = ["digest"]


def digest(view: memoryview, fd: int, stop: threading.Event) -> bytes:
    """Return the joined 16-byte digests of boxes, each of its bytes in row-major order.

    Args:
        view: The shard.
        fd: File that tells where the boxes lie, as `FetchApi.digest_boxes` writes it.
        stop: Set when the server no longer wants the result.

    Raises:
        Cancelled: The server no longer wants it.
    """
    order = read_note(fd)
    digests = []
    for begin, run, counts, strides in order["spans"]:
        digester = TensorDigester()
        for piece in BoxSpan(begin, run, tuple(counts), tuple(strides)).pieces(view):
            look(stop)
            digester.update(piece)
        digests.append(digester.digest())
    return b"".join(digests)
