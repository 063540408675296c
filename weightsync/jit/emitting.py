"""What compiled functions need and numba lacks: LLVM's instructions, those of vectors above all.

Everything is an int64, also masks and addresses: numba makes floats of mixed signs. Vectors are
LLVM's, so the same code runs on every processor; a few lanes more or less are LLVM's business.
Nothing here checks bounds: who calls does.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["I64", "ZERO", "Value", "call", "load", "made", "mask_of", "splat", "store", "vector"]

Value = Any
I64 = ir.IntType(64)
ZERO = ir.Constant(I64, 0)


def made(emit: Callable[..., Value]) -> Any:
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


def vector(bits: int, lanes: int) -> ir.VectorType:
    """Return the type of `lanes` integers of `bits` each."""
    return ir.VectorType(ir.IntType(bits), lanes)


def splat(kind: ir.VectorType, value: int) -> ir.Constant:
    """Return a vector of one value."""
    return ir.Constant(kind, [value] * kind.count)


def load(builder: ir.IRBuilder, address: Value, kind: ir.Type) -> Value:
    """Read a value from any address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: ir.IRBuilder, address: Value, value: Value) -> Value:
    """Write a value to any address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)
    return ZERO


def mask_of(builder: ir.IRBuilder, lanes: Value) -> Value:
    """Return a vector of conditions as an int64, the first lane in the lowest bit."""
    mask = builder.bitcast(lanes, ir.IntType(lanes.type.count))
    return mask if lanes.type.count == 64 else builder.zext(mask, I64)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: Value) -> Value:
    """Call one of LLVM's own functions by its name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    known = builder.module.globals.get(name)
    return builder.call(known or ir.Function(builder.module, kind, name), values)
