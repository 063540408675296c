"""A commit that writes only what changes since the version that is live."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightsync import failpoints
from weightsync.vllm.changes import Change
from weightsync.vllm.words import tensor_digest_of
from weightsync.vllm.writing import differ, put, write_each

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync.vllm.crew import Crew
    from weightsync.vllm.live import Targets

__all__ = ["Copy", "Patch", "split", "stage"]

#: Elements that one thread writes at a time, so that several share a large parameter.
_SHARE = 1 << 17
#: Bytes that are sent to a device at a time, so that nothing else on the bus waits for long.
_CHUNK = 16 << 20


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
class Patch:
    """Turns one version in the live parameters into another.

    Attributes:
        base: Content digest of the version that must be live.
        targets: The live destinations.
        changes: Elements to write, on the devices of their parameters.
        copies: Slices to write whole.
    """

    base: str
    targets: Targets
    changes: Sequence[Change]
    copies: Sequence[Copy]

    @property
    def nbytes(self) -> int:
        """Bytes that a commit writes."""
        return sum(change.nbytes for change in self.changes) + sum(
            self.targets.views()[copy.index].nbytes for copy in self.copies
        )

    def write(self, crew: Crew) -> None:
        """Write what changes; every other byte stays as it is."""
        views, memory = self.targets.views(), self._memory()
        failpoints.hit("worker.patch")

        def write(index: int) -> None:
            if index < len(self.changes):
                change = self.changes[index]
                put(memory[change.param], change.positions, change.values)
            else:
                copy = self.copies[index - len(self.changes)]
                views[copy.index].copy_(copy.source)

        write_each(crew, write, self._sizes())

    def mismatched(self, crew: Crew) -> list[str]:
        """Look at what was written; return the parameters that do not hold it."""
        views, memory = self.targets.views(), self._memory()
        differing: dict[int, torch.Tensor] = {}
        wrong: set[str] = set()

        def compare(index: int) -> None:
            if index < len(self.changes):
                change = self.changes[index]
                found = differ(memory[change.param], change.positions, change.values)
                differing[index] = found
            else:
                copy = self.copies[index - len(self.changes)]
                if tensor_digest_of(views[copy.index]) != copy.expected:
                    wrong.add(copy.param)

        crew.each(compare, self._sizes())
        # All at once: each answer of a device takes a while.
        for device in {found.device for found in differing.values()}:
            mine = [index for index, found in differing.items() if found.device == device]
            answers = torch.stack([differing[index] for index in mine]).tolist()
            wrong |= {self.changes[i].param for i, bad in zip(mine, answers, strict=True) if bad}
        return sorted(wrong)

    def _memory(self) -> dict[str, torch.Tensor]:
        return {name: self.targets.memory(name) for name in {c.param for c in self.changes}}

    def _sizes(self) -> list[int]:
        sizes = [change.nbytes for change in self.changes]
        return sizes + [copy.source.nbytes for copy in self.copies]


def split(changes: Iterable[Change]) -> list[Change]:
    """Return changes of the host's memory in pieces that several threads can share."""
    return [
        Change(change.param, positions, values)
        for change in changes
        for positions, values in zip(
            torch.split(change.positions, _SHARE), torch.split(change.values, _SHARE), strict=True
        )
    ]


def stage(changes: Iterable[Change], device: torch.device) -> list[Change] | None:
    """Send changes to a device, on the calling thread's stream, those of one parameter together.

    Returns None when the device has not got the memory.
    """
    groups: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        groups[change.param].append(change)
    staged = []
    try:
        for param, group in groups.items():
            positions = _sent([change.positions for change in group], device)
            values = _sent([change.values for change in group], device)
            staged.append(Change(param, positions, values))
        _warm_up(staged)
        torch.cuda.current_stream(device).synchronize()
    except torch.OutOfMemoryError:
        return None
    return staged


def _sent(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    whole = torch.cat(list(parts))
    sent = torch.empty(whole.shape, dtype=whole.dtype, device=device)
    size = _CHUNK // whole.element_size()
    for source, target in zip(torch.split(whole, size), torch.split(sent, size), strict=True):
        target.copy_(source)
    return sent


def _warm_up(changes: Iterable[Change]) -> None:
    # The first use of a kernel takes tens of milliseconds, which must not be those of a pause.
    for change in {(c.values.dtype, c.positions.dtype): c for c in changes}.values():
        memory = torch.zeros(1, dtype=change.values.dtype, device=change.values.device)
        first = torch.zeros_like(change.positions[:1])
        put(memory, first, change.values[:1])
        torch.stack([differ(memory, first, change.values[:1])]).tolist()
