"""How much of the device's memory a rank may use, and the blocks of a load plan laid out in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weightsync.vllm.env import Amount
from weightsync.vllm.plan.halves import LoadPart, ranges_of
from weightsync.vllm.plan.live_params import Targets, view_of
from weightsync.vllm.plan.load_plan import Slice, Strides

logger = logging.getLogger(__name__)


#: What stays free beside all that vLLM may take, unless the user says how much we may.
_RESERVE = 2 << 30
#: What stays free whatever the user says.
_SPARE = 512 << 20
#: Bytes at a multiple of which everything begins that is taken.
_ALIGNED = 256


def aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class MemoryBudget:
    """The budget of one rank, worked out once; what is taken is never more.

    `amount` is what the user set; None is what vLLM leaves, less a reserve. `share` is the part of
    the device that vLLM may take by its own settings.
    """

    def __init__(self, device: torch.device, amount: Amount | None, share: float) -> None:
        self._device = device
        self._amount = amount
        self._share = share
        self._limit: int | None = None
        self.used = 0

    @property
    def limit(self) -> int:
        if self._limit is None:
            self._limit = self._work_out()
        return self._limit

    @limit.setter
    def limit(self, size: int) -> None:
        self._limit = size

    def take(self, size: int) -> torch.Tensor | None:
        """Return so many bytes of the device; None: the room or the device has not got them."""
        size = aligned(size)
        if self.used + size > self.limit or self._free() + self._cached() - size < _SPARE:
            return None
        try:
            taken = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            logger.warning("weightsync: the device does not have %d bytes free", size)
            return None
        self.used += size
        return taken

    def give_back(self, size: int) -> None:
        """Take note that memory of so many bytes, as its tensor tells them, is dropped."""
        self.used -= size

    def _work_out(self) -> int:
        total = self._total()
        if self._amount is not None:
            return self._amount.of(total)
        reserved = torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0
        # vLLM fills its share by and by: its activations were measured, and are not held now.
        owed = max(0, int(total * self._share) - reserved)
        return max(0, self._free() - owed - _RESERVE)

    def _total(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.mem_get_info(self._device)[1])

    def _cached(self) -> int:
        # What was given back before, for one, is torch's, and free for all that.
        if self._device.type != "cuda":
            return 0
        reserved = torch.cuda.memory_reserved(self._device)
        return int(reserved - torch.cuda.memory_allocated(self._device))

    def _free(self) -> int:
        if self._device.type != "cuda":
            return self._amount.of(0) + _SPARE if self._amount else 0
        return int(torch.cuda.mem_get_info(self._device)[0])


class Arena:
    """Device memory for one version at a time, kept from one to the next."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._memory: torch.Tensor | None = None

    def reserve(self, size: int, spare: int = 0) -> torch.Tensor | None:
        """Return memory of at least `size` bytes; None: there is no room.

        The same memory is returned again, with its content, while it is large enough. If there is
        room, `spare` more bytes are taken for later calls.
        """
        if self._memory is None or self._memory.nbytes < size:
            self.drop()
            self._memory = self._budget.take(size + spare)
            if self._memory is None and spare:
                self._memory = self._budget.take(size)
        return self._memory

    def drop(self) -> None:
        if self._memory is not None:
            self._budget.give_back(self._memory.nbytes)
            self._memory = None


@dataclass(frozen=True)
class Block:
    """What is copied at once: from byte `at` of staging memory, without gaps there.

    `place`, in the parameter, has no gaps unless a single slice has some. `parts` are the slices
    that fill it, none in a piece of a block.
    """

    param: str
    dtype: torch.dtype
    place: Strides
    at: int
    parts: tuple[LoadPart, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.place.numel * self.dtype.itemsize

    def staged(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.at : self.at + self.nbytes].view(self.dtype).view(self.place.shape)

    def live(self, targets: Targets) -> torch.Tensor:
        """Return it in the live parameter; call `targets.views` first."""
        return view_of(targets.param(self.param), self.place)

    def pieces(self, limit: int) -> Iterator[Block]:
        """Yield it in pieces of at most so many bytes; one with gaps stays as it is."""
        count = limit // self.dtype.itemsize
        if not self.place.contiguous or self.place.numel <= count:
            yield self
            return
        for begin in range(0, self.place.numel, count):
            size = min(count, self.place.numel - begin)
            place = Strides(self.place.offset + begin, (size,), (1,))
            at = self.at + begin * self.dtype.itemsize
            yield replace(self, place=place, at=at, parts=())


@dataclass(frozen=True)
class Blocks:
    all: tuple[Block, ...]
    size: int


def lay_out(slices: Sequence[Slice], dtypes: Mapping[str, torch.dtype]) -> Blocks:
    """Return the blocks of slices that do not overlap, in the order of parameters."""
    found: list[Block] = []
    at = 0
    for each in ranges_of(slices):
        block = Block(each.param, dtypes[each.param], each.place, at, each.parts)
        found.append(block)
        at += aligned(block.nbytes)
    return Blocks(tuple(found), at)
