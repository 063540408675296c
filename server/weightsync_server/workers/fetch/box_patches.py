"""What a fetcher makes of what changed in a writer's boxes: those of another version, changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weightsync.delta import apply_change, parse_shard
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.box_spans import BoxSpan
from weightsync.wire.notes import read_note
from weightsync_server.workers.fetch.shard_tasks import look

if TYPE_CHECKING:
    import threading

    from numpy.typing import NDArray

    from weightsync.delta import TensorChange

__all__ = ["patch"]


def patch(
    view: memoryview, base: memoryview, source: memoryview, fd: int, stop: threading.Event
) -> None:
    """Fill boxes of a shard with what a delta shard makes of them.

    Args:
        view: The shard; when this raises, the boxes hold anything.
        base: The same shard of the version that is changed.
        source: Begins with the delta shard.
        fd: File that tells where the boxes lie, as `FetchApi.patch_boxes` writes it.
        stop: Set when the server no longer wants the result.

    Raises:
        WeightSyncError: SHARD_INVALID, DIGEST_MISMATCH, LAYOUT_INVALID.
        Cancelled: The server no longer wants it.
    """
    order = read_note(fd)
    kinds = {name: (dtype, tuple(shape)) for name, (dtype, shape) in order["kinds"].items()}
    delta = parse_shard(source[: order["size"]], kinds)
    if delta.base_content_digest != order["base_content_digest"]:
        raise WeightSyncError(
            Reason.SHARD_INVALID,
            f"they are of content {delta.base_content_digest}, the push was begun with "
            f"{order['base_content_digest']}; push the version again",
        )
    for name, (begin, run, counts, strides) in order["boxes"]:
        span = BoxSpan(begin, run, tuple(counts), tuple(strides))
        _lay(span, view, base, delta.changes.get(name), stop)


def _lay(
    span: BoxSpan,
    view: memoryview,
    base: memoryview,
    change: TensorChange | None,
    stop: threading.Event,
) -> None:
    """Make one box; without a change it is that of the base."""
    if change is None or not span.counts:
        at = 0
        for piece in span.pieces(base):
            look(stop)
            span.put(view, at, piece)
            at += len(piece)
        if change is not None:
            apply_change(change, _array(view[span.begin : span.begin + span.size]))
        return
    # Its runs lie apart: a change takes the box in a row.
    row, at = np.empty(span.size, np.uint8), 0
    for piece in span.pieces(base):
        look(stop)
        row[at : at + len(piece)] = _array(piece)
        at += len(piece)
    apply_change(change, row)
    span.put(view, 0, row.data)


def _array(view: memoryview) -> NDArray[np.uint8]:
    # Of a slice of its own: an array that a traceback still holds must not keep the view.
    return np.frombuffer(view[:], np.uint8)
