"""Where the bytes of a box lie in a tensor that is stored row-major."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from weightsync.model.boxes import Box

__all__ = ["BoxSpan", "span_of"]

#: Bytes of a box that are copied together at a time.
_PIECE = 4 << 20


class BoxSpan(NamedTuple):
    """Runs of bytes, all of one length, in the order in which a box has them.

    Attributes:
        begin: First byte of the first run.
        run: Bytes of each.
        counts: How many runs there are along each dimension, the outermost first; none: there is
            one run.
        strides: Bytes from one run to the next along each of these dimensions.
    """

    begin: int
    run: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the box."""
        return self.run * math.prod(self.counts)

    def put(self, view: memoryview, offset: int, data: memoryview | bytes) -> None:
        """Write bytes of the box where they belong.

        Args:
            view: What `begin` counts in, writable.
            offset: Of the first of the bytes in the box.
            data: They.
        """
        # Not at the top: who has no boxes needs no NumPy.
        import numpy as np

        source = np.frombuffer(data, np.uint8)
        for at, rows, skipped, length in self._parts(offset, offset + len(source)):
            target = self._rows(view, at, rows)[:, skipped : skipped + length]
            target[...] = source[: rows * length].reshape(rows, length)
            source = source[rows * length :]

    def pieces(self, view: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of the box in order, in pieces of bounded size.

        Args:
            view: What `begin` counts in.
        """
        import numpy as np

        step = _PIECE if not 0 < self.run <= _PIECE else _PIECE // self.run * self.run
        for begin in range(0, self.size, step):
            for at, rows, skipped, length in self._parts(begin, min(begin + step, self.size)):
                part = self._rows(view, at, rows)[:, skipped : skipped + length]
                yield np.ascontiguousarray(part).reshape(-1).data

    @property
    def block_count(self) -> int:
        """How many `blocks` there are."""
        return math.prod(self.counts[:-1])

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield runs that are one stride apart, together.

        Of each: the first byte of the first run in the box, the same in what `begin` counts in, and
        how many there are.
        """
        passed = 0
        for at, rows, _, length in self._parts(0, self.size):
            yield passed, at, rows
            passed += rows * length

    def _rows(self, view: memoryview, at: int, rows: int) -> NDArray[np.uint8]:
        import numpy as np

        # One run is no stride away from a next one, which may lie beyond the end.
        stride = self.strides[-1] if rows > 1 else self.run
        return np.ndarray((rows, self.run), np.uint8, view, at, (stride, 1))

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield, for bytes of the box: where runs begin, how many, and the part of each."""
        inner = self.counts[-1] if self.counts else 1
        while begin < end:
            row, skipped = divmod(begin, self.run)
            whole = (end - begin) // self.run
            if skipped or not whole:
                rows, length = 1, min(self.run - skipped, end - begin)
            else:
                rows, length = min(whole, inner - row % inner), self.run
            yield self._begin_of(row), rows, skipped, length
            begin += rows * length

    def _begin_of(self, row: int) -> int:
        at = self.begin
        for count, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            row, index = divmod(row, count)
            at += index * stride
        return at


def span_of(box: Box, shape: Sequence[int], bits: int, begin: int) -> BoxSpan:
    """Return where the bytes of a box lie.

    Args:
        box: In the tensor, with as many dimensions.
        shape: Of the tensor, in elements.
        bits: Of an element.
        begin: First byte of the tensor.

    Raises:
        ValueError: The box begins or ends within a byte.
    """
    steps = [math.prod(shape[at + 1 :]) * bits for at in range(len(shape))]
    first = len(shape)
    while first and box.sizes[first - 1] == shape[first - 1]:
        first -= 1
    # The dimension before those that the box has whole is whole in each run, as far as it goes.
    run = math.prod(box.sizes[max(first - 1, 0) :]) * bits
    outer = [at for at in range(max(first - 1, 0)) if box.sizes[at] != 1]
    start = sum(offset * step for offset, step in zip(box.offsets, steps, strict=True))
    strides = [steps[at] for at in outer]
    if not box.elements:
        return BoxSpan(begin, 0, (), ())
    if any(number % 8 for number in (run, start, *strides)):
        raise ValueError(f"{box} begins or ends within a byte")
    counts = tuple(box.sizes[at] for at in outer)
    return BoxSpan(begin + start // 8, run // 8, counts, tuple(step // 8 for step in strides))
