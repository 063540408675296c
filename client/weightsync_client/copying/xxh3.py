"""XXH3 of 128 bits for more than 240 bytes, with seed 0 and the default secret.

From the specification in the repository of xxHash, doc/xxhash_spec.md, whose names these are. The
library of that name cannot write what it reads, and two passes take a third longer. The
accumulators lie in memory: eight of 64 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from weightsync.jit.emitting import I64, Value, load, made, splat, store, vector

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BLOCK",
    "INITIAL",
    "SECRET",
    "STRIPE",
    "accumulate_block",
    "accumulate_last",
    "accumulate_stripe",
    "merge_high",
    "merge_low",
]

STRIPE, BLOCK = 64, 1024

_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PRIME_MX1 = 0x165667919E3779F9

#: What the accumulators begin with.
INITIAL = (
    *(_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3),
    *(_PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1),
)
#: The default secret.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LANES = vector(64, 8)
_WIDE = ir.IntType(128)


def _word(at: int) -> int:
    return int.from_bytes(SECRET[at : at + 8], "little")


def _secret(at: int) -> ir.Constant:
    return ir.Constant(_LANES, [_word(at + 8 * lane) for lane in range(8)])


def _ahead(builder: ir.IRBuilder, address: Value, offset: int) -> Value:
    return builder.add(address, ir.Constant(I64, offset))


def _accumulated(builder: ir.IRBuilder, acc: Value, data: Value, secret: Value) -> Value:
    key = builder.xor(data, secret)
    low = builder.and_(key, splat(_LANES, 0xFFFFFFFF))
    product = builder.mul(low, builder.lshr(key, splat(_LANES, 32)))
    order = ir.Constant(vector(32, 8), [1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(data, ir.Constant(_LANES, ir.Undefined), order)
    return builder.add(acc, builder.add(swapped, product))


@made
def accumulate_block(builder: ir.IRBuilder, accumulators: Value, block: Value) -> Value:
    """Take a block: its sixteen stripes, and the scramble after them."""
    acc = load(builder, accumulators, _LANES)
    for stripe in range(BLOCK // STRIPE):
        data = load(builder, _ahead(builder, block, STRIPE * stripe), _LANES)
        acc = _accumulated(builder, acc, data, _secret(8 * stripe))
    acc = builder.xor(acc, builder.lshr(acc, splat(_LANES, 47)))
    acc = builder.xor(acc, _secret(len(SECRET) - STRIPE))
    return store(builder, accumulators, builder.mul(acc, splat(_LANES, _PRIME32_1)))


@made
def accumulate_stripe(
    builder: ir.IRBuilder, accumulators: Value, stripe: Value, secret: Value
) -> Value:
    """Take a stripe of the last block; `secret` is where that of the stripe begins."""
    acc, data, key = (load(builder, at, _LANES) for at in (accumulators, stripe, secret))
    return store(builder, accumulators, _accumulated(builder, acc, data, key))


@made
def accumulate_last(builder: ir.IRBuilder, accumulators: Value, stripe: Value) -> Value:
    """Take the last 64 bytes of all, of which some may have been in the stripe before."""
    acc, data = (load(builder, at, _LANES) for at in (accumulators, stripe))
    secret = _secret(len(SECRET) - STRIPE - 7)
    return store(builder, accumulators, _accumulated(builder, acc, data, secret))


def _folded(builder: ir.IRBuilder, left: Value, right: Value) -> Value:
    product = builder.mul(builder.zext(left, _WIDE), builder.zext(right, _WIDE))
    high = builder.lshr(product, ir.Constant(_WIDE, 64))
    return builder.xor(builder.trunc(product, I64), builder.trunc(high, I64))


def _merge(secret: int, first: Callable[[ir.IRBuilder, Value], Value]) -> Any:
    def emit(builder: ir.IRBuilder, accumulators: Value, size: Value) -> Value:
        def keyed(lane: int) -> Value:
            word = load(builder, _ahead(builder, accumulators, 8 * lane), I64)
            return builder.xor(word, ir.Constant(I64, _word(secret + 8 * lane)))

        result = first(builder, size)
        for lane in range(0, 8, 2):
            result = builder.add(result, _folded(builder, keyed(lane), keyed(lane + 1)))
        result = builder.xor(result, builder.lshr(result, ir.Constant(I64, 37)))
        result = builder.mul(result, ir.Constant(I64, _PRIME_MX1))
        return builder.xor(result, builder.lshr(result, ir.Constant(I64, 32)))

    return made(emit)


def _first_low(builder: ir.IRBuilder, size: Value) -> Value:
    return builder.mul(size, ir.Constant(I64, _PRIME64_1))


def _first_high(builder: ir.IRBuilder, size: Value) -> Value:
    return builder.not_(builder.mul(size, ir.Constant(I64, _PRIME64_2)))


#: Return a half of the digest of a text of `size` bytes, as a signed word.
merge_low = _merge(11, _first_low)
merge_high = _merge(len(SECRET) - STRIPE - 11, _first_high)
