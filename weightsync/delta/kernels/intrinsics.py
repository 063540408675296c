"""What numba lacks: unaligned memory by address, masks of whole vectors, bit counts, prefetching.

Everything is an int64, also masks and addresses: numba makes floats of mixed signs. Vectors are
LLVM's, so the same code runs on every processor; a few lanes more or less are LLVM's business.
Nothing here checks bounds: the kernels do.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from weightsync.jit.emitting import (
    I64,
    ZERO,
    Value,
    call,
    load,
    made,
    mask_of,
    splat,
    store,
    vector,
)

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


def _loads(bits: int) -> Any:
    def emit(builder: ir.IRBuilder, address: Value) -> Value:
        value = load(builder, address, ir.IntType(bits))
        return value if bits == 64 else builder.zext(value, I64)

    return made(emit)


def _stores(bits: int) -> Any:
    def emit(builder: ir.IRBuilder, address: Value, value: Value) -> Value:
        kind = ir.IntType(bits)
        return store(builder, address, value if bits == 64 else builder.trunc(value, kind))

    return made(emit)


#: Read or write that many bits, low bytes first.
load8, load16, load32, load64 = map(_loads, (8, 16, 32, 64))
store8, store16, store32, store64 = map(_stores, (8, 16, 32, 64))


def _differs(bits: int) -> Any:
    def emit(builder: ir.IRBuilder, left: Value, right: Value) -> Value:
        kind = vector(bits, 64)
        values = load(builder, left, kind), load(builder, right, kind)
        return mask_of(builder, builder.icmp_unsigned("!=", *values))

    return made(emit)


#: Tell which of 64 elements differ.
differ8, differ16, differ32, differ64 = map(_differs, (8, 16, 32, 64))


@made
def first_one(builder: ir.IRBuilder, mask: Value) -> Value:
    """Return the lowest bit that is set; 64 where none is."""
    return call(builder, "llvm.cttz.i64", I64, mask, ir.Constant(ir.IntType(1), 0))


@made
def count_ones(builder: ir.IRBuilder, mask: Value) -> Value:
    """Return how many bits are set."""
    return call(builder, "llvm.ctpop.i64", I64, mask)


@made
def prefetch(builder: ir.IRBuilder, address: Value) -> Value:
    """Have the line brought into the second cache; any address is harmless.

    Not into the first, nor for a write: far fewer lines can be on their way there at a time.
    """
    flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 2, 1)]
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *flags)
    return ZERO


@made
def gaps_fit(builder: ir.IRBuilder, places: Value, out: Value) -> Value:
    """Write 32 gaps between 33 ascending 16-bit places as bytes; tell whether all are below 255."""
    kind = vector(16, 32)
    before = load(builder, places, kind)
    after = load(builder, builder.add(places, ir.Constant(I64, 2)), kind)
    gaps = builder.sub(builder.sub(after, before), splat(kind, 1))
    store(builder, out, builder.trunc(gaps, vector(8, 32)))
    beyond = mask_of(builder, builder.icmp_unsigned(">", gaps, splat(kind, 254)))
    return builder.zext(builder.icmp_unsigned("==", beyond, ZERO), I64)


def _magnitudes_of(builder: ir.IRBuilder, values: Value) -> Value:
    """Return the magnitudes of differences; that of -32768 is 32768, without a sign."""
    kind = values.type
    negative = builder.icmp_signed("<", values, splat(kind, 0))
    return builder.select(negative, builder.sub(splat(kind, 0), values), values)


def _clipped(builder: ir.IRBuilder, magnitudes: Value) -> Value:
    """Return magnitudes less 2, at most 255."""
    kind = magnitudes.type
    rest, most = builder.sub(magnitudes, splat(kind, 2)), splat(kind, 255)
    return builder.select(builder.icmp_unsigned("<", rest, most), rest, most)


@made
def is_negative(builder: ir.IRBuilder, address: Value) -> Value:
    """Tell which of 64 differences are below zero."""
    kind = vector(16, 64)
    return mask_of(builder, builder.icmp_signed("<", load(builder, address, kind), splat(kind, 0)))


def _exceeds(limit: int) -> Any:
    def emit(builder: ir.IRBuilder, address: Value) -> Value:
        values = _magnitudes_of(builder, load(builder, address, vector(16, 64)))
        return mask_of(builder, builder.icmp_unsigned(">", values, splat(values.type, limit)))

    return made(emit)


#: Tell which of 64 differences exceed 1, and which exceed 256, in magnitude.
is_large, is_wide = _exceeds(1), _exceeds(256)


@made
def spread_signs(builder: ir.IRBuilder, signs: Value, out: Value) -> Value:
    """Write 64 differences: -1 where a bit is set, else 1."""
    kind = vector(16, 64)
    lanes = builder.bitcast(signs, vector(1, 64))
    return store(builder, out, builder.select(lanes, splat(kind, 0xFFFF), splat(kind, 1)))


def _compressed(builder: ir.IRBuilder, value: Value, lanes: Value) -> Value:
    """Move the chosen lanes to the front, in order; one instruction with AVX-512 VBMI2."""
    kind: ir.VectorType = value.type
    name = f"llvm.experimental.vector.compress.v{kind.count}i{kind.element.width}"
    return call(builder, name, kind, value, lanes, ir.Constant(kind, ir.Undefined))


@made
def pack_changes(
    builder: ir.IRBuilder, base: Value, new: Value, place: Value, places: Value, deltas: Value
) -> Value:
    """Write places and differences of those of 32 elements that differ; tell which do.

    Writes 64 bytes to each of `places` and `deltas`, whatever differs.
    """
    kind = vector(16, 32)
    before, after = load(builder, base, kind), load(builder, new, kind)
    differs = builder.icmp_unsigned("!=", before, after)
    store(builder, deltas, _compressed(builder, builder.sub(after, before), differs))
    first = builder.insert_element(
        ir.Constant(kind, ir.Undefined), builder.trunc(place, ir.IntType(16)), ir.Constant(I64, 0)
    )
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), 32), [0] * 32)
    spread = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)
    counted = builder.add(spread, ir.Constant(kind, list(range(32))))
    store(builder, places, _compressed(builder, counted, differs))
    return mask_of(builder, differs)


@made
def spread_gaps(builder: ir.IRBuilder, entries: Value, before: Value, out: Value) -> Value:
    """Write the 32-bit positions that 16 entries of GAP8 mark behind the position `before`.

    Writes 64 bytes, whatever is marked. The entries are read once. Returns how many are marked, and
    times 256 how far the last entry lies behind `before`.
    """
    bytes_, kind = load(builder, entries, vector(8, 16)), vector(32, 16)
    marks = builder.icmp_unsigned("!=", bytes_, splat(bytes_.type, 255))
    sums = builder.add(builder.zext(bytes_, kind), builder.zext(marks, kind))
    for step in (1, 2, 4, 8):
        # Lanes 16 and up are zeros, which come in from below.
        lanes = [16] * step + list(range(16 - step))
        order = ir.Constant(kind, lanes)
        moved = builder.shuffle_vector(sums, splat(kind, 0), order)
        sums = builder.add(sums, moved)
    first = builder.insert_element(
        ir.Constant(kind, ir.Undefined), builder.trunc(before, ir.IntType(32)), ZERO
    )
    spread = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), splat(kind, 0))
    store(builder, out, _compressed(builder, builder.add(sums, spread), marks))
    far = builder.zext(builder.extract_element(sums, ir.Constant(I64, 15)), I64)
    mask = builder.zext(builder.bitcast(marks, ir.IntType(16)), I64)
    marked = call(builder, "llvm.ctpop.i64", I64, mask)
    return builder.or_(builder.shl(far, ir.Constant(I64, 8)), marked)


@made
def pack_magnitudes(builder: ir.IRBuilder, deltas: Value, out: Value) -> Value:
    """Write a byte for each of 64 differences that is large; 64 bytes, whatever is."""
    values = _magnitudes_of(builder, load(builder, deltas, vector(16, 64)))
    clipped = builder.trunc(_clipped(builder, values), vector(8, 64))
    large = builder.icmp_unsigned(">", values, splat(values.type, 1))
    return store(builder, out, _compressed(builder, clipped, large))


def _shuffled(builder: ir.IRBuilder, value: Value, table: Value, mask: Value) -> Value:
    """Move bytes to the front as the table tells for a mask of 8 bits; x86 with SSSE3 only."""
    kind = vector(8, 16)
    row = builder.add(table, builder.shl(mask, ir.Constant(I64, 4)))
    order = load(builder, row, kind)
    return call(builder, "llvm.x86.ssse3.pshuf.b.128", kind, value, order)


@made
def shuffle_changes(
    builder: ir.IRBuilder, base: Value, new: Value, mask: Value, table: Value, deltas: Value
) -> Value:
    """Write the differences of those of 8 elements whose bit is set; 16 bytes, whatever is.

    `table` holds for each mask the order of the bytes of 8 elements.
    """
    kind = vector(16, 8)
    values = builder.sub(load(builder, new, kind), load(builder, base, kind))
    values = builder.bitcast(values, vector(8, 16))
    return store(builder, deltas, _shuffled(builder, values, table, mask))


@made
def shuffle_places(
    builder: ir.IRBuilder, place: Value, mask: Value, table: Value, out: Value
) -> Value:
    """Write the places of bits that are set, the first of which is `place`; 16 bytes.

    `table` holds for each mask the places of its bits, in bytes.
    """
    kind = vector(16, 8)
    row = builder.add(table, builder.shl(mask, ir.Constant(I64, 3)))
    places = builder.zext(load(builder, row, vector(8, 8)), kind)
    first = builder.insert_element(
        ir.Constant(kind, ir.Undefined), builder.trunc(place, ir.IntType(16)), ir.Constant(I64, 0)
    )
    lanes = ir.Constant(vector(32, 8), [0] * 8)
    spread = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)
    return store(builder, out, builder.add(places, spread))


@made
def shuffle_magnitudes(
    builder: ir.IRBuilder, deltas: Value, mask: Value, table: Value, out: Value
) -> Value:
    """Write a byte for those of 8 differences whose bit is set; 8 bytes, whatever is.

    `table` holds for each mask the places of its bits, in bytes.
    """
    values = _magnitudes_of(builder, load(builder, deltas, vector(16, 8)))
    clipped = builder.trunc(_clipped(builder, values), vector(8, 8))
    order = load(builder, builder.add(table, builder.shl(mask, ir.Constant(I64, 3))), vector(8, 8))
    wide = [
        builder.shuffle_vector(
            half,
            ir.Constant(half.type, ir.Undefined),
            ir.Constant(vector(32, 16), [*range(8)] * 2),
        )
        for half in (clipped, order)
    ]
    kind = vector(8, 16)
    moved = call(builder, "llvm.x86.ssse3.pshuf.b.128", kind, *wide)
    return store(
        builder,
        out,
        builder.shuffle_vector(
            moved, ir.Constant(kind, ir.Undefined), ir.Constant(vector(32, 8), list(range(8)))
        ),
    )
