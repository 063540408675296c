"""A staged version's bytes as tensors, and views that are made once for all versions.

A model has hundreds, and making them keeps the interpreter from the thread that generates.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from weightsync.model.dtypes import torch_dtype
from weightsync.vllm.plan.live_params import LiveParameters, Targets, view_of

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout, TensorEntry
    from weightsync.vllm.plan.load_plan import LoadPlan, Slice


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

    `copied` says that one lay at an odd address, and a copy was returned.
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
        return self._entries[name]

    def raw(self, shard: int, begin: int, end: int) -> torch.Tensor:
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
        return view_of(self.tensor(item.tensor), item.source)


#: Versions in segments of their own whose views are kept; a server has two or three slots.
_MOST = 4


class Read(NamedTuple):
    """What a plan reads: per slice a view of shared memory, and its shard's turn to be read.

    `copied` says that a tensor lay at an odd address, and its view is of a copy.
    """

    sources: list[torch.Tensor]
    turns: list[int]
    copied: bool = False


class ViewCache:
    """The views of one rank. Callers see to it that they come one at a time."""

    def __init__(self, live: LiveParameters) -> None:
        self._live = live
        self._targets: dict[str, Targets] = {}
        self._read: OrderedDict[tuple[tuple[str, ...], str, str], Read] = OrderedDict()

    def targets(self, plan: LoadPlan) -> Targets:
        now = Targets(self._live, plan.slices)
        known = self._targets.get(plan.signature)
        if known is not None and known.geometry == now.geometry:
            return known
        self._targets[plan.signature] = now
        return now

    def read(
        self,
        layout: Layout,
        ids: tuple[str, ...],
        plan: LoadPlan,
        segments: Sequence[memoryview],
    ) -> Read:
        """Return what a plan reads of a version in the segments `ids`. Reads no bytes."""
        key = ids, layout.digest, plan.signature
        if key in self._read:
            self._read.move_to_end(key)
            return self._read[key]
        sources = StagedTensors(layout, segments)
        made = Read(
            [sources.slice(item) for item in plan.slices],
            [sources.turn(item) for item in plan.slices],
            sources.copied,
        )
        if not sources.copied:
            self._read[key] = made
            while len(self._read) > _MOST:
                self._read.popitem(last=False)
        return made

    def forget(self, segments: Iterable[str]) -> None:
        """Let go of views of segments, before they are unmapped."""
        gone = frozenset(segments)
        for key in [key for key in self._read if not gone.isdisjoint(key[0])]:
            del self._read[key]
