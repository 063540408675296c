"""Two strided views as the same rows of bytes, and both cut alike into small pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PitchedRows", "chunks", "rows_of"]


@dataclass(frozen=True)
class PitchedRows:
    """As many rows of as many bytes on both sides, each so far from the one before.

    Attributes:
        count: Rows.
        width: Bytes of one.
        target_pitch: Bytes from the begin of one to that of the next, where they go.
        source_pitch: The same where they come from.
    """

    count: int
    width: int
    target_pitch: int
    source_pitch: int


def rows_of(target: torch.Tensor, source: torch.Tensor) -> PitchedRows | None:
    """Return two views of one shape and one width of elements as rows; None: they are no rows."""
    size = source.element_size()
    # From the innermost dimension outwards: [elements, stride of target, stride of source].
    found: list[list[int]] = [[1, 1, 1]]
    for dim in reversed(range(source.dim())):
        length = source.shape[dim]
        if length == 1:
            continue
        to, of = target.stride(dim), source.stride(dim)
        inner = found[-1]
        if (to, of) == (inner[0] * inner[1], inner[0] * inner[2]):
            inner[0] *= length
        else:
            found.append([length, to, of])
    (width, _, _), *outer = found
    if len(outer) > 1:
        return None
    ((count, to, of),) = outer or [[1, width, width]]
    if to < width or of < width:
        return None
    return PitchedRows(count, width * size, to * size, of * size)


def chunks(
    target: torch.Tensor, source: torch.Tensor, limit: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both sides cut alike, each piece of at most `limit` bytes of the source.

    Args:
        target: Where it goes.
        source: Where it comes from; of the same shape.
        limit: Bytes that the source's piece spans at most, gaps included.
    """
    if source.numel() == 0:
        return
    if target.is_contiguous() and source.is_contiguous():
        target, source = target.reshape(-1), source.reshape(-1)
    while source.dim() and source.shape[0] == 1:
        target, source = target[0], source[0]
    if not source.dim():
        yield target, source
        return
    span = max(source.numel() // source.shape[0], abs(source.stride(0))) * source.element_size()
    if span > limit and source.dim() > 1:
        for to, of in zip(target, source, strict=True):
            yield from chunks(to, of, limit)
        return
    count = max(1, limit // span)
    yield from zip(torch.split(target, count), torch.split(source, count), strict=True)
