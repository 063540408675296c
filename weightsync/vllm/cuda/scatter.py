"""Single elements of all parameters written at once, wherever on the device each lies.

A launch for each parameter costs more than what it writes. So all memory from the first parameter
to the last is looked at as one row of integers, and a place is a position in that row. Nothing of
the row is touched but those places.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightsync.gpu.device_kernels import Launch
from weightsync.vllm.cuda.memory_budget import Arena, aligned
from weightsync.vllm.plan.int_views import INTS, memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.cuda.memory_budget import MemoryBudget

__all__ = ["Scatter", "Scatters", "launch_of", "needed"]

_POSITION = torch.int64.itemsize
#: Threads of a block, and elements that they write: `DEEP` of kernels.cu each.
_THREADS, _EACH = 256, 256 * 8


class _Memory:
    """Device memory that others own, as torch and others exchange it."""

    def __init__(self, address: int, count: int, width: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1" if width == 1 else f"<i{width}",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _row(device: torch.device, address: int, count: int, width: int) -> torch.Tensor:
    """Return memory from an address on as one row of integers, without touching it."""
    if device.type == "cuda":
        return torch.as_tensor(_Memory(address, count, width), device=device)
    memory = (ctypes.c_uint8 * (count * width)).from_address(address)
    return torch.frombuffer(memory, dtype=INTS[width])


@dataclass(frozen=True)
class Scatter:
    """Elements of one width.

    Attributes:
        row: The memory from the first parameter of that width to the last.
        positions: Where in the row, each once.
        values: What they become, as integers.
        seen: Room for as many, to look at them.
        wide: The same room as wide integers; what is beyond the last element is zero.
        launch: Writes them; None: PyTorch does.
    """

    row: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor
    seen: torch.Tensor
    wide: torch.Tensor
    launch: Launch | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values.nbytes

    def place(self, tensor: torch.Tensor) -> int:
        """Return the position of a tensor's first element, which lies in the row."""
        return (tensor.data_ptr() - self.row.data_ptr()) // self.row.element_size()

    def write(self) -> None:
        """Queue the writing of all."""
        if self.launch is not None:
            self.launch.queue()
        else:
            self.row.index_copy_(0, self.positions, self.values)

    def differs(self) -> torch.Tensor:
        """Queue a look at all; return, without dimensions, whether any is not as written."""
        torch.gather(self.row, 0, self.positions, out=self.seen)
        self.seen.bitwise_xor_(self.values)
        return torch.any(self.wide)


def launch_of(
    kernels: Kernels | None, row: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
) -> Launch | None:
    """Return what writes elements; None without kernels. See `Scatter`."""
    count = len(positions)
    if kernels is None or not count:
        return None
    # The row as its address alone: others own that memory.
    facts: list[torch.Tensor | int] = [row.data_ptr(), positions, values, count]
    grid = -(-count // _EACH), _THREADS
    return Launch(kernels, f"write_places_{8 * row.element_size()}", grid, facts)


def needed(counts: Mapping[int, int]) -> int:
    """Return the bytes that a patch takes.

    Args:
        counts: Elements by their width.
    """
    return sum(
        aligned(count * part)
        for width, count in counts.items()
        for part in (_POSITION, width, width)
    )


class Scatters:
    """Makes the elements of a patch, in device memory that is kept from one to the next.

    Args:
        budget: Where it comes from.
        device: Where the parameters lie.
        kernels: Write them; None: PyTorch's do.

    Attributes:
        arena: The memory of the patch that was made last.
    """

    def __init__(self, budget: MemoryBudget, device: torch.device, kernels: Kernels | None) -> None:
        self.arena = Arena(budget)
        self._device = device
        self._kernels = kernels

    def make(
        self, params: Sequence[torch.Tensor], counts: Mapping[int, int]
    ) -> dict[int, Scatter] | None:
        """Return elements to fill in, by their width; None: there is no room for them.

        Args:
            params: The parameters that they lie in.
            counts: How many, by their width.
        """
        if not counts:
            return {}
        size = needed(counts)
        memory = self.arena.reserve(size, spare=size // 8)
        if memory is None:
            return None
        made: dict[int, Scatter] = {}
        left = memory
        for width, count in counts.items():
            regions = []
            for each in (_POSITION, width, width):
                size = aligned(count * each)
                regions.append(left[:size])
                left = left[size:]
            positions = regions[0].view(torch.int64)[:count]
            values, seen = (region.view(INTS[width])[:count] for region in regions[1:])
            regions[2].zero_()
            row = self._covering([p for p in params if p.element_size() == width], width)
            wide = regions[2].view(torch.int64)
            launch = launch_of(self._kernels, row, positions, values)
            made[width] = Scatter(row, positions, values, seen, wide, launch)
        return made

    def _covering(self, params: Sequence[torch.Tensor], width: int) -> torch.Tensor:
        begin = min(param.data_ptr() for param in params)
        end = max(param.data_ptr() + memory_of(param).nbytes for param in params)
        return _row(self._device, begin, (end - begin) // width, width)
