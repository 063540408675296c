"""One pass over the source: what is digested is written past the caches.

A store that goes through a cache first reads what it will overwrite, and drives out what others
work with. Memory of a push is read next by another process, when a shard of it is whole; few caches
keep it for so long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir

from weightsync.jit.compiling import kernel
from weightsync.jit.emitting import I64, ZERO, Value, load, made, store, vector
from weightsync_client.copying.plain import PlainCopier
from weightsync_client.copying.xxh3 import (
    BLOCK,
    INITIAL,
    SECRET,
    STRIPE,
    accumulate_block,
    accumulate_last,
    accumulate_stripe,
    merge_high,
    merge_low,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from weightsync_client.copying import Copier

__all__ = ["CompiledCopier", "make_copier"]

_SECRET = np.frombuffer(SECRET, np.uint8)
#: Of a cache: only whole lines are written past it without being read.
_LINE = 64
_LONGEST_SHORT = 240
#: Below this a call of numpy's and one of xxhash's are faster: they need the interpreter for less.
_LEAST = 384 << 10


@made
def _stream(builder: ir.IRBuilder, target: Value, source: Value) -> Value:
    """Write a block past the caches; the target is at a multiple of `_LINE`."""
    kind = vector(8, 32)
    past = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    for offset in range(0, BLOCK, 32):
        at = ir.Constant(I64, offset)
        value = load(builder, builder.add(source, at), kind)
        place = builder.inttoptr(builder.add(target, at), kind.as_pointer())
        builder.store(value, place, align=32).set_metadata("nontemporal", past)
    return ZERO


@made
def _copy_line(builder: ir.IRBuilder, target: Value, source: Value) -> Value:
    """Write `_LINE` bytes to any address."""
    return store(builder, target, load(builder, source, vector(8, _LINE)))


@made
def _settle(builder: ir.IRBuilder, value: Value) -> Value:
    """Let no later store be seen before those that went past the caches; returns the value."""
    builder.fence("seq_cst")
    return value


@kernel
def _copy_blocks(accumulators: Any, source: Any, target: Any, blocks: Any) -> Any:
    """Copy and digest at least one block."""
    lead = -target % _LINE
    last = blocks - 1
    for at in range(last):
        accumulate_block(accumulators, source + BLOCK * at)
        # Of both sides the same bytes: those that lie behind the first line's beginning.
        _stream(target + lead + BLOCK * at, source + lead + BLOCK * at)
    accumulate_block(accumulators, source + BLOCK * last)
    _copy_line(target, source)
    for at in range(BLOCK * last, BLOCK * blocks, _LINE):
        _copy_line(target + at, source + at)
    return _settle(blocks)


@kernel
def _finish(accumulators: Any, rest: Any, size: Any, secret: Any) -> Any:
    """Digest the last 1 to 1024 bytes; `rest` begins with the 64 bytes before them."""
    length = (size - 1) % BLOCK + 1
    for number in range((length - 1) // STRIPE):
        accumulate_stripe(accumulators, rest + STRIPE * (number + 1), secret + 8 * number)
    accumulate_last(accumulators, rest + length)
    return 0


@kernel
def _low(accumulators: Any, size: Any) -> Any:
    return merge_low(accumulators, size)


@kernel
def _high(accumulators: Any, size: Any) -> Any:
    return merge_high(accumulators, size)


def make_copier(size: int) -> Copier:
    """Return the faster copier for a text of so many bytes."""
    return CompiledCopier(size) if size >= _LEAST else PlainCopier()


def _address(data: npt.NDArray[Any]) -> int:
    found: int = data.__array_interface__["data"][0]
    return found


class CompiledCopier:
    """See `weightsync_client.copying.Copier`; as fast with pieces of any size.

    Args:
        size: More than 240 bytes: shorter texts are digested in another way.

    Raises:
        ValueError: It is less.
    """

    def __init__(self, size: int) -> None:
        if size <= _LONGEST_SHORT:
            raise ValueError(f"{size} bytes")
        self._size = size
        self._left = size
        self._accumulators = np.array(INITIAL, np.uint64)
        #: The 64 bytes before what comes next, then what comes behind the last whole block.
        self._rest = np.empty(STRIPE + BLOCK, np.uint8)

    def update(self, piece: memoryview, target: memoryview) -> None:
        """Digest and copy the next piece at once.

        Raises:
            ValueError: It is none that can come next; nothing was written.
        """
        size, left = len(piece), self._left - len(piece)
        # Before there are arrays: in a traceback they would keep the memory.
        if size != len(target) or left < 0 or (left and size % BLOCK) or not size:
            raise ValueError(f"{size} bytes for {len(target)}, {self._left} of {self._size} left")
        self._left = left
        data, place = np.frombuffer(piece, np.uint8), np.frombuffer(target, np.uint8)
        # The last block is digested in another way, also when it is a whole one.
        blocks = (size if left else size - 1) // BLOCK
        whole = BLOCK * blocks
        rest = data[whole:]
        if blocks:
            _copy_blocks(_address(self._accumulators), _address(data), _address(place), blocks)
            self._rest[:STRIPE] = data[whole - STRIPE : whole]
        place[whole:] = rest
        self._rest[STRIPE : STRIPE + len(rest)] = rest

    def digest(self) -> bytes:
        """Return the digest."""
        place = _address(self._accumulators)
        _finish(place, _address(self._rest), self._size, _address(_SECRET))
        halves = _high(place, self._size), _low(place, self._size)
        return b"".join(half.to_bytes(8, "big", signed=True) for half in halves)
