"""Memory as rows of bytes: cut alike on both sides, digested row by row, and exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.vllm.apply.writes import write_each
from weightsync.vllm.plan.int_views import tensor_digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.vllm.apply.device_ops import DeviceOps, Stop
    from weightsync.vllm.apply.parallel import SliceThreads

__all__ = ["HostExchange", "row_digests", "rows_of"]

#: Bytes of a row: what one thread, or one block of threads of a device, digests.
_ROW = 64 << 20
#: Bytes that are exchanged at a time: both sides stay in a cache of the processor.
_PIECE = 256 << 10


def rows_of(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return pieces of memory cut into rows, in order.

    Args:
        memory: One row of bytes each.
    """
    return [row for piece in memory for row in torch.split(piece, _ROW)]


def row_digests(
    ops: DeviceOps,
    rows: Sequence[torch.Tensor],
    threads: SliceThreads,
    stop: Stop | None = None,
) -> list[bytes]:
    """Return the xxh3-128 of every row, by the device as far as it can.

    Args:
        ops: Of the rank.
        rows: Of bytes.
        threads: Digest the rest.
        stop: Asked now and then, beside generation; None: the engine stands.

    Raises:
        StoppedError: `stop` returned True.
    """
    found = ops.digests(dict(enumerate(rows)), stop)
    rest = [index for index in range(len(rows)) if index not in found]

    def digest(at: int) -> None:
        found[rest[at]] = tensor_digest_of(rows[rest[at]], stop=stop or bool)

    threads.each(digest, [rows[index].nbytes for index in rest])
    return [found[index] for index in range(len(rows))]


class HostExchange:
    """See `Exchange`.

    Args:
        pairs: Rows of bytes in the host's memory.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = [(left.numpy(), right.numpy()) for left, right in pairs]

    def run(self, threads: SliceThreads) -> None:
        """Exchange them, row by row."""

        def swap(index: int) -> None:
            left, right = self._pairs[index]
            spare = np.empty(min(_PIECE, left.size), dtype=np.uint8)
            for at in range(0, left.size, _PIECE):
                one, other = left[at : at + _PIECE], right[at : at + _PIECE]
                kept = spare[: one.size]
                kept[:] = one
                one[:] = other
                other[:] = kept

        write_each(threads, swap, [left.nbytes for left, _ in self._pairs])
