"""What is written into live parameters, and whether they hold it before an engine generates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

__all__ = ["TrainerBox", "WrittenBox", "copy_boxes", "find_unequal", "overlap"]

#: Of what is compared at a time: casts, and copies from another GPU, need that much memory.
_PIECE_BYTES = 128 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TrainerBox(NamedTuple):
    """A part of a trainer's tensor.

    Attributes:
        name: Of the tensor.
        offsets: Where the part begins in the whole tensor, elements.
        values: The part.
    """

    name: str
    offsets: Sequence[int]
    values: torch.Tensor


class WrittenBox(NamedTuple):
    """A part of a rank's memory, and what was written there.

    Attributes:
        name: Of the tensor.
        live: The rank's memory.
        source: The trainer's; of the same shape, in any dtype, on any device.
    """

    name: str
    live: torch.Tensor
    source: torch.Tensor


def overlap(
    offsets: Sequence[int], lengths: Sequence[int], others: Sequence[int], sizes: Sequence[int]
) -> tuple[slice, ...] | None:
    """Return which part of a box lies in another one; None: none does.

    Args:
        offsets: Where the box begins, elements.
        lengths: How far it goes.
        others: Where the other one begins.
        sizes: How far that goes.
    """
    both = []
    for offset, length, other, size in zip(offsets, lengths, others, sizes, strict=True):
        begin, end = max(offset, other), min(offset + length, other + size)
        if begin >= end:
            return None
        both.append(slice(begin - offset, end - offset))
    return tuple(both)


def copy_boxes(boxes: Iterable[WrittenBox]) -> None:
    """Have live parameters hold what is written into them, cast to what they are."""
    with torch.no_grad():
        for _, live, source in boxes:
            live.copy_(_near(source, live))


def _near(source: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Return a tensor where a kernel that writes live memory reaches both.

    What was opened of another process is mapped for its own GPU alone, and PyTorch would have the
    GPU that a tensor comes from write what it casts, or what has gaps.
    """
    return source.to(live.device) if source.is_cuda and live.is_cuda else source


def find_unequal(boxes: Iterable[WrittenBox]) -> list[str]:
    """Return the tensors that are not, bit for bit, what the trainer's are, cast to what is live.

    What came from another GPU is read back to that one, so that what a copy between them damages is
    found. Devices are waited for once, at the end.
    """
    flags: dict[torch.device, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    with torch.no_grad():
        for name, live, source in boxes:
            where = source.device if source.is_cuda else live.device
            for one, two in _pieces(live, source):
                cast = two.dtype is not one.dtype
                differs = _differ(one.to(where), two.to(one.dtype).to(where), cast=cast)
                flags[where].append((name, differs))
    found: dict[str, None] = {}
    for pairs in flags.values():
        answers = torch.stack([flag for _, flag in pairs]).tolist()
        found |= {name: None for (name, _), answer in zip(pairs, answers, strict=True) if answer}
    return list(found)


def _pieces(
    live: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if not live.ndim or live.nbytes <= _PIECE_BYTES:
        yield live, source
        return
    rows = max(1, _PIECE_BYTES * len(live) // live.nbytes)
    yield from zip(torch.split(live, rows), torch.split(source, rows), strict=True)


def _differ(one: torch.Tensor, two: torch.Tensor, *, cast: bool) -> torch.Tensor:
    """Return a truth value that lies where both lie; of -0, and NaN, as of all others."""
    wide = not cast and _is_wide(one) and _is_wide(two)
    left, right = (_integers(tensor, wide=wide) for tensor in (one, two))
    differing = left.ne(right)
    if cast:
        # Which NaN a cast makes is not the same in all of PyTorch's loops.
        differing &= ~(one.float().isnan() & two.float().isnan())
    return differing.any()


def _is_wide(tensor: torch.Tensor) -> bool:
    """Return whether it can be compared 8 bytes at a time, which takes the fewest truth values."""
    begin = tensor.storage_offset() * tensor.itemsize
    return tensor.is_contiguous() and not (tensor.nbytes % 8 or begin % 8 or tensor.data_ptr() % 8)


def _integers(tensor: torch.Tensor, *, wide: bool) -> torch.Tensor:
    if wide:
        return tensor.reshape(-1).view(torch.int64)
    return tensor.view(_INTEGERS[tensor.itemsize])
