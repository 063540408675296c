"""zstd for one plane: ordinary frames, decompressed into exactly the bytes that were declared."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from weightsync.delta.delta_errors import Broken

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["pack", "pack_text", "unpack"]

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
    """Return the `size` bytes that one frame holds. Releases the GIL.

    The frame's own header is checked before memory is taken, and the decompressor stops at the end
    of these bytes: a lying frame takes no more memory than an honest one.

    Raises:
        Broken: It is not exactly one frame of that size.
    """
    # A copy: its sender may share the memory, and what is checked must be what is unpacked.
    own = bytes(frame)
    try:
        header = zstandard.get_frame_parameters(own)
        if header.content_size != size or header.window_size > 1 << _WINDOW_LOG or header.dict_id:
            raise Broken(f"a frame tells {header.content_size} bytes in place of {size}")
        plane = _contexts.decompressor.decompress(own, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Broken(f"a plane is no zstd frame: {str(error)!a}") from None
    if len(plane) != size:
        raise Broken(f"a frame holds {len(plane)} bytes in place of {size}")
    return np.frombuffer(plane, np.uint8)
