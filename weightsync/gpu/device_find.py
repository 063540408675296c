"""Which elements of pairs of tensors on a device differ: by our kernels, or by PyTorch's.

Each side is read twice and nothing is stored in between. Counts are processed on the device: beside
an engine, a host that asks a device waits for its turn there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from weightsync.gpu.device_kernels import SPAN, THREADS, Kernels, Launch, cut

#: Integers before and after, of one shape and width.
Pair = tuple[torch.Tensor, torch.Tensor]
#: Called with the bytes that were queued last; it may wait for them, and raise to end the work.
Step = Callable[[int], None]

#: Spans of a launch: what else runs on an H200 waits for 0.2 ms of it.
_AT_ONCE = (256 << 20) // SPAN


class Finder(Protocol):
    """Looks at pairs whose elements have one width."""

    def count(self, step: Step) -> list[int]:
        """Return how many elements of each pair differ; `step` is called after each piece."""

    def take(
        self,
        chosen: Sequence[bool],
        row: int,
        positions: torch.Tensor,
        after: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Fill in the elements that `count`, called before, found in the `chosen` pairs.

        These pairs are contiguous. `positions` (int64, one for each element that differs) takes
        where the elements lie, in elements from the address `row`, pair after pair and ascending in
        each; `after` takes their new values. `step` is called after each piece of work.

        Returns an integer on the device: not 0 if a pair was written since it was counted. Then
        what was filled in means nothing.
        """


class KernelFinder:
    """Looks at many pairs, at least one, with each launch; `fits` has accepted each."""

    def __init__(self, kernels: Kernels, pairs: Sequence[Pair]) -> None:
        device = pairs[0][0].device
        # The flag of a row tells of which pair it is a part.
        rows = [cut(number, *pair) for number, pair in enumerate(pairs)]
        self._kernels = kernels
        self._pairs = pairs
        self._bits = 8 * pairs[0][0].element_size()
        self._table = torch.from_numpy(np.concatenate(rows)).to(device)
        #: Of each row of the table, the pair that it is a part of, and how many elements differ.
        self._owners = self._table[:, 2] >> 32
        self._counts = torch.empty(len(self._table), dtype=torch.int32, device=device)

    def count(self, step: Step) -> list[int]:
        for part in _parts(len(self._table)):
            self._queue("count_changes", part, [self._table[part], self._counts[part]], step)
        found = torch.zeros(len(self._pairs), dtype=torch.int64, device=self._table.device)
        counts: list[int] = found.index_add_(0, self._owners, self._counts.long()).tolist()
        return counts

    def take(
        self,
        chosen: Sequence[bool],
        row: int,
        positions: torch.Tensor,
        after: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        device = self._table.device
        wanted = torch.tensor(chosen, device=device)[self._owners] & (self._counts > 0)
        # Waits for the device, which knows how many there are.
        wanted = wanted.nonzero().reshape(-1)
        table, counts = self._table[wanted], self._counts[wanted]
        borders = torch.zeros(len(table) + 1, dtype=torch.int64, device=device)
        torch.cumsum(counts, 0, dtype=torch.int64, out=borders[1:])
        changed = torch.zeros(1, dtype=torch.int32, device=device)
        for part in _parts(len(table)):
            own = borders[part.start : part.stop + 1]
            arguments = (table[part], own, row, positions, after, changed)
            self._queue("take_changes", part, arguments, step)
        return changed

    def _queue(
        self, name: str, part: slice, arguments: Sequence[torch.Tensor | int], step: Step
    ) -> None:
        count = part.stop - part.start
        Launch(self._kernels, f"{name}_{self._bits}", (count, THREADS), arguments).queue()
        step(count * SPAN)


def _parts(count: int) -> Iterator[slice]:
    for begin in range(0, count, _AT_ONCE):
        yield slice(begin, min(begin + _AT_ONCE, count))


class TorchFinder:
    """Looks at one pair after the other; see `Finder`.

    `pairs` may have any strides, but those taken are contiguous rows. `mask`, of truth values, is
    scratch on their device.
    """

    def __init__(self, pairs: Sequence[Pair], mask: torch.Tensor) -> None:
        self._pairs = pairs
        self._mask = mask
        self._counts: list[int] = []

    def count(self, step: Step) -> list[int]:
        counts = []
        for pair in self._pairs:
            counts.append(self._unequal(pair).sum())
            step(pair[0].nbytes)
        self._counts = torch.stack(counts).tolist() if counts else []
        return self._counts

    def take(
        self,
        chosen: Sequence[bool],
        row: int,
        positions: torch.Tensor,
        after: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        changed = torch.zeros(1, dtype=torch.int32, device=positions.device)
        begin = 0
        for pair, count, wanted in zip(self._pairs, self._counts, chosen, strict=True):
            if not wanted:
                continue
            marks = self._unequal(pair)
            changed |= marks.sum() != count
            places = _places(marks, count)
            end = begin + count
            torch.index_select(pair[1], 0, places, out=after[begin:end])
            first = (pair[0].data_ptr() - row) // pair[0].element_size()
            torch.add(places, first, out=positions[begin:end])
            step(pair[0].nbytes)
            begin = end
        return changed

    def _unequal(self, pair: Pair) -> torch.Tensor:
        left, right = pair
        if left.dim() == 1 and left.numel() <= self._mask.numel():
            return torch.ne(left, right, out=self._mask[: left.numel()])
        return left.ne(right)


def _places(marks: torch.Tensor, count: int) -> torch.Tensor:
    """Return where `count` marks lie, without asking the device where PyTorch can do that.

    Position 0 stands for those that are missing by now.
    """
    try:
        return torch.nonzero_static(marks, size=count, fill_value=0).reshape(-1)
    except NotImplementedError:
        found = marks.nonzero().reshape(-1)[:count]
        return torch.cat([found, found.new_zeros(count - len(found))])
