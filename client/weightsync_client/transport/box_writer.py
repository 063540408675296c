"""A process's boxes of one shard are written where they belong in memory of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.model.box_spans import span_of
from weightsync.model.digest import TensorDigester
from weightsync.model.dtypes import DTYPE_BITS
from weightsync_client.transport.copying import copier_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from weightsync.model.box_spans import BoxSpan
    from weightsync_client.source.box_shards import BoxShard, LocalBox
    from weightsync_client.source.tensors import Scratch

__all__ = ["write_boxes"]


def write_boxes(
    shard: BoxShard,
    target: memoryview,
    scratch: Scratch,
    piece: int,
    stop: threading.Event,
    on_bytes: Callable[[int], None],
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
    """
    digests: list[bytes] = []
    for local in shard.sent:
        tensor = shard.whole.tensors[local.tensor]
        begin = shard.whole.entry.data_start + tensor.begin
        span = span_of(local.box, tensor.shape, DTYPE_BITS[tensor.dtype], begin)
        write = _write_run if not span.counts else _write_runs
        for size in write(local, span, target, scratch, piece, digests):
            on_bytes(size)
            if stop.is_set():
                return digests
    return digests


def _write_run(
    local: LocalBox,
    span: BoxSpan,
    target: memoryview,
    scratch: Scratch,
    piece: int,
    digests: list[bytes],
) -> Iterator[int]:
    read, copier = local.bytes.reader(scratch), copier_of(span.size)
    for begin in range(0, span.size, piece):
        end = min(begin + piece, span.size)
        with target[span.begin + begin : span.begin + end] as place:
            copier.update(memoryview(read(begin, end)), place)
        yield end - begin
    digests.append(copier.digest())


def _write_runs(
    local: LocalBox,
    span: BoxSpan,
    target: memoryview,
    scratch: Scratch,
    piece: int,
    digests: list[bytes],
) -> Iterator[int]:
    read, digester = local.bytes.reader(scratch), TensorDigester()
    for begin in range(0, span.size, piece):
        data = read(begin, min(begin + piece, span.size))
        digester.update(data)
        span.put(target, begin, data)
        yield len(data)
    digests.append(digester.digest())
