"""What numba lacks: unaligned memory by address, masks of whole vectors, bit counts, prefetching.

Everything is an int64, also masks and addresses: numba makes floats of mixed signs. Vectors are
LLVM's, so the same code runs on every processor; a few lanes more or less are LLVM's business.
Nothing here checks bounds: the kernels do.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "count_ones",
    "differ8",
    "differ16",
    "differ32",
    "differ64",
    "first_one",
    "gaps_fit",
    "is_large",
    "is_negative",
    "is_wide",
    "load8",
    "load16",
    "load32",
    "load64",
    "pack_changes",
    "pack_magnitudes",
    "prefetch",
    "shuffle_changes",
    "shuffle_magnitudes",
    "shuffle_places",
    "spread_gaps",
    "spread_signs",
    "store8",
    "store16",
    "store32",
    "store64",
]

Value = Any
_I64 = ir.IntType(64)
_ZERO = ir.Constant(_I64, 0)


def _made(emit: Callable[..., Value]) -> Any:
    """Return an intrinsic whose body `emit(builder, *values)` writes; it takes and gives int64."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Value:
        return emit(builder, *values)

    count = len(signature(emit).parameters) - 1
    kind = types.int64(*(types.int64,) * count)
    # numba binds arguments to the parameters that it sees, and does not see *arguments.
    typed: dict[int, Callable[..., Any]] = {
        1: lambda _typing, _1: (kind, generate),
        2: lambda _typing, _1, _2: (kind, generate),
        3: lambda _typing, _1, _2, _3: (kind, generate),
        4: lambda _typing, _1, _2, _3, _4: (kind, generate),
        5: lambda _typing, _1, _2, _3, _4, _5: (kind, generate),
    }
    return intrinsic(typed[count])


def _vector(bits: int, lanes: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(bits), lanes)


def _splat(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _load(builder: ir.IRBuilder, address: Value, kind: ir.Type) -> Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: ir.IRBuilder, address: Value, value: Value) -> Value:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)
    return _ZERO


def _mask(builder: ir.IRBuilder, lanes: Value) -> Value:
    """Return a vector of conditions as an int64, the first lane in the lowest bit."""
    mask = builder.bitcast(lanes, ir.IntType(lanes.type.count))
    return mask if lanes.type.count == 64 else builder.zext(mask, _I64)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: Value) -> Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    known = builder.module.globals.get(name)
    return builder.call(known or ir.Function(builder.module, kind, name), values)


def _loads(bits: int) -> Any:
    def emit(builder: ir.IRBuilder, address: Value) -> Value:
        value = _load(builder, address, ir.IntType(bits))
        return value if bits == 64 else builder.zext(value, _I64)

    return _made(emit)


def _stores(bits: int) -> Any:
    def emit(builder: ir.IRBuilder, address: Value, value: Value) -> Value:
        kind = ir.IntType(bits)
        return _store(builder, address, value if bits == 64 else builder.trunc(value, kind))

    return _made(emit)


#: Read or write that many bits, low bytes first.
load8, load16, load32, load64 = map(_loads, (8, 16, 32, 64))
store8, store16, store32, store64 = map(_stores, (8, 16, 32, 64))


def _differs(bits: int) -> Any:
    def emit(builder: ir.IRBuilder, left: Value, right: Value) -> Value:
        kind = _vector(bits, 64)
        values = _load(builder, left, kind), _load(builder, right, kind)
        return _mask(builder, builder.icmp_unsigned("!=", *values))

    return _made(emit)


#: Tell which of 64 elements differ.
differ8, differ16, differ32, differ64 = map(_differs, (8, 16, 32, 64))


@_made
def first_one(builder: ir.IRBuilder, mask: Value) -> Value:
    """Return the lowest bit that is set; 64 where none is."""
    return _call(builder, "llvm.cttz.i64", _I64, mask, ir.Constant(ir.IntType(1), 0))


@_made
def count_ones(builder: ir.IRBuilder, mask: Value) -> Value:
    """Return how many bits are set."""
    return _call(builder, "llvm.ctpop.i64", _I64, mask)


@_made
def prefetch(builder: ir.IRBuilder, address: Value) -> Value:
    """Have the line brought into the second cache; any address is harmless.

    Not into the first, nor for a write: far fewer lines can be on their way there at a time.
    """
    flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 2, 1)]
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *flags)
    return _ZERO


@_made
def gaps_fit(builder: ir.IRBuilder, places: Value, out: Value) -> Value:
    """Write 32 gaps between 33 ascending 16-bit places as bytes; tell whether all are below 255."""
    kind = _vector(16, 32)
    before = _load(builder, places, kind)
    after = _load(builder, builder.add(places, ir.Constant(_I64, 2)), kind)
    gaps = builder.sub(builder.sub(after, before), _splat(kind, 1))
    _store(builder, out, builder.trunc(gaps, _vector(8, 32)))
    beyond = _mask(builder, builder.icmp_unsigned(">", gaps, _splat(kind, 254)))
    return builder.zext(builder.icmp_unsigned("==", beyond, _ZERO), _I64)


def _magnitudes_of(builder: ir.IRBuilder, values: Value) -> Value:
    """Return the magnitudes of differences; that of -32768 is 32768, without a sign."""
    kind = values.type
    negative = builder.icmp_signed("<", values, _splat(kind, 0))
    return builder.select(negative, builder.sub(_splat(kind, 0), values), values)


def _clipped(builder: ir.IRBuilder, magnitudes: Value) -> Value:
    """Return magnitudes less 2, at most 255."""
    kind = magnitudes.type
    rest, most = builder.sub(magnitudes, _splat(kind, 2)), _splat(kind, 255)
    return builder.select(builder.icmp_unsigned("<", rest, most), rest, most)


@_made
def is_negative(builder: ir.IRBuilder, address: Value) -> Value:
    """Tell which of 64 differences are below zero."""
    kind = _vector(16, 64)
    return _mask(builder, builder.icmp_signed("<", _load(builder, address, kind), _splat(kind, 0)))


def _exceeds(limit: int) -> Any:
    def emit(builder: ir.IRBuilder, address: Value) -> Value:
        values = _magnitudes_of(builder, _load(builder, address, _vector(16, 64)))
        return _mask(builder, builder.icmp_unsigned(">", values, _splat(values.type, limit)))

    return _made(emit)


#: Tell which of 64 differences exceed 1, and which exceed 256, in magnitude.
is_large, is_wide = _exceeds(1), _exceeds(256)


@_made
def spread_signs(builder: ir.IRBuilder, signs: Value, out: Value) -> Value:
    """Write 64 differences: -1 where a bit is set, else 1."""
    kind = _vector(16, 64)
    lanes = builder.bitcast(signs, _vector(1, 64))
    return _store(builder, out, builder.select(lanes, _splat(kind, 0xFFFF), _splat(kind, 1)))


def _compressed(builder: ir.IRBuilder, value: Value, lanes: Value) -> Value:
    """Move the chosen lanes to the front, in order; one instruction with AVX-512 VBMI2."""
    kind: ir.VectorType = value.type
    name = f"llvm.experimental.vector.compress.v{kind.count}i{kind.element.width}"
    return _call(builder, name, kind, value, lanes, ir.Constant(kind, ir.Undefined))


@_made
def pack_changes(
    builder: ir.IRBuilder, base: Value, new: Value, place: Value, places: Value, deltas: Value
) -> Value:
    """Write places and differences of those of 32 elements that differ; tell which do.

    Writes 64 bytes to each of `places` and `deltas`, whatever differs.
    """
    kind = _vector(16, 32)
    before, after = _load(builder, base, kind), _load(builder, new, kind)
    differs = builder.icmp_unsigned("!=", before, after)
    _store(builder, deltas, _compressed(builder, builder.sub(after, before), differs))
    first = builder.insert_element(
        ir.Constant(kind, ir.Undefined), builder.trunc(place, ir.IntType(16)), ir.Constant(_I64, 0)
    )
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), 32), [0] * 32)
    spread = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)
    counted = builder.add(spread, ir.Constant(kind, list(range(32))))
    _store(builder, places, _compressed(builder, counted, differs))
    return _mask(builder, differs)


@_made
def spread_gaps(builder: ir.IRBuilder, entries: Value, before: Value, out: Value) -> Value:
    """Write the 32-bit positions that 16 entries of GAP8 mark behind the position `before`.

    Writes 64 bytes, whatever is marked. The entries are read once. Returns how many are marked, and
    times 256 how far the last entry lies behind `before`.
    """
    bytes_, kind = _load(builder, entries, _vector(8, 16)), _vector(32, 16)
    marks = builder.icmp_unsigned("!=", bytes_, _splat(bytes_.type, 255))
    sums = builder.add(builder.zext(bytes_, kind), builder.zext(marks, kind))
    for step in (1, 2, 4, 8):
        # Lanes 16 and up are zeros, which come in from below.
        lanes = [16] * step + list(range(16 - step))
        order = ir.Constant(kind, lanes)
        moved = builder.shuffle_vector(sums, _splat(kind, 0), order)
        sums = builder.add(sums, moved)
    first = builder.insert_element(
        ir.Constant(kind, ir.Undefined), builder.trunc(before, ir.IntType(32)), _ZERO
    )
    spread = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _splat(kind, 0))
    _store(builder, out, _compressed(builder, builder.add(sums, spread), marks))
    far = builder.zext(builder.extract_element(sums, ir.Constant(_I64, 15)), _I64)
    mask = builder.zext(builder.bitcast(marks, ir.IntType(16)), _I64)
    marked = _call(builder, "llvm.ctpop.i64", _I64, mask)
    return builder.or_(builder.shl(far, ir.Constant(_I64, 8)), marked)


@_made
def pack_magnitudes(builder: ir.IRBuilder, deltas: Value, out: Value) -> Value:
    """Write a byte for each of 64 differences that is large; 64 bytes, whatever is."""
    values = _magnitudes_of(builder, _load(builder, deltas, _vector(16, 64)))
    clipped = builder.trunc(_clipped(builder, values), _vector(8, 64))
    large = builder.icmp_unsigned(">", values, _splat(values.type, 1))
    return _store(builder, out, _compressed(builder, clipped, large))


def _shuffled(builder: ir.IRBuilder, value: Value, table: Value, mask: Value) -> Value:
    """Move bytes to the front as the table tells for a mask of 8 bits; x86 with SSSE3 only."""
    kind = _vector(8, 16)
    row = builder.add(table, builder.shl(mask, ir.Constant(_I64, 4)))
    order = _load(builder, row, kind)
    return _call(builder, "llvm.x86.ssse3.pshuf.b.128", kind, value, order)


@_made
def shuffle_changes(
    builder: ir.IRBuilder, base: Value, new: Value, mask: Value, table: Value, deltas: Value
) -> Value:
    """Write the differences of those of 8 elements whose bit is set; 16 bytes, whatever is.

    `table` holds for each mask the order of the bytes of 8 elements.
    """
    kind = _vector(16, 8)
    values = builder.sub(_load(builder, new, kind), _load(builder, base, kind))
    values = builder.bitcast(values, _vector(8, 16))
    return _store(builder, deltas, _shuffled(builder, values, table, mask))


@_made
def shuffle_places(
    builder: ir.IRBuilder, place: Value, mask: Value, table: Value, out: Value
) -> Value:
    """Write the places of bits that are set, the first of which is `place`; 16 bytes.

    `table` holds for each mask the places of its bits, in bytes.
    """
    kind = _vector(16, 8)
    row = builder.add(table, builder.shl(mask, ir.Constant(_I64, 3)))
    places = builder.zext(_load(builder, row, _vector(8, 8)), kind)
    first = builder.insert_element(
        ir.Constant(kind, ir.Undefined), builder.trunc(place, ir.IntType(16)), ir.Constant(_I64, 0)
    )
    lanes = ir.Constant(_vector(32, 8), [0] * 8)
    spread = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)
    return _store(builder, out, builder.add(places, spread))


@_made
def shuffle_magnitudes(
    builder: ir.IRBuilder, deltas: Value, mask: Value, table: Value, out: Value
) -> Value:
    """Write a byte for those of 8 differences whose bit is set; 8 bytes, whatever is.

    `table` holds for each mask the places of its bits, in bytes.
    """
    values = _magnitudes_of(builder, _load(builder, deltas, _vector(16, 8)))
    clipped = builder.trunc(_clipped(builder, values), _vector(8, 8))
    order = _load(
        builder, builder.add(table, builder.shl(mask, ir.Constant(_I64, 3))), _vector(8, 8)
    )
    wide = [
        builder.shuffle_vector(
            half,
            ir.Constant(half.type, ir.Undefined),
            ir.Constant(_vector(32, 16), [*range(8)] * 2),
        )
        for half in (clipped, order)
    ]
    kind = _vector(8, 16)
    moved = _call(builder, "llvm.x86.ssse3.pshuf.b.128", kind, *wide)
    return _store(
        builder,
        out,
        builder.shuffle_vector(
            moved, ir.Constant(kind, ir.Undefined), ir.Constant(_vector(32, 8), list(range(8)))
        ),
    )
