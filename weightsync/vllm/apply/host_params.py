"""Which elements of the live parameters a version changes, found in shared memory off the pause.

They are places in this rank's own parameters, fused and sharded as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightsync.delta.kernels import chosen
from weightsync.vllm.apply.device_ops import RankPrepared
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.plan.int_views import StoppedError, array_of, cast, pieces
from weightsync.vllm.plan.load_plan import Slice, Strides

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: Elements that are compared at a time: both sides and the result stay in the cache.
_BLOCK = 1 << 18
#: A slice is copied whole when more than one in so many of its elements changed: with a position of
#: four bytes beside each, writing them one by one then moves as much memory, in worse order.
_DENSE = 3
#: A patch moves less than one in so many of the bytes of a copy, in positions, values and slices
#: that are copied whole; else it is not worth the memory that it takes until the commit.
_WORTH = 2
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class ParamChange:
    """Elements of one parameter: where they lie in its memory, each once, and what they become.

    `positions` are int32 or int64, and `values` the integers of their bytes.
    """

    param: str
    positions: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


@dataclass
class Differences:
    """What changes between two versions, by slice: elements, or in `dense` much of it."""

    changes: dict[int, ParamChange] = field(default_factory=dict)
    dense: set[int] = field(default_factory=set)

    def differs(self, index: int) -> bool:
        return index in self.changes or index in self.dense


class _TooMuchError(Exception):
    """A copy of everything is less work."""


class _Allowance:
    """Bytes that a patch may still move. Several threads take from it."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            self._left -= size
            if self._left < 0:
                raise _TooMuchError


def find_between(
    base: RankPrepared, target: RankPrepared, threads: SliceThreads, stop: Callable[[], bool]
) -> Differences | None:
    """Return what differs between versions of the same plan; None: a copy is less work."""
    slices, digests = target.plan.slices, base.digests
    same = {name for name, digest in target.digests.items() if digest == digests[name]}
    old = [
        None if item.tensor in same else source
        for item, source in zip(slices, base.sources, strict=True)
    ]
    return find_differences(slices, old, target.sources, target.targets.views(), threads, stop)


def find_differences(
    slices: Sequence[Slice],
    old: Sequence[torch.Tensor | None],
    new: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    threads: SliceThreads,
    stop: Callable[[], bool],
) -> Differences | None:
    """Return what changes; None: so much that a copy of everything is less work.

    `old` and `new` have the source of each slice in the live version and in the next one, and
    `places` its live view; None in `old`: it is the same. `stop` is asked before every block; True
    raises `StoppedError`.
    """
    found = Differences()
    allowance = _Allowance(sum(place.nbytes for place in places) // _WORTH)

    def compare(index: int) -> None:
        before, place = old[index], places[index]
        if before is None:
            return
        elements = _changed(before, new[index], place.dtype, stop)
        if elements is None:
            allowance.take(place.nbytes)
            found.dense.add(index)
        elif elements[0].size:
            positions = _positions(elements[0], slices[index].target)
            allowance.take(positions.nbytes + elements[1].nbytes)
            found.changes[index] = ParamChange(
                slices[index].param, torch.from_numpy(positions), torch.from_numpy(elements[1])
            )

    try:
        threads.each(compare, [source.nbytes for source in new])
    except _TooMuchError:
        return None
    return found


_Elements = tuple["NDArray[Any]", "NDArray[Any]"]


def _changed(
    old: torch.Tensor, new: torch.Tensor, dtype: torch.dtype, stop: Callable[[], bool]
) -> _Elements | None:
    """Return row-major positions and integers in `dtype`; None: more than `_DENSE` allows."""
    if new.numel() <= _BLOCK:
        # Most of those of experts, by the thousand.
        if stop():
            raise StoppedError
        at, values = _compared(old, new, dtype)
        return None if at.size * _DENSE > new.numel() else (at.astype(np.int64), values)
    return _changed_in_pieces(old, new, dtype, stop)


def _changed_in_pieces(
    old: torch.Tensor, new: torch.Tensor, dtype: torch.dtype, stop: Callable[[], bool]
) -> _Elements | None:
    positions: list[NDArray[Any]] = [np.empty(0, np.int64)]
    values: list[NDArray[Any]] = []
    seen = count = 0
    for before, after in zip(pieces(old, _BLOCK), pieces(new, _BLOCK), strict=True):
        if stop():
            raise StoppedError
        at, what = _compared(before, after, dtype)
        positions.append(at.astype(np.int64) + seen)
        values.append(what)
        seen, count = seen + after.numel(), count + at.size
        if count * _DENSE > seen:
            return None
    return np.concatenate(positions), np.concatenate(values) if values else positions[0]


def _compared(old: torch.Tensor, new: torch.Tensor, dtype: torch.dtype) -> _Elements:
    # Columns of a tensor are gathered first.
    before, after = (np.ascontiguousarray(array_of(part)).reshape(-1) for part in (old, new))
    at, values = chosen().find(before, after)
    if new.dtype == dtype or not at.size:
        return at, values
    # Where the copy rounds, many a change is lost.
    was, now = (
        array_of(cast(torch.from_numpy(words).view(new.dtype), dtype))
        for words in (before[at], values)
    )
    kept = was != now
    return at[kept], now[kept]


def _positions(at: NDArray[Any], target: Strides) -> NDArray[Any]:
    """Return where row-major elements of a slice lie in its parameter's memory."""
    if target.contiguous:
        positions, last = at + target.offset, target.offset + target.numel
    else:
        index = np.unravel_index(at, target.shape)
        positions = np.full(at.shape, target.offset)
        for part, stride in zip(index, target.stride, strict=True):
            positions += part * stride
        last = int(positions.max())
    return positions.astype(np.int32) if last <= _INT32_MAX else positions
