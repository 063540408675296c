"""Many small writes on a device in a launch or two: elements, ranges, and exchanges of ranges.

All memory from the first parameter to the last is looked at as one row of integers, of which
nothing but the wanted places is touched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.gpu.device_kernels import THREADS, Kernels, Launch, cut, fits
from weightsync.model.tensor_bits import INTS
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.apply.writes import write_each
from weightsync.vllm.cuda.memory_budget import Arena, MemoryBudget, aligned
from weightsync.vllm.plan.int_views import memory_of

_POSITION = torch.int64.itemsize
#: Threads of a block, and elements that they write: `DEEP` of kernels.cu each.
_THREADS, _EACH = 256, 256 * 8


class _Memory:
    """Device memory that others own, as torch and others exchange it.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, address: int, count: int, width: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1" if width == 1 else f"<i{width}",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def row_at(device: torch.device, address: int, count: int, width: int) -> torch.Tensor:
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
        positions: Where they are in the row, each once.
        values: What they become, as integers.
        seen: Scratch for as many elements.
        wide: The same scratch as wide integers, zero beyond the last element.
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
        return self.values.nbytes

    def place(self, tensor: torch.Tensor) -> int:
        return (tensor.data_ptr() - self.row.data_ptr()) // self.row.element_size()

    def write(self) -> None:
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
    count = len(positions)
    if kernels is None or not count:
        return None
    # The row as its address alone: others own that memory.
    facts: list[torch.Tensor | int] = [row.data_ptr(), positions, values, count]
    grid = -(-count // _EACH), _THREADS
    return Launch(kernels, f"write_places_{8 * row.element_size()}", grid, facts)


def needed(counts: Mapping[int, int]) -> int:
    return sum(
        aligned(count * part)
        for width, count in counts.items()
        for part in (_POSITION, width, width)
    )


class Scatters:
    """Makes the elements of a patch, in device memory that is kept from one to the next.

    Without `kernels` PyTorch writes them.
    """

    def __init__(self, budget: MemoryBudget, device: torch.device, kernels: Kernels | None) -> None:
        self.arena = Arena(budget)
        self._device = device
        self._kernels = kernels

    def make(
        self, params: Sequence[torch.Tensor], counts: Mapping[int, int]
    ) -> dict[int, Scatter] | None:
        """Return elements of `params` to fill in, by their width; None: there is no room."""
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
        return row_at(self._device, begin, (end - begin) // width, width)


class SpanPairs:
    """Pairs of live and staged memory, at least one, which `fits` has accepted."""

    def __init__(
        self, kernels: Kernels, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        table = np.concatenate([cut(flag, *pair) for flag, pair in enumerate(pairs)])
        device = pairs[0][0].device
        self._table = torch.from_numpy(table).to(device)
        self._flags = torch.zeros(len(pairs), dtype=torch.uint8, device=device)
        # Two, so that a fault can be injected when half is written.
        self.copies = [
            Launch(kernels, "copy_spans", (len(half), THREADS), [half])
            for half in self._table.tensor_split(2)
            if len(half)
        ]
        self._comparison = Launch(
            kernels, "compare_spans", (len(table), THREADS), [self._table, self._flags]
        )

    def compare(self) -> None:
        self._flags.zero_()
        self._comparison.queue()

    def unequal(self) -> list[int]:
        """Wait for the comparison; return which pairs differ."""
        return [pair for pair, flag in enumerate(self._flags.tolist()) if flag]


class SpanExchange:
    """See `Exchange`: each side is read and written once; PyTorch alone copies three times."""

    def __init__(
        self, kernels: Kernels | None, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        fitting = [pair for pair in pairs if kernels is not None and fits(*pair)]
        known = {id(pair) for pair in fitting}
        self._rest = [pair for pair in pairs if id(pair) not in known]
        self._launches = []
        # Launches know addresses only.
        self._kept = fitting
        if kernels is not None and fitting:
            rows = np.concatenate([cut(0, *pair) for pair in fitting])
            table = torch.from_numpy(rows).to(fitting[0][0].device)
            # Two, so that a fault can be injected when half is written.
            self._launches = [
                Launch(kernels, "exchange_spans", (len(half), THREADS), [half])
                for half in table.tensor_split(2)
                if len(half)
            ]

    def run(self, threads: SliceThreads) -> None:
        launches, pairs = self._launches, self._rest

        def exchange(index: int) -> None:
            if index < len(launches):
                launches[index].queue()
                return
            left, right = pairs[index - len(launches)]
            kept = left.clone()
            left.copy_(right)
            right.copy_(kept)

        write_each(threads, exchange, [1] * len(launches) + [left.nbytes for left, _ in pairs])
