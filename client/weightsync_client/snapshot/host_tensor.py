"""One tensor of the last version: on the host, or at the server alone."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from weightsync.delta import Changes, Item, Later, TensorChange, WholeTensor, apply_change
from weightsync.model.digest import tensor_digest
from weightsync_client.source.tensors import Read, Scratch, SourceTensor
from weightsync_client.types import TensorInfo

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


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
    """One tensor that a delta is made against; its `digest`, xxh3-128, is empty until whole."""

    dtype: str
    shape: tuple[int, ...]
    digest: bytes

    @property
    def device(self) -> torch.device | None:
        """Where they lie and are compared; None: on the host."""

    def item(self, tensor: SourceTensor, scratch: Scratch) -> Item | Later | Changes:
        """Return the tensor before and after, for the encoder."""

    def advance(self, change: TensorChange) -> None:
        """Become what the delta of the last `item` says; on a device that is only queued."""

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

    A device's come through `scratch` into `room`, or with None into new memory.
    """
    if not tensor.size:
        return np.empty(0, np.uint8)
    if tensor.device is None:
        return np.frombuffer(tensor.reader(scratch)(0, tensor.size), np.uint8)
    data = np.empty(tensor.size, np.uint8) if room is None else room
    tensor.copy_into(data, scratch)
    return data


def snapshot_source(name: str, tensor: SnapshotTensor) -> SourceTensor:
    def open_tensor(_: Scratch) -> Read:
        return lambda begin, end: tensor.window(begin, end).data

    return SourceTensor(name, tensor.dtype, tensor.shape, open_tensor)


class HostTensor:
    """A `SnapshotTensor` on the host; its `digest` is empty until `data` is whole."""

    __slots__ = ("data", "digest", "dtype", "shape")

    device = None

    def __init__(self, tensor: SourceTensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        # Not touched before it is written.
        self.data: NDArray[np.uint8] = np.empty(tensor.size, np.uint8)
        self.digest = b""

    def keep(self, offset: int, piece: memoryview) -> None:
        self.data[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)

    def seal(self, digest: bytes) -> None:
        self.digest = digest

    def fill(self, tensor: SourceTensor, scratch: Scratch) -> None:
        tensor.copy_into(self.data, scratch)
        self.digest = tensor_digest(self.data.data)

    def window(self, begin: int, end: int) -> NDArray[np.uint8]:
        return self.data[begin:end]

    def item(self, tensor: SourceTensor, scratch: Scratch) -> Item | Later:
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
        apply_change(change, self.data)
        self.digest = change.digest

    def forget(self) -> None:
        """Do nothing: a delta leaves nothing here."""


class RemoteTensor:
    """See `BaseTensor`: what is known of a tensor without its bytes."""

    __slots__ = ("digest", "dtype", "shape")

    device = None

    def __init__(self, info: TensorInfo) -> None:
        self.dtype, self.shape = info.dtype, info.shape
        self.digest = bytes.fromhex(info.digest)

    def item(self, tensor: SourceTensor, scratch: Scratch) -> Later:
        """All of it is sent, unless its digest is the same."""
        del scratch
        return Later(tensor.name, self.dtype, self.shape, partial(self._read, tensor))

    def _read(self, tensor: SourceTensor) -> WholeTensor:
        new = all_bytes(tensor, own_scratch())
        return WholeTensor(tensor.name, self.dtype, self.shape, new, self.digest)

    def advance(self, change: TensorChange) -> None:
        self.digest = change.digest

    def forget(self) -> None:
        """Do nothing: a delta leaves nothing here."""
