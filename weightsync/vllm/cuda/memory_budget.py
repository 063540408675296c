"""How much of the device's memory a rank may take beside vLLM, and how much of it is taken."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weightsync.vllm.env import Amount

__all__ = ["Arena", "MemoryBudget", "aligned"]

logger = logging.getLogger(__name__)

#: What stays free beside all that vLLM may take, unless the user says how much we may.
_RESERVE = 2 << 30
#: What stays free whatever the user says.
_SPARE = 512 << 20
#: Bytes at a multiple of which everything begins that is taken.
_ALIGNED = 256


def aligned(size: int) -> int:
    """Return how many bytes of device memory something of so many bytes takes."""
    return -(-size // _ALIGNED) * _ALIGNED


class MemoryBudget:
    """The budget of one rank. It is worked out once, and what is taken is never more.

    Args:
        device: Of the rank.
        amount: What the user set; None: what vLLM leaves, less a reserve.
        share: Part of the device that vLLM may take by its own settings.
    """

    def __init__(self, device: torch.device, amount: Amount | None, share: float) -> None:
        self._device = device
        self._amount = amount
        self._share = share
        self._limit: int | None = None
        self.used = 0

    @property
    def limit(self) -> int:
        """Bytes that may be taken in all."""
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
            logger.warning("weightsync: the device has not got %d bytes", size)
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
    """Device memory for one version at a time, kept from one to the next.

    Args:
        budget: Where it comes from.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._memory: torch.Tensor | None = None

    def reserve(self, size: int, spare: int = 0) -> torch.Tensor | None:
        """Return memory of at least `size` bytes; None: there is no room.

        As long as that which is here is large enough, it is returned again, and keeps its content.

        Args:
            size: Bytes that are needed.
            spare: Bytes more, if there is room, so that what comes next finds room in it.
        """
        if self._memory is None or self._memory.nbytes < size:
            self.drop()
            self._memory = self._budget.take(size + spare)
            if self._memory is None and spare:
                self._memory = self._budget.take(size)
        return self._memory

    def drop(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._budget.give_back(self._memory.nbytes)
            self._memory = None
