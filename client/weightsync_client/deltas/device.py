"""One tensor of the last version, on the device of the trainer's: compared and advanced there.

Of a changed tensor the positions, the values before and after and, to be digested, all bytes come
to the host; of one that did not change, nothing does.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.delta import Changes
from weightsync.delta.coding import element_width
from weightsync.digest import TensorDigester
from weightsync_client.deltas.held import all_bytes
from weightsync_client.fallback import Fallback, Unfit
from weightsync_client.tensors import Scratch, settle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightsync.delta import TensorChange
    from weightsync_client.tensors import SourceTensor

__all__ = ["DeviceTensor"]

#: Elements that are compared at a time: positions take eight bytes until they are on the host.
_PIECE = 1 << 26
#: Bytes that are digested at a time; small pieces have threads wait for the interpreter.
_BLOCK = 8 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Host memory for what is read belongs to the thread that reads.
_local = threading.local()


def _scratch() -> Scratch:
    found: Scratch | None = getattr(_local, "scratch", None)
    if found is None:
        found = _local.scratch = Scratch(views=True)
    return found


def _digest(tensor: SourceTensor) -> bytes:
    state, read = TensorDigester(), tensor.reader(_scratch())
    for at in range(0, tensor.size, _BLOCK):
        state.update(read(at, min(at + _BLOCK, tensor.size)))
    return state.digest()


def _words(data: torch.Tensor, width: int) -> NDArray[np.uint64]:
    words: NDArray[np.uint64] = data.cpu().numpy().view(f"<u{width}")
    return words


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
        try:
            index, before, after = self._compare(self._flat(tensor))
        except torch.OutOfMemoryError as error:
            raise Unfit(Fallback.NO_ROOM, f"the device is too full to compare: {error}") from None
        elements = len(self._data) // self._width
        return Changes(
            tensor.name,
            self.dtype,
            self.shape,
            index.to(torch.int32 if elements < 1 << 31 else torch.int64).cpu().numpy(),
            _words(before, self._width),
            _words(after, self._width),
            new_digest=partial(_digest, tensor),
            same_digest=lambda: self.digest,
            all_bytes=lambda: all_bytes(tensor, _scratch()),
        )

    def _flat(self, tensor: SourceTensor) -> torch.Tensor:
        """Return all bytes of a tensor on this device, wherever it lies by now."""
        if tensor.flat is None:
            return torch.from_numpy(all_bytes(tensor, _scratch()).copy()).to(self._data.device)
        return tensor.flat().to(self._data.device)

    def _compare(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        new, old = flat.view(_WORDS[self._width]), self._data.view(_WORDS[self._width])
        found = []
        for at in range(0, len(old), _PIECE):
            where = torch.nonzero(new[at : at + _PIECE] != old[at : at + _PIECE]).reshape(-1)
            found.append(where + at)
        index = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=new.device)
        after = new[index]
        if len(index) * (8 + self._width) < len(flat):
            self._next = index, after
        else:
            self._next = None, new.clone()
        return index, old[index], after

    def advance(self, change: TensorChange) -> None:
        """Become what the last `item` told; the change brings its digest."""
        if self._next is None:
            msg = f"tensor {change.name!r} was not compared"
            raise RuntimeError(msg)
        index, values = self._next
        words = self._data.view(_WORDS[self._width])
        if index is None:
            words.copy_(values)
        else:
            words[index] = values
        # It is read again, and the memory of the values is used again, on other streams.
        settle(self._data.device)
        self.digest = change.digest
        self.forget()

    def forget(self) -> None:
        """Let go of what a delta that was not committed has left."""
        self._next = None
