"""How a tensor that was given differs from the one that was wanted, in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["unlike"]

#: Characters of a name.
_SHOWN = 80


def unlike(name: str, given: tuple[str, Sequence[int]], wanted: tuple[str, Sequence[int]]) -> str:
    """Return a clause with what a tensor is, and what the engine has.

    Args:
        name: Of the tensor.
        given: Its dtype and shape.
        wanted: Those of the engine; several dtypes are joined by " or ".
    """
    shown = name if len(name) <= _SHOWN else name[: _SHOWN - 3] + "..."
    (dtype, shape), (wanted_dtype, wanted_shape) = given, wanted
    clause = (
        f"tensor {shown} is {dtype} {list(shape)}, the engine has {wanted_dtype} "
        f"{list(wanted_shape)}"
    )
    longer = len(shape) == len(wanted_shape) > 0 and shape[0] > wanted_shape[0]
    if longer and list(shape[1:]) == list(wanted_shape[1:]):
        clause += (
            f" (it has {shape[0]} rows, the engine has {wanted_shape[0]}: cut a vocabulary that is "
            "padded)"
        )
    return clause
