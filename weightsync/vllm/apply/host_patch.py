"""A commit that writes only what changes since the version that is live, in the host's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from weightsync.vllm.apply.device_ops import DeviceOps, Stop
from weightsync.vllm.apply.host_params import ParamChange
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.apply.writes import begin_patch, differ, put, write_each
from weightsync.vllm.plan.int_views import tensor_digest_of

if TYPE_CHECKING:
    from weightsync.vllm.plan.live_params import Targets


_Key = TypeVar("_Key", int, str)
#: Elements that one thread writes at a time, so that several share a large parameter.
_SHARE = 1 << 17


@dataclass(frozen=True)
class Copy:
    """A slice that changed too much for single elements, and its digest once it is live."""

    index: int
    param: str
    source: torch.Tensor
    expected: bytes


@dataclass
class HostPatch:
    """Turns one version, the content digest `base`, in the live parameters into another."""

    base: str
    targets: Targets
    changes: Sequence[ParamChange]
    copies: Sequence[Copy]
    patched = True
    compared_all = False

    @property
    def nbytes(self) -> int:
        return sum(change.nbytes for change in self.changes) + sum(
            self.targets.views()[copy.index].nbytes for copy in self.copies
        )

    def write(self, threads: SliceThreads) -> None:
        views, memory = self.targets.views(), self._memory()
        begin_patch()

        def write(index: int) -> None:
            if index < len(self.changes):
                change = self.changes[index]
                put(memory[change.param], change.positions, change.values)
            else:
                copy = self.copies[index - len(self.changes)]
                views[copy.index].copy_(copy.source)

        write_each(threads, write, self._sizes())

    def verify(self, threads: SliceThreads) -> list[str]:
        views, memory = self.targets.views(), self._memory()
        wrong: set[str] = set()

        def compare(index: int) -> None:
            if index < len(self.changes):
                change = self.changes[index]
                if differ(memory[change.param], change.positions, change.values):
                    wrong.add(change.param)
            else:
                copy = self.copies[index - len(self.changes)]
                if tensor_digest_of(views[copy.index]) != copy.expected:
                    wrong.add(copy.param)

        threads.each(compare, self._sizes())
        return sorted(wrong)

    def _memory(self) -> dict[str, torch.Tensor]:
        return {name: self.targets.memory(name) for name in {c.param for c in self.changes}}

    def _sizes(self) -> list[int]:
        sizes = [change.nbytes for change in self.changes]
        return sizes + [copy.source.nbytes for copy in self.copies]


def joined(changes: Iterable[ParamChange]) -> list[ParamChange]:
    by_param: dict[str, list[ParamChange]] = defaultdict(list)
    for change in changes:
        by_param[change.param].append(change)
    return [
        ParamChange(
            param,
            torch.cat([change.positions for change in each]),
            torch.cat([change.values for change in each]),
        )
        for param, each in by_param.items()
    ]


def split(changes: Iterable[ParamChange]) -> list[ParamChange]:
    """Return changes of the host's memory in pieces that several threads can share."""
    return [
        ParamChange(change.param, positions, values)
        for change in changes
        for positions, values in zip(
            torch.split(change.positions, _SHARE), torch.split(change.values, _SHARE), strict=True
        )
    ]


#: Bytes of a row: what one thread, or one block of threads of a device, digests.
_ROW = 64 << 20
#: Bytes that are exchanged at a time: both sides stay in a cache of the processor.
_PIECE = 256 << 10


def rows_of(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return pieces of memory, each one row of bytes, cut into rows, in order."""
    return [row for piece in memory for row in torch.split(piece, _ROW)]


def digest_all(
    ops: DeviceOps,
    tensors: Mapping[_Key, torch.Tensor],
    threads: SliceThreads,
    stop: Stop | None = None,
) -> dict[_Key, bytes]:
    """Return the xxh3-128 of each tensor, by the device as far as it can, else by `threads`.

    `stop` is asked now and then, and True raises StoppedError; it is None if the engine stands.
    """
    found = dict(ops.digests(tensors, stop))
    rest = [key for key in tensors if key not in found]

    def digest(at: int) -> None:
        found[rest[at]] = tensor_digest_of(tensors[rest[at]], stop=stop or bool)

    threads.each(digest, [tensors[key].nbytes for key in rest])
    return found


def row_digests(
    ops: DeviceOps,
    rows: Sequence[torch.Tensor],
    threads: SliceThreads,
    stop: Stop | None = None,
) -> list[bytes]:
    """Return the digests of rows of bytes, in order; `stop` as in `digest_all`."""
    found = digest_all(ops, dict(enumerate(rows)), threads, stop)
    return [found[index] for index in range(len(rows))]


class HostExchange:
    """See `Exchange`, of rows of bytes in the host's memory."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = [(left.numpy(), right.numpy()) for left, right in pairs]

    def run(self, threads: SliceThreads) -> None:
        def swap(index: int) -> None:
            left, right = self._pairs[index]
            spare = np.empty(min(_PIECE, left.size), dtype=np.uint8)
            for at in range(0, left.size, _PIECE):
                one, other = left[at : at + _PIECE], right[at : at + _PIECE]
                kept = spare[: one.size]
                kept[:] = one
                one[:] = other
                other[:] = kept

        write_each(threads, swap, [left.nbytes for left, _ in self._pairs])
