"""Slices of tensors: the box that each is, and where its bytes lie in a row-major tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


#: Pairs of boxes that are compared at most, and for each box besides; those of a mesh are fewer.
_COMPARED, _COMPARED_EACH = 100_000, 64


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor; `offsets` and `sizes` count elements along each of its dimensions."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.offsets, self.ends))

    def overlaps(self, other: Box) -> bool:
        if not self.elements or not other.elements:
            return False
        sides = zip(self.offsets, self.ends, other.offsets, other.ends, strict=True)
        return all(begin < its_end and its < end for begin, end, its, its_end in sides)

    def __str__(self) -> str:
        sides = zip(self.offsets, self.ends, strict=True)
        return f"[{', '.join(f'{begin}:{end}' for begin, end in sides)}]"


def slice_name(tensor: str, box: Box) -> str:
    """Return the name of a slice of a tensor, which no other slice of a version has."""
    return f"{tensor}@{','.join(map(str, box.offsets))}"


def problem_of(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return why boxes do not cover each element of a tensor exactly once; "": they do."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"{box} has another number of dimensions than {list(shape)}"
        if min((*box.offsets, *box.sizes), default=0) < 0 or any(
            end > size for end, size in zip(box.ends, shape, strict=True)
        ):
            return f"{box} reaches beyond {list(shape)}"
    try:
        twice = _overlap(boxes)
    except _TooManyError:
        return f"{len(boxes)} boxes overlap in one dimension, too many to compare; join some"
    if twice is not None:
        return f"{twice[0]} and {twice[1]} overlap"
    missing = math.prod(shape) - sum(box.elements for box in boxes)
    return f"{missing} of {math.prod(shape)} elements are in none" if missing else ""


class _TooManyError(Exception):
    """Boxes that would take minutes to compare."""


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two that overlap: along the dimension that parts most of them, few are compared."""
    full = [box for box in boxes if box.elements]
    if len(full) < 2:
        return None
    if not full[0].sizes:
        return full[0], full[1]
    along = max(range(len(full[0].sizes)), key=lambda d: len({box.offsets[d] for box in full}))
    reaching: list[Box] = []
    left = _COMPARED + _COMPARED_EACH * len(full)
    for box in sorted(full, key=lambda box: box.offsets[along]):
        left -= len(reaching)
        if left < 0:
            raise _TooManyError
        reaching = [other for other in reaching if other.ends[along] > box.offsets[along]]
        found = next(filter(box.overlaps, reaching), None)
        if found is not None:
            return found, box
        reaching.append(box)
    return None


#: Bytes of a slice that are copied together at a time.
_PIECE = 4 << 20


class SliceSpan(NamedTuple):
    """Runs of bytes, all of one length, in the order in which a slice has them.

    `begin` is the first byte of the first run, and `run` the bytes of each. `counts` has the number
    of runs along each dimension, the outermost first, and is empty if there is one run; `strides`
    has the bytes from one run to the next along each of these dimensions.
    """

    begin: int
    run: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.run * math.prod(self.counts)

    def put(self, view: memoryview, offset: int, data: memoryview | bytes) -> None:
        """Write bytes of the slice where they belong in `view`, in which `begin` counts.

        `offset` is where `data` begins in the slice.
        """
        # Not at the top: who has no slices needs no NumPy.
        import numpy as np

        source = np.frombuffer(data, np.uint8)
        for at, rows, skipped, length in self._parts(offset, offset + len(source)):
            target = self._rows(view, at, rows)[:, skipped : skipped + length]
            target[...] = source[: rows * length].reshape(rows, length)
            source = source[rows * length :]

    def pieces(self, view: memoryview) -> Iterator[memoryview]:
        """Yield the slice's bytes in order, in pieces of bounded size; `begin` counts in `view`."""
        import numpy as np

        step = _PIECE if not 0 < self.run <= _PIECE else _PIECE // self.run * self.run
        for begin in range(0, self.size, step):
            for at, rows, skipped, length in self._parts(begin, min(begin + step, self.size)):
                part = self._rows(view, at, rows)[:, skipped : skipped + length]
                yield np.ascontiguousarray(part).reshape(-1).data

    @property
    def block_count(self) -> int:
        return math.prod(self.counts[:-1])

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield runs that are one stride apart, together.

        Each is the first byte in the slice, the same byte as `begin` counts, and the number of
        runs.
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
        """Yield, for bytes of the slice: where runs begin, how many, and the part of each."""
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


def span_of(box: Box, shape: Sequence[int], bits: int, begin: int) -> SliceSpan:
    """Return where the bytes of a slice lie.

    `bits` is the size of an element, `begin` the first byte of the tensor. Raises ValueError when
    the slice begins or ends within a byte.
    """
    steps = [math.prod(shape[at + 1 :]) * bits for at in range(len(shape))]
    first = len(shape)
    while first and box.sizes[first - 1] == shape[first - 1]:
        first -= 1
    # The dimension before those that the slice has whole is whole in each run, as far as it goes.
    run = math.prod(box.sizes[max(first - 1, 0) :]) * bits
    outer = [at for at in range(max(first - 1, 0)) if box.sizes[at] != 1]
    start = sum(offset * step for offset, step in zip(box.offsets, steps, strict=True))
    strides = [steps[at] for at in outer]
    if not box.elements:
        return SliceSpan(begin, 0, (), ())
    if any(number % 8 for number in (run, start, *strides)):
        raise ValueError(f"{box} begins or ends within a byte")
    counts = tuple(box.sizes[at] for at in outer)
    return SliceSpan(begin + start // 8, run // 8, counts, tuple(step // 8 for step in strides))
