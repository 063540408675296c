"""A commit that writes only what changes since the version that is live, in the host's memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightsync.vllm.apply.host_find import ParamChange
from weightsync.vllm.apply.writes import begin_patch, differ, put, write_each
from weightsync.vllm.plan.int_views import tensor_digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.plan.live_params import Targets

__all__ = ["Copy", "HostPatch", "joined", "split"]

#: Elements that one thread writes at a time, so that several share a large parameter.
_SHARE = 1 << 17


@dataclass(frozen=True)
class Copy:
    """A slice that changed too much for single elements.

    Attributes:
        index: Of the slice in its plan.
        param: Name of the live parameter.
        source: Its bytes in shared memory.
        expected: Digest that it must have once it is live.
    """

    index: int
    param: str
    source: torch.Tensor
    expected: bytes


@dataclass
class HostPatch:
    """Turns one version in the live parameters into another.

    Attributes:
        base: Content digest of the version that must be live.
        targets: The live destinations.
        changes: Elements to write.
        copies: Slices to write whole.
        patched: Always True.
        compared_all: Always False.
    """

    base: str
    targets: Targets
    changes: Sequence[ParamChange]
    copies: Sequence[Copy]
    patched = True
    compared_all = False

    @property
    def nbytes(self) -> int:
        """Bytes that a commit writes."""
        return sum(change.nbytes for change in self.changes) + sum(
            self.targets.views()[copy.index].nbytes for copy in self.copies
        )

    def write(self, threads: SliceThreads) -> None:
        """Write what changes; every other byte stays as it is."""
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
        """Look at what was written; return the parameters that do not hold it."""
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
    """Return changes of the host's memory with those of each parameter as one."""
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
