"""Writes into live memory, and looks at it again: whole slices, and single elements."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from weightsync import failpoints
from weightsync.delta.kernels import chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from weightsync.vllm.apply.parallel import SliceThreads

__all__ = ["Writer", "begin_patch", "differ", "put", "write_each"]


class Writer(Protocol):
    """What writes a version into the live parameters, and proves that it is there."""

    @property
    def nbytes(self) -> int:
        """Bytes that a commit writes."""

    @property
    def patched(self) -> bool:
        """Whether only what changes is written."""

    @property
    def compared_all(self) -> bool:
        """Whether the proof compares every live byte with what the server received."""

    def write(self, threads: SliceThreads) -> None:
        """Write; on a device it may still be under way when this returns."""

    def verify(self, threads: SliceThreads) -> list[str]:
        """Look at what was written; return the parameters that do not hold it."""


def begin_patch() -> None:
    """Take note that the first of single elements is about to be written."""
    failpoints.hit("worker.patch")


def write_each(threads: SliceThreads, write: Callable[[int], None], sizes: Sequence[int]) -> None:
    """Call `write(index)` for everything that a commit writes; returns when all is written.

    Args:
        threads: Does the work.
        write: Releases the GIL while it writes.
        sizes: Bytes of each write.
    """
    turns, half = itertools.count(), len(sizes) // 2

    def one(index: int) -> None:
        if next(turns) == half:
            failpoints.hit("worker.half")
        write(index)

    threads.each(one, sizes)


def put(memory: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write elements into the host's memory.

    Args:
        memory: One row of integers.
        positions: Where, each once.
        values: What.
    """
    chosen().put(memory.numpy(), positions.numpy(), values.numpy())


def differ(memory: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether any element is not the one that `put` wrote.

    Args:
        memory: One row of integers.
        positions: Where to look.
        values: What must be there.
    """
    return not chosen().holds(memory.numpy(), positions.numpy(), values.numpy())
