"""What a delta would take, judged by small pieces of all tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weightsync.delta import Item, encode_shard
from weightsync.delta.coding import element_width
from weightsync_client.source.tensors import Scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync_client.snapshot.snapshot import Snapshot
    from weightsync_client.source.tensors import SourceTensor

__all__ = ["Sample", "sampled"]

#: Pieces, and bytes of each: together some 4 MB, encoded within milliseconds.
_PIECES, _PIECE_BYTES = 64, 64 << 10
#: Of fewer bytes nothing is gained by knowing before.
_LEAST_BYTES = 16 << 20
_NO_DIGEST = "0" * 32


class Sample(NamedTuple):
    """What was seen in the pieces.

    Attributes:
        ratio: Bytes of a delta over those of all tensors.
        changed: Share of the elements that changed.
    """

    ratio: float
    changed: float


def _places(tensors: Sequence[SourceTensor], total: int) -> Iterator[tuple[SourceTensor, int]]:
    """Yield tensors and offsets that lie evenly in the sequence of all bytes."""
    step, wanted, passed = total // _PIECES, 0, 0
    for tensor in tensors:
        while wanted < passed + tensor.size:
            yield tensor, wanted - passed
            wanted += step
        passed += tensor.size


def sampled(tensors: Sequence[SourceTensor], base: Snapshot, *, zstd: bool) -> Sample:
    """Return how a delta would come out, roughly; zeros for what is small anyway."""
    total = sum(tensor.size for tensor in tensors)
    if total < _LEAST_BYTES:
        return Sample(0.0, 0.0)
    items, scratch, opened, elements = [], Scratch(), None, 0
    for number, (tensor, offset) in enumerate(_places(tensors, total)):
        if opened is None or opened[0] is not tensor:
            opened = tensor, tensor.reader(scratch)
        width = element_width(tensor.dtype)
        begin = min(offset, max(0, tensor.size - _PIECE_BYTES)) // width * width
        end = min(begin + _PIECE_BYTES, tensor.size)
        before = base.tensors[tensor.name].window(begin, end)
        after = np.frombuffer(opened[1](begin, end), np.uint8)
        # Pieces in bytes: shapes do not matter, and dtypes below a byte have none of their own.
        dtype = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}[width]
        elements += len(after) // width
        items.append(Item(str(number), dtype, (len(after) // width,), before, after, b"\0" * 16))
    shard = encode_shard(
        items, zstd=zstd, base_content_digest=_NO_DIGEST, layout_digest=_NO_DIGEST, index=0
    )
    streams = sum(stats.stored_bytes for stats in shard.stats)
    dense = sum(stats.dense_bytes for stats in shard.stats)
    return Sample(streams / dense, sum(stats.nnz for stats in shard.stats) / elements)
