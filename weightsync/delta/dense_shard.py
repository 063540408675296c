"""A delta shard of tensors that lie whole in other memory, written where it is to lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from weightsync.delta.coding import Coding, Counts, Positions, Values, element_width
from weightsync.delta.delta_manifest import CHECK_BYTES, DeltaManifest, Record, write_manifest
from weightsync.delta.delta_shard import header_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["DenseDelta", "DenseTensor"]

#: Bytes that are copied at a time.
_PIECE = 4 << 20
_NO_CHECK = bytes(CHECK_BYTES)


class DenseTensor(NamedTuple):
    """A tensor that is new as a whole.

    Attributes:
        name: Its name.
        dtype: safetensors dtype name.
        shape: Dimensions in elements; none of them is 0.
        begin: Where its bytes begin in the source.
        end: Where they end.
        digest: xxh3-128 of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    digest: bytes


class DenseDelta:
    """The delta shard that makes tensors what they are in a source, whatever they were.

    Args:
        index: Index of the shard in its push.
        base_content_digest: Of the version that it changes; 32 hexadecimal digits.
        layout_digest: Signature of its tensors; 32 hexadecimal digits.
        tensors: Those that it makes, in any order.

    Attributes:
        size: Its bytes.
        header_size: Bytes of its safetensors header, without those of the length.
    """

    def __init__(
        self,
        index: int,
        base_content_digest: str,
        layout_digest: str,
        tensors: Sequence[DenseTensor],
    ) -> None:
        self._index = index
        self._facts = index, base_content_digest, layout_digest
        self._tensors = sorted(tensors, key=lambda tensor: tensor.name.encode())
        self._values = sum(tensor.end - tensor.begin for tensor in tensors)
        # What the checks are changes no size.
        head = self._head([_NO_CHECK] * len(tensors))
        self.header_size = int.from_bytes(head[:8], "little")
        self.size = len(head) + self._values

    def write(
        self, target: memoryview, source: memoryview, on_piece: Callable[[], None] = lambda: None
    ) -> None:
        """Fill `target`, of `size` bytes, from the memory that the tensors lie in.

        Args:
            target: Takes the shard.
            source: Has the tensors.
            on_piece: Called now and then; what it raises ends the work.
        """
        ours, theirs = _array(target), _array(source)
        at = self.size - self._values
        checks = []
        for tensor in self._tensors:
            check = xxhash.xxh3_64()
            for begin in range(tensor.begin, tensor.end, _PIECE):
                on_piece()
                piece = theirs[begin : min(begin + _PIECE, tensor.end)]
                # Releases the GIL, as a copy between views does not.
                np.copyto(ours[at : at + len(piece)], piece)
                check.update(ours[at : at + len(piece)].data)
                at += len(piece)
            checks.append(check.digest())
        head = self._head(checks)
        np.copyto(ours[: len(head)], np.frombuffer(head, np.uint8))

    def _head(self, checks: Sequence[bytes]) -> bytes:
        records = tuple(map(_record, self._tensors, checks))
        body = write_manifest(DeltaManifest(*self._facts, records))
        return header_of(self._index, len(body), 0, self._values) + body


def _record(tensor: DenseTensor, check: bytes) -> Record:
    size = tensor.end - tensor.begin
    return Record(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        tensor.digest,
        Coding(Positions.NONE, Values.DENSE),
        Counts(size // element_width(tensor.dtype)),
        (size,),
        (False,),
        (b"", check),
    )


def _array(view: memoryview) -> NDArray[np.uint8]:
    # Of a slice of its own: an array that a traceback still holds must not keep the view.
    return np.frombuffer(view[:], np.uint8)
