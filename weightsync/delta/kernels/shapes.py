"""What kernels take and return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.delta.coding import Counts

__all__ = [
    "WRONG_BITMAP",
    "WRONG_GAPS",
    "WRONG_PLACES",
    "WRONG_SM",
    "Bytes",
    "Coded",
    "Indices",
    "Words",
]

#: What kernels say is wrong.
WRONG_BITMAP = "its bitmap does not mark as many elements as declared, or marks one beyond the end"
WRONG_GAPS = "its gaps do not mark as many elements as declared, or mark one beyond the end"
WRONG_PLACES = "a position lies outside of the tensor"
WRONG_SM = "its large or wide differences are not as many as declared, or no such"

#: Contiguous bytes.
Bytes = NDArray[np.uint8]
#: Positions of elements, int32 or int64.
Indices = NDArray[Any]
#: Unsigned integers as wide as an element.
Words = NDArray[Any]


class Coded(NamedTuple):
    """The planes of one tensor.

    Attributes:
        counts: What their sizes follow from.
        positions: Planes of the positions.
        values: Planes of the values.
    """

    counts: Counts
    positions: Sequence[Bytes]
    values: Sequence[Bytes]
