"""Codings of one tensor's changes; `docs/reference/delta-format.md` specifies every bit."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.dtypes import DTYPE_BITS


class DeltaError(WeightSyncError):
    """A delta that cannot be made or used; no byte of a base was changed."""


class Broken(Exception):  # noqa: N818 - no error yet: the caller knows the tensor's name
    """A stream contradicts its counts. Raised by kernels before they write outside."""


def invalid(text: str) -> DeltaError:
    """Return the error for bytes that are no delta of this format."""
    return DeltaError(Reason.SHARD_INVALID, f"{text}; encode the delta again as wsd1")


def corrupt(text: str) -> DeltaError:
    """Return the error for bytes that changed after they were encoded."""
    return DeltaError(Reason.DIGEST_MISMATCH, f"{text}; send the shard again")


def unfit(text: str) -> DeltaError:
    """Return the error for a delta of other tensors than those it is to be applied to."""
    return DeltaError(Reason.LAYOUT_INVALID, f"{text}; push the full version")


class Positions(enum.IntEnum):
    """How the positions of changed elements are written. Code point 4 is kept free."""

    #: None are: the values are all of the tensor.
    NONE = 0
    #: Gaps in 16 bits, as a plane of low and one of high bytes.
    GAP16 = 1
    #: Gaps in 8 bits.
    GAP8 = 2
    #: One bit per element.
    BITMAP = 3


class Values(enum.IntEnum):
    """How the values of changed elements are written."""

    #: All bytes of the tensor.
    DENSE = 0
    #: New values, one plane per byte of the element.
    ABS = 1
    #: Sign and magnitude of the difference of the bits; two-byte elements only.
    SM = 2


#: A gap entry of this value moves on by so many elements and marks none.
SKIP = {Positions.GAP8: 0xFF, Positions.GAP16: 0xFFFF}


@dataclass(frozen=True, slots=True)
class Counts:
    """What the sizes of all planes follow from.

    `skips` are gap entries that mark no element. Of SM, `large` are differences other than +1 and
    -1, and `wide` those beyond 256 in magnitude.
    """

    changed: int
    skips: int = 0
    large: int = 0
    wide: int = 0


@dataclass(frozen=True, slots=True)
class Coding:
    """How one tensor is coded."""

    positions: Positions
    values: Values

    def __str__(self) -> str:
        if self.values is Values.DENSE:
            return "dense"
        return f"{self.positions.name}+{self.values.name}".lower()


def element_width(dtype: str) -> int:
    """Return the bytes of what counts as one element; that of dtypes below a byte is the byte."""
    return max(DTYPE_BITS[dtype], 8) // 8


def total_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor whose dtype and shape were checked."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def check_counts(coding: Coding, width: int, elements: int, counts: Counts) -> None:
    """Refuse, as SHARD_INVALID, counts that such a tensor cannot have; `width` is in bytes."""
    if (coding.positions is Positions.NONE) != (coding.values is Values.DENSE):
        raise invalid(
            f"positions are coded as {coding.positions.name} and values as {coding.values.name}, "
            "which do not go together"
        )
    if coding.values is Values.SM and width != 2:
        raise invalid(
            f"values of elements of {width} bytes are coded as SM, which is for 2 bytes alone"
        )
    most_skips = (elements - counts.changed) // SKIP.get(coding.positions, elements + 1)
    good = (
        1 <= counts.changed <= elements
        and counts.skips <= most_skips
        and counts.wide <= counts.large <= counts.changed
        and (coding.values is not Values.DENSE or counts.changed == elements)
    )
    if not good:
        raise invalid(
            f"{counts.changed} changes, {counts.skips} skips, {counts.large} large and "
            f"{counts.wide} wide differences in {elements} elements, which is impossible"
        )


def plane_sizes(
    coding: Coding, width: int, elements: int, counts: Counts
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes in bytes of the planes of positions and of values."""
    entries, bits = counts.changed + counts.skips, -(-counts.changed // 8)
    positions = {
        Positions.NONE: (),
        Positions.GAP16: (entries, entries),
        Positions.GAP8: (entries,),
        Positions.BITMAP: (-(-elements // 8),),
    }[coding.positions]
    values = {
        Values.DENSE: (elements * width,),
        Values.ABS: (counts.changed,) * width,
        Values.SM: (bits, bits, counts.large, counts.wide, counts.wide),
    }[coding.values]
    return positions, values


#: Frames need no larger window, so that a receiver's memory is bounded besides the plane itself.
_WINDOW_LOG = 17
#: On these streams as small as level 1 and up to three times as fast: matches hardly exist, so the
#: search is cut short, and Huffman coding, which a target length would turn off, does the work.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=7,
    chain_log=6,
    window_log=_WINDOW_LOG,
    search_log=1,
    target_length=0,
)
#: For names, which do match: the ordinary level, with the window that receivers allow.
_TEXT = zstandard.ZstdCompressionParameters.from_level(3, window_log=_WINDOW_LOG)
#: A frame around fewer bytes is larger than they are.
_LEAST = 32


class _Contexts(threading.local):
    """Those of one thread: none is for two at once."""

    @cached_property
    def compressor(self) -> zstandard.ZstdCompressor:
        return zstandard.ZstdCompressor(compression_params=_PARAMETERS)

    @cached_property
    def decompressor(self) -> zstandard.ZstdDecompressor:
        return zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)


_contexts = _Contexts()


def pack(plane: NDArray[np.uint8]) -> bytes | None:
    """Return the plane as one zstd frame, or None where that is no smaller. Releases the GIL."""
    if len(plane) < _LEAST:
        return None
    frame = _contexts.compressor.compress(plane.data)
    return frame if len(frame) < len(plane) else None


def pack_text(text: bytes) -> bytes:
    """Return the text as one zstd frame, or as it is where that is no smaller."""
    frame = zstandard.ZstdCompressor(compression_params=_TEXT).compress(text)
    # Equal sizes would read as text.
    return frame if len(frame) < len(text) else text


def unpack(frame: memoryview, size: int) -> NDArray[np.uint8]:
    """Return the `size` bytes that one frame holds, else raise `Broken`. Releases the GIL.

    A frame that lies about its size takes no more memory than an honest one.
    """
    # A copy: its sender may share the memory, and what is checked must be what is unpacked.
    own = bytes(frame)
    try:
        header = zstandard.get_frame_parameters(own)
        if header.content_size != size or header.window_size > 1 << _WINDOW_LOG or header.dict_id:
            raise Broken(f"a frame declares {header.content_size} bytes instead of {size}")
        plane = _contexts.decompressor.decompress(own, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Broken(f"a plane is not a zstd frame: {str(error)!a}") from None
    if len(plane) != size:
        raise Broken(f"a frame holds {len(plane)} bytes instead of {size}")
    return np.frombuffer(plane, np.uint8)


#: What kernels say is wrong.
WRONG_BITMAP = "its bitmap does not mark as many elements as declared, or marks one beyond the end"
WRONG_GAPS = "its gaps do not mark as many elements as declared, or mark one beyond the end"
WRONG_PLACES = "a position is outside the tensor"
WRONG_SM = "its large or wide differences are not as many as declared, or no such"

#: Contiguous bytes.
Bytes = NDArray[np.uint8]
#: Positions of elements, int32 or int64.
Indices = NDArray[Any]
#: Unsigned integers as wide as an element.
Words = NDArray[Any]


class Coded(NamedTuple):
    """The planes of one tensor, and the counts that their sizes follow from."""

    counts: Counts
    positions: Sequence[Bytes]
    values: Sequence[Bytes]
