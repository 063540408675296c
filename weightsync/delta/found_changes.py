"""A tensor's change that was found elsewhere, on a device, coded as the encoder would have.

The streams are those that are made of the same bytes with the same coding, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from weightsync.delta.coding import SKIP, Coding, Positions, element_width, total_bytes
from weightsync.delta.delta_errors import DeltaError
from weightsync.delta.kernels import chosen
from weightsync.delta.kernels.shapes import Coded
from weightsync.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from weightsync.delta.kernels.shapes import Bytes, Indices, Words

__all__ = ["Changes", "coded_changes"]

#: Elements whose bits of a bitmap are made at a time; a multiple of 8.
_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between a tensor before and after.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        index: Positions of the elements that differ, strictly increasing.
        before: Their values before, as unsigned integers of the element's width.
        after: Their values after.
        new_digest: Gives xxh3-128 of all bytes after; asked for if something changed.
        same_digest: Gives the same if nothing did.
        all_bytes: Gives all bytes after, for a tensor that is smaller when it is dense.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    index: Indices
    before: Words
    after: Words
    new_digest: Callable[[], bytes]
    same_digest: Callable[[], bytes]
    all_bytes: Callable[[], NDArray[np.uint8]]

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return total_bytes(self.dtype, self.shape)

    def check(self) -> None:
        """Prove what can be proved without the tensor.

        Raises:
            DeltaError: REQUEST_INVALID.
        """
        width = element_width(self.dtype)
        elements = self.size // width
        good = (
            self.index.ndim == 1
            and len(self.index) == len(self.before) == len(self.after)
            and self.before.dtype == self.after.dtype == np.dtype(f"<u{width}")
            and bool(np.all(self.index[:1] >= 0) and np.all(self.index[-1:] < elements))
            and bool(np.all(self.index[1:] > self.index[:-1]))
            and not bool(np.any(self.before == self.after))
        )
        if not good:
            raise DeltaError(
                Reason.REQUEST_INVALID,
                f"the changes of {self.name[:100]!a} are no ascending positions within it, each "
                f"with a value of {width} bytes before and another one after",
            )


def coded_changes(changes: Changes, coding: Coding) -> Coded:
    """Return the planes of changes; see `kernels.plain.encode`. There is one change at least."""
    width = element_width(changes.dtype)
    before, after = (
        np.ascontiguousarray(each).view(np.uint8) for each in (changes.before, changes.after)
    )
    # Side by side, all of them differ: their planes of values are those of the whole tensor.
    coded = chosen().encode(before, after, width, Coding(Positions.BITMAP, coding.values))
    if coding.positions is Positions.BITMAP:
        return Coded(coded.counts, [_bitmap(changes.index, changes.size // width)], coded.values)
    entries = chosen().entries(changes.index, SKIP[coding.positions])
    columns = entries.view(np.uint8).reshape(-1, entries.itemsize)
    planes = [np.ascontiguousarray(columns[:, at]) for at in range(entries.itemsize)]
    counts = replace(coded.counts, skips=len(entries) - len(changes.index))
    return Coded(counts, planes, coded.values)


def _bitmap(index: Indices, elements: int) -> Bytes:
    bitmap = np.empty(-(-elements // 8), np.uint8)
    marks = np.empty(min(_PIECE, elements), bool)
    for at in range(0, elements, _PIECE):
        piece = marks[: min(_PIECE, elements - at)]
        piece[:] = False
        first, last = np.searchsorted(index, (at, at + len(piece)))
        piece[index[first:last] - at] = True
        packed = np.packbits(piece, bitorder="little")
        bitmap[at // 8 : at // 8 + len(packed)] = packed
    return bitmap
