"""Weights that benchmarks push."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "Source"]

_TENSORS_PER_SHARD = 25


class Block(NamedTuple):
    """The tensors of one shard, which lie one after the other.

    Attributes:
        tensors: Name, dtype and shape of each.
        view: Their bytes.
    """

    tensors: Sequence[tuple[str, str, tuple[int, ...]]]
    view: memoryview


class Source:
    """Weights to push: equal shards of equal tensors that lie one after the other.

    Attributes:
        tensors: By name; each shard's data section is exactly `shard_bytes` long.
        shard_bytes: Size of a shard's data.
        spec: Makes one of the same layout.
    """

    def __init__(self, size: int, shards: int) -> None:
        self.spec = size, shards
        self.shard_bytes = size // shards
        self._words: npt.NDArray[np.uint64] = np.zeros(size // 8, dtype=np.uint64)
        self._words[:] = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        flat = self._words.view(np.uint16)
        self.tensors: dict[str, npt.NDArray[np.uint16]] = {}
        for shard, part in enumerate(np.split(flat, shards)):
            cuts = np.linspace(0, len(part), _TENSORS_PER_SHARD + 1).astype(int)
            for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
                self.tensors[f"shard{shard:02}.tensor{index:02}.weight"] = part[begin:end]

    @property
    def view(self) -> memoryview:
        """All bytes."""
        return self._words.data.cast("B")

    @property
    def blocks(self) -> list[Block]:
        """The shards."""
        told = [(name, "U16", tensor.shape) for name, tensor in self.tensors.items()]
        step = self.shard_bytes
        return [
            Block(
                told[shard * _TENSORS_PER_SHARD : (shard + 1) * _TENSORS_PER_SHARD],
                self.view[shard * step : (shard + 1) * step],
            )
            for shard in range(len(self.view) // step)
        ]

    def change(self) -> None:
        """Change every byte."""
        self._words += np.uint64(0x0101010101010101)
