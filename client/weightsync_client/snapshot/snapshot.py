"""The bytes of a version, held whole, and how they get there while they are sent."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from weightsync.model.digest import signature_of
from weightsync_client.snapshot.copy_budget import room_for
from weightsync_client.source.tensors import settle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from weightsync.delta import Changes, Item, Later
    from weightsync_client.snapshot.host_tensor import BaseTensor, SnapshotTensor
    from weightsync_client.source.tensors import Scratch, SourceTensor
    from weightsync_client.types import PushResult

__all__ = ["BaseVersion", "Snapshot", "SnapshotCapture", "StreamingCapture"]


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """A version that a delta is made against.

    Attributes:
        version: Its number.
        content_digest: Its identity: what a delta is bound to.
        size: Bytes that this process sends when it pushes it in full.
        signature: Digest of names, dtypes and shapes.
        run_id: Of its metadata; empty: none.
        tensors: Its tensors by name.
    """

    version: int
    content_digest: str
    size: int
    signature: str
    run_id: str
    tensors: Mapping[str, BaseTensor]

    def items(
        self, tensors: Sequence[SourceTensor], scratch: Scratch
    ) -> list[Item | Later | Changes]:
        """Return tensors before and after, for the encoder.

        Raises:
            Unfit: A device has no room to compare them.
        """
        found: dict[str, Item | Later | Changes] = {}
        together: dict[torch.device, list[SourceTensor]] = {}
        for tensor in tensors:
            base = self.tensors[tensor.name]
            if base.device is None:
                found[tensor.name] = base.item(tensor, scratch)
            else:
                together.setdefault(base.device, []).append(tensor)
        for group in together.values():
            found |= self._compared(group)
        return [found[tensor.name] for tensor in tensors]

    def _compared(self, tensors: Sequence[SourceTensor]) -> dict[str, Changes]:
        """Return what differs in tensors that are held on one device."""
        from weightsync_client.snapshot.device_tensor import DeviceTensor, changes_of

        pairs = [(cast("DeviceTensor", self.tensors[tensor.name]), tensor) for tensor in tensors]
        return {changes.name: changes for changes in changes_of(pairs)}

    def advance(self, blobs: Iterable[NDArray[np.uint8]], threads: int) -> None:
        """Have the tensors become what the shards of a delta make of them."""
        from weightsync.delta import parse_shard

        expect = {name: (t.dtype, t.shape) for name, t in self.tensors.items()}
        with ThreadPoolExecutor(threads, "weightsync-advance") as pool:
            for blob in blobs:
                changes = parse_shard(blob, expect).changes
                list(pool.map(lambda c: self.tensors[c.name].advance(c), changes.values()))
            # They are read again, and the memory of the values is used again, on other streams.
            list(
                pool.map(settle, {t.device for t in self.tensors.values() if t.device is not None})
            )

    def forget(self) -> None:
        """Let go of what a delta that was not committed has left."""
        for tensor in self.tensors.values():
            tensor.forget()


@dataclass(frozen=True, slots=True)
class Snapshot(BaseVersion):
    """A version of which this client has the bytes, whole."""

    tensors: Mapping[str, SnapshotTensor]


class SnapshotCapture:
    """Bytes of a version that is being sent; they become a snapshot once it is committed.

    Args:
        tensors: Where they go, by name.

    Attributes:
        gave_up: There was no room for some of them, so none is kept.
    """

    def __init__(self, tensors: Mapping[str, SnapshotTensor]) -> None:
        self._tensors = dict(tensors)
        self.gave_up = False

    def keep(self, name: str, offset: int, piece: memoryview) -> None:
        """Take bytes of one tensor as they are sent."""
        self._tensors[name].keep(offset, piece)

    @property
    def devices(self) -> set[torch.device]:
        """Where tensors are copied, but for the host."""
        return {t.device for t in self._tensors.values() if t.device is not None}

    def copies(self, name: str) -> bool:
        """Whether a tensor is copied on its device, whole, at its first bytes."""
        tensor = self._tensors.get(name)
        return tensor is not None and tensor.device is not None

    def whole(
        self, result: PushResult, run_id: str, digests: Mapping[str, bytes], size: int
    ) -> Snapshot | None:
        """Return the version that was committed; None if its bytes did not come by here.

        Args:
            result: Of the push.
            run_id: Of its metadata; empty: none.
            digests: Of all tensors that were sent.
            size: Bytes that this process sent.
        """
        # Whoever keeps the push, keeps us as well, and the next version may need the room.
        tensors, self._tensors = self._tensors, {}
        # Without a tensor nothing was sent: the version had been committed before.
        if not tensors or digests.keys() != tensors.keys():
            return None
        for name, tensor in tensors.items():
            tensor.seal(digests[name])
        signature = signature_of((n, tensors[n].dtype, tensors[n].shape) for n in sorted(tensors))
        return Snapshot(result.version, result.content_digest, size, signature, run_id, tensors)


class StreamingCapture(SnapshotCapture):
    """The same for tensors that come one after the other, while there is room for them.

    Args:
        read: Tensors that hold their bytes already, by name.
    """

    def __init__(self, read: Mapping[str, SnapshotTensor]) -> None:
        super().__init__(read)
        self._read = frozenset(read)
        self._lock = threading.Lock()
        #: Bytes of memory that nobody has written to yet, so it still counts as free.
        self._blank = 0

    def add(self, tensors: Sequence[SourceTensor]) -> None:
        """Make room for tensors before their bytes come."""
        fresh = [tensor for tensor in tensors if tensor.name not in self._read]
        with self._lock:
            self._blank += sum(tensor.size for tensor in fresh)
            blank = self._blank
        self.gave_up = self.gave_up or not (room_for(blank) and self._made(fresh))
        if self.gave_up:
            self._tensors = {}

    def _made(self, tensors: Sequence[SourceTensor]) -> bool:
        from weightsync_client.snapshot.host_tensor import HostTensor

        try:
            self._tensors |= {tensor.name: HostTensor(tensor) for tensor in tensors}
        except MemoryError:
            return False
        return True

    def keep(self, name: str, offset: int, piece: memoryview) -> None:
        """Take bytes of one tensor as they are sent, unless it has them."""
        tensor = self._tensors.get(name)
        if tensor is not None and name not in self._read:
            tensor.keep(offset, piece)
            with self._lock:
                self._blank -= len(piece)
