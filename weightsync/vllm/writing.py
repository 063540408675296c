"""Writes into live memory, and looks at it again: whole slices, and single elements."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from weightsync import failpoints
from weightsync.delta import elements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightsync.vllm.crew import Crew

__all__ = ["differ", "put", "write_each"]


def write_each(crew: Crew, write: Callable[[int], None], sizes: Sequence[int]) -> None:
    """Call `write(index)` for everything that a commit writes; returns when all is written.

    Args:
        crew: Does the work.
        write: Releases the GIL while it writes.
        sizes: Bytes of each write.
    """
    turns, half = itertools.count(), len(sizes) // 2

    def one(index: int) -> None:
        if next(turns) == half:
            failpoints.hit("worker.half")
        write(index)

    crew.each(one, sizes)


def put(memory: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write elements into memory.

    Args:
        memory: One row of integers, on any device.
        positions: Where, each once; on the same device.
        values: What.
    """
    if memory.device.type == "cpu":
        elements.put(memory.numpy(), positions.numpy(), values.numpy())
    else:
        memory.index_copy_(0, positions.long(), values)


def differ(memory: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return, in a tensor without dimensions, whether any element is not the one that `put` wrote.

    Args:
        memory: One row of integers, on any device.
        positions: Where to look; on the same device.
        values: What must be there.
    """
    if memory.device.type == "cpu":
        held = elements.holds(memory.numpy(), positions.numpy(), values.numpy())
        return torch.tensor(not held)
    return memory.index_select(0, positions).ne(values).any()
