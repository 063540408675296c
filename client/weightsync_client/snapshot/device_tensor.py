"""Tensors of the last version on the trainer's device: compared and advanced there.

Of a changed tensor the positions and the values before and after come to the host and, where the
device cannot digest it, all its bytes; of one that did not change, nothing does.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weightsync.delta import Changes
from weightsync.delta.coding import element_width
from weightsync.errors import Reason
from weightsync.gpu.device_digest import DeviceDigests
from weightsync.gpu.device_kernels import KernelError, kernels_of
from weightsync.model.digest import TensorDigester
from weightsync_client.errors import refuse
from weightsync_client.push_reasons import Fallback, Unfit
from weightsync_client.snapshot.changed_elements import find_changed, on_host
from weightsync_client.snapshot.host_tensor import all_bytes, own_scratch
from weightsync_client.source.tensors import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from weightsync.delta import TensorChange
    from weightsync.gpu.device_kernels import Kernels
    from weightsync.gpu.finder import Pair
    from weightsync_client.snapshot.changed_elements import ChangedElements
    from weightsync_client.source.tensors import Scratch, SourceTensor

__all__ = ["DeviceTensor", "changes_of"]

logger = logging.getLogger(__name__)

#: Bytes that are digested at a time; small pieces have threads wait for the interpreter.
_BLOCK = 8 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(tensor: SourceTensor) -> bytes:
    state, read = TensorDigester(), tensor.reader(own_scratch())
    for at in range(0, tensor.size, _BLOCK):
        state.update(read(at, min(at + _BLOCK, tensor.size)))
    return state.digest()


class DeviceTensor:
    """The bytes of one tensor as they were last committed, on its device; see `SnapshotTensor`.

    Raises:
        MemoryError: The device has no room for it.
    """

    def __init__(self, tensor: SourceTensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.digest = b""
        self._width = element_width(tensor.dtype)
        self._source: SourceTensor | None = tensor
        #: Positions (None: all) and values that the delta in hand will leave here.
        self._next: tuple[torch.Tensor | None, torch.Tensor] | None = None
        try:
            self._data = torch.empty(tensor.size, dtype=torch.uint8, device=tensor.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def keep(self, offset: int, _: memoryview) -> None:
        """Take a copy of the whole tensor on its device when its first bytes are sent."""
        if offset == 0 and self._source is not None:
            self._data.copy_(self._flat(self._source))
            # Once a push has told that its tensors are free, they may change at once.
            settle(self._data.device)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._data.device

    def seal(self, digest: bytes) -> None:
        """Note the digest of what was kept, which is whole now."""
        self.digest, self._source = digest, None

    def fill(self, tensor: SourceTensor, _: Scratch) -> None:
        """Take a copy of a tensor as it is now."""
        self._data.copy_(self._flat(tensor))
        self.seal(_digest(tensor))

    def window(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return bytes begin to end."""
        data: NDArray[np.uint8] = self._data[begin:end].cpu().numpy()
        return data

    def item(self, tensor: SourceTensor, _: Scratch) -> Changes:
        """Return what differs, for the encoder; keep what `advance` needs.

        Raises:
            Unfit: The device has no room for that.
        """
        (changes,) = changes_of([(self, tensor)])
        return changes

    def _flat(self, tensor: SourceTensor) -> torch.Tensor:
        """Return all bytes of a tensor on this device, wherever it lies by now."""
        if tensor.flat is None:
            return torch.from_numpy(all_bytes(tensor, own_scratch()).copy()).to(self._data.device)
        return tensor.flat().to(self._data.device)

    def words(self, tensor: SourceTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is held and the tensor as it is now, as words of the elements' width."""
        kind = _WORDS[self._width]
        return self._data.view(kind), self._flat(tensor).view(kind)

    def found(self, difference: ChangedElements, new: torch.Tensor) -> None:
        """Keep what `advance` needs, whichever is less."""
        index, after = difference.index, difference.after
        few = index.nbytes + after.nbytes < new.nbytes
        self._next = (index, after) if few else (None, new.clone())

    def advance(self, change: TensorChange) -> None:
        """Have the device make it what the last `item` told; the change brings its digest."""
        if self._next is None:
            msg = f"tensor {change.name!r} was not compared"
            raise RuntimeError(msg)
        index, values = self._next
        words = self._data.view(_WORDS[self._width])
        if index is None:
            words.copy_(values)
        else:
            words.index_copy_(0, index.long(), values)
        self.digest = change.digest
        self.forget()

    def forget(self) -> None:
        """Let go of what a delta that was not committed has left."""
        self._next = None


def changes_of(pairs: Sequence[tuple[DeviceTensor, SourceTensor]]) -> list[Changes]:
    """Return what differs in tensors that are held on one device; see `SnapshotTensor.item`.

    Raises:
        ClientError: REQUEST_INVALID: a tensor was changed meanwhile.
        Unfit: The device has no room for that.
    """
    kernels = kernels_of(pairs[0][0].device)
    try:
        try:
            return _changes_of(kernels, pairs)
        except KernelError as error:
            # Such as no room for them beside what PyTorch holds, whose own need no more of it.
            logger.warning("weightsync: PyTorch's kernels compare, ours did not: %s", error)
            return _changes_of(None, pairs)
    except torch.OutOfMemoryError as error:
        raise Unfit(Fallback.NO_ROOM, f"the device is too full to compare: {error}") from None


def _changes_of(
    kernels: Kernels | None, pairs: Sequence[tuple[DeviceTensor, SourceTensor]]
) -> list[Changes]:
    words = [base.words(tensor) for base, tensor in pairs]
    found, meanwhile = find_changed(kernels, words)
    for (base, _), difference, (_, new) in zip(pairs, found, words, strict=True):
        base.found(difference, new)
    parts = [part for d in found for part in (d.index, d.before, d.after)]
    arrays = iter(on_host([*parts, *meanwhile]))
    taken = [(next(arrays), next(arrays), next(arrays)) for _ in pairs]
    if any(flag.any() for flag in arrays):
        raise refuse(
            Reason.REQUEST_INVALID,
            "the tensors changed while they were compared; change them once the push has returned, "
            "or source_free is done",
        )
    digests = _digests(kernels, pairs, words, found)
    return [
        _changes(base, tensor, parts, digests)
        for (base, tensor), parts in zip(pairs, taken, strict=True)
    ]


def _digests(
    kernels: Kernels | None,
    pairs: Sequence[tuple[DeviceTensor, SourceTensor]],
    words: Sequence[Pair],
    found: Sequence[ChangedElements],
) -> DeviceDigests | None:
    """Have the device digest what has changed; None: the host does."""
    if kernels is None:
        return None
    return DeviceDigests(
        kernels,
        {
            tensor.name: new.view(torch.uint8)
            for (_, tensor), (_, new), difference in zip(pairs, words, found, strict=True)
            if len(difference.index)
        },
    )


def _changes(
    base: DeviceTensor,
    tensor: SourceTensor,
    parts: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    digests: DeviceDigests | None,
) -> Changes:
    index, before, after = parts
    unsigned = f"<u{element_width(base.dtype)}"
    new_digest = partial(_digest, tensor)
    if digests is not None and tensor.name in digests.names:
        new_digest = partial(digests.of, tensor.name)
    return Changes(
        tensor.name,
        base.dtype,
        base.shape,
        index,
        before.view(unsigned),
        after.view(unsigned),
        new_digest=new_digest,
        same_digest=lambda: base.digest,
        all_bytes=lambda: all_bytes(tensor, own_scratch()),
    )
