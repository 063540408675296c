"""A process's boxes of one shard are written where they belong in memory of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.model.box_spans import span_of
from weightsync.model.digest import TensorDigester
from weightsync.model.dtypes import DTYPE_BITS
from weightsync_client.transport.copying import copier_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from weightsync.model.box_spans import BoxSpan
    from weightsync_client.source.box_shards import BoxShard
    from weightsync_client.source.shards import Keep
    from weightsync_client.source.tensors import Scratch

__all__ = ["write_boxes"]


def write_boxes(
    shard: BoxShard,
    target: memoryview,
    scratch: Scratch,
    piece: int,
    stop: threading.Event,
    on_bytes: Callable[[int], None],
    keep: Keep | None = None,
) -> list[bytes]:
    """Return the digests of the boxes, each of which lies in the shard then.

    Args:
        shard: The boxes.
        target: Memory of the whole shard.
        scratch: Host memory for tensors on a device.
        piece: Bytes that are digested and copied at a time, a multiple of
            `weightsync_client.transport.copying.STEP`.
        stop: Once it is set, nothing more is written, and digests are missing.
        on_bytes: Called with the size of every piece.
        keep: Gets the bytes of every box.
    """
    digests: list[bytes] = []
    for local in shard.sent:
        tensor = shard.whole.tensors[local.tensor]
        begin = shard.whole.entry.data_start + tensor.begin
        span = span_of(local.box, tensor.shape, DTYPE_BITS[tensor.dtype], begin)
        sink = (_Runs if span.counts else _Run)(span, target)
        read = local.bytes.reader(scratch)
        for at in range(0, span.size, piece):
            data = memoryview(read(at, min(at + piece, span.size)))
            sink.put(at, data)
            if keep is not None:
                keep(local.bytes.name, at, data)
            on_bytes(len(data))
            if stop.is_set():
                return digests
        digests.append(sink.digest())
    return digests


class _Run:
    """A box whose bytes lie in a row: they are digested and copied at once."""

    def __init__(self, span: BoxSpan, target: memoryview) -> None:
        self._begin, self._target = span.begin, target
        self._copier = copier_of(span.size)
        self.digest = self._copier.digest

    def put(self, offset: int, data: memoryview) -> None:
        begin = self._begin + offset
        with self._target[begin : begin + len(data)] as place:
            self._copier.update(data, place)


class _Runs:
    """Any other box."""

    def __init__(self, span: BoxSpan, target: memoryview) -> None:
        self._span, self._target = span, target
        self._digester = TensorDigester()
        self.digest = self._digester.digest

    def put(self, offset: int, data: memoryview) -> None:
        self._digester.update(data)
        self._span.put(self._target, offset, data)
