"""One tensor of the last version, on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from weightsync.delta import Changes, Item, TensorChange, apply_change
from weightsync.digest import tensor_digest
from weightsync_client.tensors import SourceTensor

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from weightsync_client.tensors import Read, Scratch

__all__ = ["HeldTensor", "HostTensor", "all_bytes", "held_source"]

#: Bytes that are read from a device at a time.
_BLOCK = 16 << 20


class HeldTensor(Protocol):
    """The bytes of one tensor as they were last committed, wherever they lie.

    Attributes:
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        digest: xxh3-128 of them; empty until they are whole.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: bytes

    @property
    def device(self) -> torch.device | None:
        """Where they lie and are compared; None: on the host."""

    def keep(self, offset: int, piece: memoryview) -> None:
        """Take bytes that were sent."""

    def seal(self, digest: bytes) -> None:
        """Note the digest of what was kept, which is whole now."""

    def fill(self, tensor: SourceTensor, scratch: Scratch) -> None:
        """Take a copy of a tensor as it is now."""

    def window(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return bytes begin to end."""

    def item(self, tensor: SourceTensor, scratch: Scratch) -> Item | Changes:
        """Return the tensor before and after, for the encoder."""

    def advance(self, change: TensorChange) -> None:
        """Become what the delta says, the last one whose `item` was asked for.

        On a device that is queued: whoever waits for it there waits for this.
        """

    def forget(self) -> None:
        """Let go of what a delta that was not committed has left."""


def all_bytes(tensor: SourceTensor, scratch: Scratch) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, without a copy where its library allows that.

    Raises:
        InvalidError: Its library cannot give them.
    """
    if not tensor.size:
        return np.empty(0, np.uint8)
    read = tensor.reader(scratch)
    if tensor.device is None:
        return np.frombuffer(read(0, tensor.size), np.uint8)
    data = np.empty(tensor.size, np.uint8)
    for at in range(0, tensor.size, _BLOCK):
        end = min(at + _BLOCK, tensor.size)
        data[at:end] = np.frombuffer(read(at, end), np.uint8)
    return data


def held_source(name: str, held: HeldTensor) -> SourceTensor:
    """Return the tensor that is held, to be pushed."""

    def open_held(_: Scratch) -> Read:
        return lambda begin, end: held.window(begin, end).data

    return SourceTensor(name, held.dtype, held.shape, open_held)


class HostTensor:
    """The bytes of one tensor as they were last committed.

    Attributes:
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        data: All its bytes.
        digest: xxh3-128 of them; empty until they are whole.
    """

    __slots__ = ("data", "digest", "dtype", "shape")

    device = None

    def __init__(self, tensor: SourceTensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        # Not touched before it is written.
        self.data: NDArray[np.uint8] = np.empty(tensor.size, np.uint8)
        self.digest = b""

    def keep(self, offset: int, piece: memoryview) -> None:
        """Take bytes that were sent."""
        self.data[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)

    def seal(self, digest: bytes) -> None:
        """Note the digest of what was kept, which is whole now."""
        self.digest = digest

    def fill(self, tensor: SourceTensor, scratch: Scratch) -> None:
        """Take a copy of a tensor as it is now."""
        np.copyto(self.data, all_bytes(tensor, scratch))
        self.digest = tensor_digest(self.data.data)

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

    def forget(self) -> None:
        """Do nothing: a delta leaves nothing here."""
