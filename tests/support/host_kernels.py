"""What kernels.cu does, done on the host's memory: for a device whose memory that is."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightsync.gpu.device_kernels import Kernels
from weightsync.model.digest import tensor_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["HostKernels"]


class HostKernels(Kernels):
    """Has the interface of the kernels of a device.

    Attributes:
        ran: Names of what was queued, in order.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.ran: list[str] = []

    def function(self, name: str) -> ctypes.c_void_p:
        """Return what `queue` knows the kernel by."""
        return ctypes.c_void_p(_NAMES.index(name) + 1)

    def queue(
        self,
        function: ctypes.c_void_p,
        grid: tuple[int, int],
        pointers: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        """Do at once what the kernel does."""
        name = _NAMES[(function.value or 0) - 1]
        self.ran.append(name)
        given = [ctypes.c_uint64.from_address(at or 0).value for at in pointers]
        _WORK[name](grid[0], *given)


_Word = type[np.unsignedinteger[Any]]


def _bytes(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _words(address: int, count: int) -> NDArray[np.int64]:
    return _bytes(address, 8 * count).view(np.int64)


def _copy_spans(count: int, spans: int) -> None:
    for live, staged, size, _ in _spans(count, spans):
        _bytes(live, size)[:] = _bytes(staged, size)


def _compare_spans(count: int, spans: int, flags: int) -> None:
    for live, staged, size, flag in _spans(count, spans):
        if (_bytes(live, size) != _bytes(staged, size)).any():
            _bytes(flags + flag, 1)[0] = 1


def _spans(count: int, spans: int) -> list[tuple[int, int, int, int]]:
    rows = _words(spans, 3 * count).reshape(-1, 3).tolist()
    return [(live, staged, last & 0xFFFFFFFF, last >> 32) for live, staged, last in rows]


def _digest_texts(count: int, texts: int, digests: int) -> None:
    for index, (begin, size) in enumerate(_words(texts, 2 * count).reshape(-1, 2).tolist()):
        found = tensor_digest(_bytes(begin, size).data)
        _words(digests + 16 * index, 2)[:] = np.frombuffer(found, ">i8")


def _count_changes(word: _Word, count: int, spans: int, counts: int) -> None:
    found = _bytes(counts, 4 * count).view(np.uint32)
    for index, sides in enumerate(_sides(word, count, spans)):
        found[index] = np.count_nonzero(np.not_equal(*sides))


def _take_changes(
    word: _Word,
    count: int,
    spans: int,
    begins: int,
    row: int,
    positions: int,
    values: int,
    wrong: int,
) -> None:
    width = np.dtype(word).itemsize
    borders = _words(begins, count + 1).tolist()
    addresses = [live for live, *_ in _spans(count, spans)]
    for index, (live, staged) in enumerate(_sides(word, count, spans)):
        begin, end = borders[index : index + 2]
        places = np.flatnonzero(live != staged)
        if len(places) != end - begin:
            _bytes(wrong, 4).view(np.int32)[0] = 1
        places = places[: end - begin]
        first = (addresses[index] - row) // width
        _words(positions + 8 * begin, len(places))[:] = first + places
        _bytes(values + width * begin, width * len(places)).view(word)[:] = staged[places]


def _write_places(
    word: _Word, blocks: int, row: int, positions: int, values: int, count: int
) -> None:
    width = np.dtype(word).itemsize
    # What each block writes: all together must be enough.
    some = min(count, blocks * 2048)
    places = _words(positions, some)
    if some:
        whole = _bytes(row, width * (int(places.max()) + 1)).view(word)
        whole[places] = _bytes(values, width * some).view(word)


def _sides(word: _Word, count: int, spans: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    return [
        (_bytes(live, size).view(word), _bytes(staged, size).view(word))
        for live, staged, size, _ in _spans(count, spans)
    ]


_WORK: dict[str, Callable[..., None]] = {
    "copy_spans": _copy_spans,
    "compare_spans": _compare_spans,
    "digest_texts": _digest_texts,
}
for _word in (np.uint8, np.uint16, np.uint32, np.uint64):
    _bits = 8 * np.dtype(_word).itemsize
    _WORK[f"count_changes_{_bits}"] = partial(_count_changes, _word)
    _WORK[f"take_changes_{_bits}"] = partial(_take_changes, _word)
    _WORK[f"write_places_{_bits}"] = partial(_write_places, _word)
_NAMES = list(_WORK)
