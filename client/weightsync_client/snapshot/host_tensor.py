"""One tensor of the last version, on the host."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from weightsync.delta import Changes, Item, Later, TensorChange, apply_change
from weightsync.model.digest import tensor_digest
from weightsync_client.source.tensors import Scratch, SourceTensor

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from weightsync_client.source.tensors import Read

__all__ = [
    "BaseTensor",
    "HostTensor",
    "SnapshotTensor",
    "all_bytes",
    "own_scratch",
    "snapshot_source",
]

#: Memory of more bytes is not kept for the next tensor.
_KEPT = 256 << 20
# Host memory for what is read belongs to the thread that reads.
_local = threading.local()


def own_scratch() -> Scratch:
    """Return the calling thread's own; what was read through it is not kept by anybody."""
    found: Scratch | None = getattr(_local, "scratch", None)
    if found is None:
        found = _local.scratch = Scratch(views=True)
    return found


def _own_room(size: int) -> NDArray[np.uint8]:
    """Return memory of the calling thread, the same again where it suffices: pages cost time."""
    room: NDArray[np.uint8] | None = getattr(_local, "room", None)
    if room is None or len(room) < size:
        room = np.empty(size, np.uint8)
        if size <= _KEPT:
            _local.room = room
    return room[:size]


class BaseTensor(Protocol):
    """One tensor of a version that a delta is made against.

    Attributes:
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        digest: xxh3-128 of its bytes; empty until they are whole.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: bytes

    @property
    def device(self) -> torch.device | None:
        """Where they lie and are compared; None: on the host."""

    def item(self, tensor: SourceTensor, scratch: Scratch) -> Item | Later | Changes:
        """Return the tensor before and after, for the encoder."""

    def advance(self, change: TensorChange) -> None:
        """Become what the delta says, the last one whose `item` was asked for.

        On a device that is queued: whoever waits for it there waits for this.
        """

    def forget(self) -> None:
        """Let go of what a delta that was not committed has left."""


class SnapshotTensor(BaseTensor, Protocol):
    """The bytes of one tensor as they were last committed, wherever they lie."""

    def keep(self, offset: int, piece: memoryview) -> None:
        """Take bytes that were sent."""

    def seal(self, digest: bytes) -> None:
        """Note the digest of what was kept, which is whole now."""

    def fill(self, tensor: SourceTensor, scratch: Scratch) -> None:
        """Take a copy of a tensor as it is now."""

    def window(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return bytes begin to end."""


def all_bytes(
    tensor: SourceTensor, scratch: Scratch, room: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, without a copy where its library allows that.

    Args:
        tensor: Any.
        scratch: What a device's bytes come through.
        room: Takes those of a tensor that lies on a device; None: memory of their own.

    Raises:
        InvalidError: Its library cannot give them.
    """
    if not tensor.size:
        return np.empty(0, np.uint8)
    if tensor.device is None:
        return np.frombuffer(tensor.reader(scratch)(0, tensor.size), np.uint8)
    data = np.empty(tensor.size, np.uint8) if room is None else room
    tensor.copy_into(data, scratch)
    return data


def snapshot_source(name: str, tensor: SnapshotTensor) -> SourceTensor:
    """Return the tensor that is held, to be pushed."""

    def open_tensor(_: Scratch) -> Read:
        return lambda begin, end: tensor.window(begin, end).data

    return SourceTensor(name, tensor.dtype, tensor.shape, open_tensor)


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
        tensor.copy_into(self.data, scratch)
        self.digest = tensor_digest(self.data.data)

    def window(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return bytes begin to end."""
        return self.data[begin:end]

    def item(self, tensor: SourceTensor, scratch: Scratch) -> Item | Later:
        """Return the tensor before and after, for the encoder."""
        if tensor.device is None or not tensor.in_place:
            # What must be gathered on its device first takes room there: one at a time.
            return self._item(tensor, all_bytes(tensor, scratch))
        # A device fills the memory of several threads faster than that of one.
        return Later(tensor.name, self.dtype, self.shape, partial(self._read, tensor))

    def _read(self, tensor: SourceTensor) -> Item:
        return self._item(tensor, all_bytes(tensor, own_scratch(), _own_room(tensor.size)))

    def _item(self, tensor: SourceTensor, new: NDArray[np.uint8]) -> Item:
        return Item(tensor.name, self.dtype, self.shape, self.data, new, self.digest)

    def advance(self, change: TensorChange) -> None:
        """Become what the delta says."""
        apply_change(change, self.data)
        self.digest = change.digest

    def forget(self) -> None:
        """Do nothing: a delta leaves nothing here."""
