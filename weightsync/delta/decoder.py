"""The receiver's side: a checked change becomes positions and values, and these patch a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightsync.delta.coding import Broken, DeltaError, Positions, Values, invalid, unpack
from weightsync.delta.kernels import chosen
from weightsync.errors import Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightsync.delta.coding import Bytes, Indices, Words
    from weightsync.delta.delta_shard import Plane, TensorChange


@dataclass(frozen=True, slots=True)
class ElementUpdate:
    """New values of a tensor: harmless to apply twice, and free of the shard's memory.

    Attributes:
        index: Positions of elements, strictly increasing, int32 or for tensors of 2^31 elements and
            more int64; None where `value` is one run of elements.
        value: Their new values as unsigned integers of the element's width.
        start: First element of the run; 0 with an index.
    """

    index: Indices | None
    value: Words
    start: int = 0

    def within(self, start: int, stop: int) -> ElementUpdate:
        """Return the part that touches elements `start` to `stop` only; a view, same positions."""
        if self.index is None:
            first = min(max(start - self.start, 0), len(self.value))
            last = min(max(stop - self.start, first), len(self.value))
            return ElementUpdate(None, self.value[first:last], self.start + first)
        # In the index's own dtype: another one would have it copied.
        most = np.iinfo(self.index.dtype).max
        ends = np.array([min(max(at, 0), most) for at in (start, stop)], self.index.dtype)
        first, last = np.searchsorted(self.index, ends)
        return ElementUpdate(self.index[first:last], self.value[first:last])


def _unpacked(planes: Iterable[Plane]) -> list[Bytes]:
    return [
        unpack(plane.stored, plane.size) if plane.packed else np.frombuffer(plane.stored, np.uint8)
        for plane in planes
    ]


def _positions(change: TensorChange) -> Indices:
    planes = _unpacked(change.positions)
    index = np.empty(change.nnz, np.int32 if change.elements < 1 << 31 else np.int64)
    if change.record.coding.positions is Positions.BITMAP:
        chosen().decode_bitmap(planes[0], change.elements, index)
    else:
        chosen().decode_gaps(planes, change.elements, index)
    return index


def _values(change: TensorChange) -> Words:
    """Return absolute values, or differences where the coding is SM."""
    planes = _unpacked(change.values)
    value = np.empty(change.nnz, f"<u{change.width}")
    if change.record.coding.values is Values.SM:
        chosen().decode_sm(planes, value)
    else:
        chosen().join(planes, value)
    return value


def _dense(change: TensorChange) -> ElementUpdate:
    (plane,) = _unpacked(change.values)
    # A copy: the shard's memory is used again, and a patch may be kept.
    return ElementUpdate(None, plane.copy().view(f"<u{change.width}"))


def _check_size(change: TensorChange, data: NDArray[np.uint8]) -> None:
    flat = data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous
    if not flat or len(data) != change.size:
        raise DeltaError(
            Reason.REQUEST_INVALID,
            f"tensor {change.name[:100]!a} has {change.size} bytes; got {data.dtype} "
            f"{list(data.shape)}",
        )


def decode_tensor(change: TensorChange, base: NDArray[np.uint8]) -> ElementUpdate:
    """Return the new values of a tensor; the base is only read, and only where it changes.

    Takes about 6 bytes per change of a two-byte dtype, and the unpacked planes.

    Args:
        change: From `parse_shard`; its shard's memory must still be there.
        base: All bytes of the tensor in the base version.

    Raises:
        DeltaError: SHARD_INVALID where streams contradict their counts; REQUEST_INVALID where the
            base has another size.
    """
    _check_size(change, base)
    try:
        if change.record.coding.values is Values.DENSE:
            return _dense(change)
        index, value = _positions(change), _values(change)
        if change.record.coding.values is Values.SM:
            chosen().add(base, index, value)
    except Broken as error:
        raise invalid(f"tensor {change.name[:100]!a}: {error}") from None
    return ElementUpdate(index, value)


def apply_change(
    change: TensorChange, target: NDArray[np.uint8]
) -> tuple[ElementUpdate, ElementUpdate]:
    """Patch a tensor that holds the base's bytes, in one pass; nothing is written on an error.

    Args:
        change: From `parse_shard`.
        target: All bytes of the tensor in the base version; become those of the new one.

    Returns:
        The patch that was applied, and the one that undoes it.

    Raises:
        DeltaError: As `decode_tensor`.
    """
    if change.record.coding.values is not Values.SM:
        done = decode_tensor(change, target)
        return done, patch(target, done)
    _check_size(change, target)
    try:
        index, value = _positions(change), _values(change)
    except Broken as error:
        raise invalid(f"tensor {change.name[:100]!a}: {error}") from None
    old = np.empty_like(value)
    chosen().shift(target, index, value, old)
    return ElementUpdate(index, value), ElementUpdate(index, old)


def patch(target: NDArray[np.uint8], change: ElementUpdate) -> ElementUpdate:
    """Write new values into a tensor and return the patch that undoes it.

    Nothing is written where a position lies outside. Applying a patch twice is harmless, but keep
    the first undo record.

    Args:
        target: All bytes of the tensor.
        change: What to write.

    Raises:
        DeltaError: REQUEST_INVALID, for a position outside of the tensor.
    """
    width = change.value.itemsize
    if change.index is None:
        run = target[change.start * width : (change.start + len(change.value)) * width]
        if len(run) != change.value.nbytes:
            raise DeltaError(
                Reason.REQUEST_INVALID,
                f"the patch has {change.value.nbytes} bytes, which does not fit into {len(target)}",
            )
        undo = ElementUpdate(None, run.copy().view(change.value.dtype), change.start)
        np.copyto(run, change.value.view(np.uint8))
        return undo
    old = np.empty_like(change.value)
    try:
        chosen().scatter(target, change.index, change.value, old)
    except Broken as error:
        raise DeltaError(
            Reason.REQUEST_INVALID,
            f"the patch does not fit its tensor ({error}); make it again from the base",
        ) from None
    return ElementUpdate(change.index, old)
