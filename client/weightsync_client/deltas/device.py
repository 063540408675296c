"""Tensors of the last version on the trainer's device: compared and advanced there.

Of a changed tensor the positions, the values before and after and, to be digested, all bytes come
to the host; of one that did not change, nothing does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.delta import Changes
from weightsync.delta.coding import element_width
from weightsync.digest import TensorDigester
from weightsync_client.deltas.differing import differing, on_host
from weightsync_client.deltas.held import all_bytes, own_scratch
from weightsync_client.fallback import Fallback, Unfit
from weightsync_client.tensors import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from weightsync.delta import TensorChange
    from weightsync_client.deltas.differing import Difference
    from weightsync_client.tensors import Scratch, SourceTensor

__all__ = ["DeviceTensor", "changes_of"]

#: Bytes that are digested at a time; small pieces have threads wait for the interpreter.
_BLOCK = 8 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(tensor: SourceTensor) -> bytes:
    state, read = TensorDigester(), tensor.reader(own_scratch())
    for at in range(0, tensor.size, _BLOCK):
        state.update(read(at, min(at + _BLOCK, tensor.size)))
    return state.digest()


class DeviceTensor:
    """The bytes of one tensor as they were last committed, on its device; see `HeldTensor`.

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

    def found(self, difference: Difference, new: torch.Tensor) -> None:
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
    """Return what differs in tensors that are held on one device; see `HeldTensor.item`.

    Raises:
        Unfit: The device has no room for that.
    """
    try:
        words = [held.words(tensor) for held, tensor in pairs]
        found = differing(words)
        for (held, _), difference, (_, new) in zip(pairs, found, words, strict=True):
            held.found(difference, new)
        told = iter(on_host([part for d in found for part in (d.index, d.before, d.after)]))
    except torch.OutOfMemoryError as error:
        raise Unfit(Fallback.NO_ROOM, f"the device is too full to compare: {error}") from None
    return [_changes(held, tensor, next(told), next(told), next(told)) for held, tensor in pairs]


def _changes(
    held: DeviceTensor,
    tensor: SourceTensor,
    index: NDArray[np.int64],
    before: NDArray[np.int64],
    after: NDArray[np.int64],
) -> Changes:
    unsigned = f"<u{element_width(held.dtype)}"
    return Changes(
        tensor.name,
        held.dtype,
        held.shape,
        index,
        before.view(unsigned),
        after.view(unsigned),
        new_digest=partial(_digest, tensor),
        same_digest=lambda: held.digest,
        all_bytes=lambda: all_bytes(tensor, own_scratch()),
    )
