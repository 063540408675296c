"""One tensor of the last version, on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weightsync.delta import Item, TensorChange, apply_change
from weightsync.digest import tensor_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightsync_client.tensors import Scratch, SourceTensor

__all__ = ["HostTensor", "all_bytes"]


def all_bytes(tensor: SourceTensor, scratch: Scratch) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, without a copy where its library allows that.

    Raises:
        InvalidError: Its library cannot give them.
    """
    if not tensor.size:
        return np.empty(0, np.uint8)
    return np.frombuffer(tensor.reader(scratch)(0, tensor.size), np.uint8)


class HostTensor:
    """The bytes of one tensor as they were last committed.

    Attributes:
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        data: All its bytes.
        digest: xxh3-128 of them; empty until they are whole.
    """

    __slots__ = ("data", "digest", "dtype", "shape")

    def __init__(self, tensor: SourceTensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        # Not touched before it is written.
        self.data: NDArray[np.uint8] = np.empty(tensor.size, np.uint8)
        self.digest = b""

    @classmethod
    def of(cls, tensor: SourceTensor, scratch: Scratch) -> HostTensor:
        """Return a copy of a tensor as it is now."""
        held = cls(tensor)
        np.copyto(held.data, all_bytes(tensor, scratch))
        held.digest = tensor_digest(held.data.data)
        return held

    def keep(self, offset: int, piece: memoryview) -> None:
        """Take bytes that were sent."""
        self.data[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)

    def window(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return bytes begin to end."""
        return self.data[begin:end]

    def item(self, tensor: SourceTensor, scratch: Scratch) -> Item:
        """Return the tensor before and after, for the encoder."""
        new = all_bytes(tensor, scratch)
        return Item(tensor.name, self.dtype, self.shape, self.data, new, self.digest)

    def advance(self, change: TensorChange) -> None:
        """Become what the delta says."""
        apply_change(change, self.data)
        self.digest = change.digest
