"""Kernels: in C where the installation holds the library, else NumPy's; all make the same streams.

WEIGHTSYNC_KERNELS forces one of plain (NumPy's), generic, avx2 and avx512.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

from weightsync.errors import invalid_request

if TYPE_CHECKING:
    from weightsync.delta.coding import Bytes, Coded, Coding, Indices, Words

__all__ = ["PLAIN", "VARIABLE", "available", "chosen", "load_kernels", "warm_up"]

VARIABLE = "WEIGHTSYNC_KERNELS"
#: NumPy's.
PLAIN = "plain"

_logger = logging.getLogger(__name__)


class _Kernels(Protocol):
    """What codec and ranks call; `plain` tells what each does."""

    def add(self, base: Bytes, index: Indices, delta: Words) -> None: ...
    def copy_rows(self, table: Words) -> None: ...
    def count(self, base: Bytes, new: Bytes, width: int, run: int, stride: int) -> int: ...
    def decode_bitmap(self, plane: Bytes, elements: int, out: Indices) -> None: ...
    def decode_gaps(self, planes: Sequence[Bytes], elements: int, out: Indices) -> None: ...
    def decode_sm(self, planes: Sequence[Bytes], out: Words) -> None: ...
    def encode(self, base: Bytes, new: Bytes, width: int, coding: Coding) -> Coded: ...
    def entries(self, index: Indices, skip: int) -> Words: ...
    def find(self, base: Words, new: Words) -> tuple[Indices, Words]: ...
    def holds(self, target: Words, index: Indices, value: Words) -> bool: ...
    def join(self, planes: Sequence[Bytes], out: Words) -> None: ...
    def put(self, target: Words, index: Indices, value: Words) -> None: ...
    def scatter(self, target: Bytes, index: Indices, value: Words, old: Words) -> None: ...
    def shift(self, target: Bytes, index: Indices, delta: Words, old: Words) -> None: ...


@cache
def available() -> tuple[str, ...]:
    """Return what this machine and this installation have, the best one last; plain is first."""
    from weightsync.delta.kernels import native

    try:
        return (PLAIN, *native.levels())
    except OSError as error:
        _logger.warning(
            "deltas use NumPy's kernels, several times slower: %s; install a wheel for this "
            "platform, or a C compiler (Debian: gcc) before the source is installed or set up",
            error,
        )
        return (PLAIN,)


@cache
def load_kernels(name: str) -> _Kernels:
    if name == PLAIN:
        from weightsync.delta.kernels import plain

        return plain
    from weightsync.delta.kernels.native import NativeKernels

    return NativeKernels(name)


@cache
def chosen() -> _Kernels:
    """Return the best kernels, or those that WEIGHTSYNC_KERNELS names.

    Raises REQUEST_INVALID when this machine does not have these.
    """
    names = available()
    name = os.environ.get(VARIABLE, "").strip() or names[-1]
    if name not in names:
        raise invalid_request(
            f"{VARIABLE} is {name[:40]!a}, but this machine has {', '.join(names)}; set it to one "
            "of these, or unset it for the best"
        )
    return load_kernels(name)


def warm_up() -> str:
    """Have the kernels loaded, so that no push or apply waits for it: a few milliseconds.

    Returns:
        `compiled`, or `plain` for NumPy's.
    """
    return PLAIN if chosen() is load_kernels(PLAIN) else "compiled"
