"""The bytes of a staged version as tensors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.model.dtypes import torch_dtype
from weightsync.vllm.plan.live_params import view_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.model.manifest import Layout, TensorEntry
    from weightsync.vllm.plan.load_plan import Slice

__all__ = ["StagedTensors"]

#: Elements that are looked at together.
_PIECE = 1 << 16


def _as_tensor(view: memoryview) -> torch.Tensor:
    # Through numpy, which keeps the buffer exported: unmapping it fails instead of crashing later
    # readers, as it would with torch.frombuffer.
    with warnings.catch_warnings():
        # The mapping is read-only and nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.frombuffer(view, dtype=np.uint8))


class StagedTensors:
    """Tensors of a staged version, read where the server received them.

    Args:
        layout: Where each tensor lies.
        views: The bytes of each shard's segment.

    Attributes:
        copied: A tensor lay at an odd address, so that what was returned is a copy.

    Raises:
        ValueError: A segment is smaller than its shard.
    """

    def __init__(self, layout: Layout, views: Sequence[memoryview]) -> None:
        for shard, view in zip(layout.shards, views, strict=True):
            if view.nbytes < shard.size:
                msg = f"the segment of shard {shard.name} has {view.nbytes} bytes, not {shard.size}"
                raise ValueError(msg)
        self.copied = False
        self._layout = layout
        self._shards = [_as_tensor(view) for view in views]
        self._entries = {entry.name: entry for entry in layout.tensors}
        self._turns = {shard: turn for turn, shard in enumerate(layout.largest_first)}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor without a copy, or with one where it lies at an odd address."""
        entry: TensorEntry = self._entries[name]
        raw = self.raw(entry.shard, entry.begin, entry.end)
        dtype = torch_dtype(entry.dtype)
        assert dtype is not None  # noqa: S101 - the plan was captured with it
        if raw.numel() == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
            raw, self.copied = raw.clone(), True
        return raw.view(dtype).view(entry.shape)

    def entry(self, name: str) -> TensorEntry:
        """Return where a tensor lies."""
        return self._entries[name]

    def raw(self, shard: int, begin: int, end: int) -> torch.Tensor:
        """Return bytes of a shard's data section, without a copy."""
        start = self._layout.shards[shard].data_start
        return self._shards[shard][start + begin : start + end]

    def uniform(self, name: str) -> bool:
        """Tell whether a tensor holds one value all over, bit for bit."""
        tensor = self.tensor(name)
        rows = tensor.reshape(-1).view(torch.uint8).reshape(-1, tensor.element_size())
        pieces = (rows[begin : begin + _PIECE] for begin in range(0, len(rows), _PIECE))
        return all(bool((piece == rows[0]).all()) for piece in pieces)

    def turn(self, item: Slice) -> int:
        """Return when the shard that a copy reads has its turn: its place in `largest_first`."""
        return self._turns[self._entries[item.tensor].shard]

    def slice(self, item: Slice) -> torch.Tensor:
        """Return the source of one copy."""
        return view_of(self.tensor(item.tensor), item.source)
