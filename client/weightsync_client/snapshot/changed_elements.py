"""Which elements of tensors on a device differ: found there, for many tensors at a time.

A host that asks a device something waits for its turn there, and beside an engine that generates
on the same device a turn takes milliseconds. So it is asked for many at once: how many elements
differ, for all of a width, and which, for some million changes at a time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from weightsync.gpu.finder import KernelFinder
from weightsync.gpu.spans import fits
from weightsync.gpu.torch_finder import TorchFinder
from weightsync_client.source.tensors import settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.gpu.finder import Finder, Pair

__all__ = ["ChangedElements", "find_changed", "on_host"]

#: Elements of a piece, which is looked at as a whole; a multiple of 16.
_PIECE = 1 << 26
#: Elements that are taken at a time, unless one piece has more that differ: positions take eight
#: bytes before they are narrowed.
_AT_ONCE = 1 << 24
#: Up to so many bytes come through pinned memory, which PyTorch keeps for the next time.
_PINNED = 256 << 20


@dataclass(frozen=True, slots=True)
class ChangedElements:
    """What differs between a tensor before and after, on its device.

    Attributes:
        index: Positions, strictly increasing: int32 where that suffices, else int64.
        before: The words there before.
        after: The words there after.
    """

    index: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


def find_changed(
    kernels: Kernels | None, pairs: Sequence[Pair]
) -> tuple[list[ChangedElements], list[torch.Tensor]]:
    """Return what differs in each of several tensors of one device.

    Args:
        kernels: Of their device; None: PyTorch's are used.
        pairs: Words before and after, flat, of the same dtype and length.

    Returns:
        That, and integers on the device, one of which is other than 0 if a tensor was written
        meanwhile. Then the rest means nothing, but no position lies outside.

    Raises:
        torch.OutOfMemoryError: The device has no room for what was found.
        KernelError: The driver refused one of our kernels.
    """
    # Those of a width, which our kernels take together; at 0 all that PyTorch looks at.
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for number, (old, new) in sorted(enumerate(pairs), key=lambda each: each[1][0].element_size()):
        own = kernels is not None and fits(old, new)
        groups[old.element_size() if own else 0].append(number)
    found: dict[int, ChangedElements] = {}
    flags = []
    for width, numbers in groups.items():
        group = _Group(kernels if width else None, [pairs[number] for number in numbers])
        flags += group.take()
        found |= zip(numbers, group.found(), strict=True)
    return [found[number] for number in range(len(pairs))], flags


class _Group:
    """Pairs that one finder looks at, counted already.

    Args:
        kernels: Those that look, at pairs of one width; None: PyTorch's, at any.
        pairs: Those of a width in a row.
    """

    def __init__(self, kernels: Kernels | None, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        pieces = [
            (owner, (old[at : at + _PIECE], new[at : at + _PIECE]))
            for owner, (old, new) in enumerate(pairs)
            for at in range(0, len(old), _PIECE)
        ]
        #: Of each piece, the pair that it is a part of, and how many elements differ.
        self._owners = [owner for owner, _ in pieces]
        self._finder = _finder(kernels, [pair for _, pair in pieces], pairs[0][0].device)
        self._counts = self._finder.count(_go_on)
        sizes = [0] * len(pairs)
        for owner, count in zip(self._owners, self._counts, strict=True):
            sizes[owner] += count
        self._index = [_positions(old, size) for (old, _), size in zip(pairs, sizes, strict=True)]
        self._after = [new.new_empty(size) for (_, new), size in zip(pairs, sizes, strict=True)]

    def take(self) -> list[torch.Tensor]:
        """Fill in what differs; return flags that tell whether a pair was written meanwhile."""
        filled = [0] * len(self._pairs)
        return [self._take(batch, filled) for batch in self._batches()]

    def found(self) -> list[ChangedElements]:
        """Return what differs in each pair."""
        return [
            ChangedElements(index, old.index_select(0, index), after)
            for (old, _), index, after in zip(self._pairs, self._index, self._after, strict=True)
        ]

    def _batches(self) -> Iterator[list[int]]:
        """Yield the numbers of the pieces that are taken together."""
        batch: list[int] = []
        size = 0
        for number, count in enumerate(self._counts):
            if not count:
                continue
            if batch and (size + count > _AT_ONCE or self._words(number) != self._words(batch[0])):
                yield batch
                batch, size = [], 0
            batch.append(number)
            size += count
        if batch:
            yield batch

    def _words(self, number: int) -> torch.dtype:
        return self._pairs[self._owners[number]][0].dtype

    def _take(self, batch: Sequence[int], filled: list[int]) -> torch.Tensor:
        chosen = [False] * len(self._counts)
        for number in batch:
            chosen[number] = True
        ends = list(accumulate(self._counts[number] for number in batch))
        like = self._pairs[self._owners[batch[0]]][1]
        positions = torch.empty(ends[-1], dtype=torch.int64, device=like.device)
        after = like.new_empty(ends[-1])
        # Positions count from address 0, as pairs lie anywhere.
        changed = self._finder.take(chosen, 0, positions, after, _go_on)
        for number, end in zip(batch, ends, strict=True):
            owner, count = self._owners[number], self._counts[number]
            old, begin = self._pairs[owner][0], filled[owner]
            filled[owner] = begin + count
            places = positions[end - count : end].sub_(old.data_ptr() // old.element_size())
            # Should fewer differ by now, there are places that nobody has filled in.
            self._index[owner][begin : begin + count] = places.clamp_(0, len(old) - 1)
            self._after[owner][begin : begin + count] = after[end - count : end]
        return changed


def _finder(kernels: Kernels | None, pieces: Sequence[Pair], device: torch.device) -> Finder:
    if kernels is not None:
        return KernelFinder(kernels, pieces)
    longest = max((len(old) for old, _ in pieces), default=0)
    return TorchFinder(pieces, torch.empty(longest, dtype=torch.bool, device=device))


def _positions(old: torch.Tensor, size: int) -> torch.Tensor:
    """Return memory for so many positions in a tensor."""
    dtype = torch.int32 if len(old) < 1 << 31 else torch.int64
    return torch.empty(size, dtype=dtype, device=old.device)


def _go_on(_: int) -> None:
    """Nothing in a trainer waits between two pieces."""


def on_host(tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Return flat tensors of one device on the host, by one copy for which is waited once."""
    # The widest first, so that all lie aligned.
    order = sorted(range(len(tensors)), key=lambda at: -tensors[at].element_size())
    packed = torch.cat([tensors[at].view(torch.uint8) for at in order])
    host = packed.to("cpu", non_blocking=len(packed) <= _PINNED)
    settle(packed.device)
    found, at = {}, 0
    for number in order:
        size = tensors[number].nbytes
        found[number] = host[at : at + size].view(tensors[number].dtype).numpy()
        at += size
    return [found[number] for number in range(len(tensors))]
