"""Where elements of a DTensor lie that is sharded in strides: several runs of a dimension."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.tensor import Placement

__all__ = ["is_strided", "local_runs"]


def is_strided(placements: Sequence[Placement]) -> bool:
    """Return whether one of the placements takes elements that do not lie in a row.

    FSDP2 over tensor parallel has such a one, and the placement after it makes a row of them.
    """
    return any(hasattr(placement, "split_factor") for placement in placements)


def local_runs(
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Yield the parts of a local tensor whose elements lie in a row along each dimension.

    Args:
        shape: Of the full tensor, in elements.
        placements: Of the DTensor, one for each dimension of its mesh.
        sizes: Of the mesh.
        coordinate: Of this process in the mesh.

    Yields:
        Where a part lies in the local tensor, and the offsets of its first element in the full one.
    """
    along = [
        _runs(dimension, size, placements, sizes, coordinate)
        for dimension, size in enumerate(shape)
    ]
    for runs in itertools.product(*along):
        yield tuple(where for where, _ in runs), tuple(first for _, first in runs)


def _runs(
    dimension: int,
    size: int,
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> list[tuple[slice, int]]:
    import torch

    indices = torch.arange(size).reshape([1] * dimension + [size])
    for placement, count, at in zip(placements, sizes, coordinate, strict=True):
        if getattr(placement, "dim", None) == dimension:
            # PyTorch's own rule of what a placement gives to whom; it has no public name.
            parts, _ = placement._split_tensor(  # type: ignore[attr-defined]  # noqa: SLF001
                indices, count, with_padding=False, contiguous=False
            )
            indices = parts[at]
    indices = indices.flatten()
    # Wherever the next element is not the next index, a run begins.
    breaks = (indices.diff() != 1).nonzero().reshape(-1).add(1).tolist()
    bounds = itertools.pairwise([0, *breaks, len(indices)])
    return [(slice(begin, end), int(indices[begin])) for begin, end in bounds if end > begin]
