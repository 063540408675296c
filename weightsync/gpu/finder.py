"""Which elements of pairs of tensors on a device differ: counted first, then taken.

Each side is read twice and nothing is stored in between. What becomes of a count is computed on the
device: beside an engine a host that asks a device waits for its turn there, and takes as long for
the sums as the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from weightsync.gpu.device_kernels import Launch
from weightsync.gpu.spans import SPAN, THREADS, cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync.gpu.device_kernels import Kernels

__all__ = ["Finder", "KernelFinder", "Pair", "Step"]

#: Integers before and after, of one shape and width.
Pair = tuple[torch.Tensor, torch.Tensor]
#: Called with the bytes that were queued last; it may wait for them, and raise to end the work.
Step = Callable[[int], None]

#: Spans of a launch: what else runs on an H200 waits for 0.2 ms of it.
_AT_ONCE = (256 << 20) // SPAN


class Finder(Protocol):
    """Looks at pairs whose elements have one width."""

    def count(self, step: Step) -> list[int]:
        """Return how many elements of each pair differ.

        Args:
            step: Called after each piece of work.
        """

    def take(
        self,
        chosen: Sequence[bool],
        row: int,
        positions: torch.Tensor,
        after: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Fill in what `count`, which was called before, has counted.

        Args:
            chosen: The pairs whose elements are taken; they are contiguous.
            row: An address from which positions count, in elements.
            positions: int64; as many as the chosen ones have that differ. Takes where they lie,
                before, pair after pair and each in ascending order.
            after: As many integers. Takes what they are after.
            step: Called after each piece of work.

        Returns:
            An integer on the device: other than 0 if a pair was written since it was counted.
            Then what was filled in means nothing.
        """


class KernelFinder:
    """Looks at many pairs with each launch of our kernels; see `Finder`.

    Args:
        kernels: Of their device.
        pairs: Which `weightsync.gpu.spans.fits` has accepted; at least one.
    """

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
        """See `Finder`."""
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
        """See `Finder`."""
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
