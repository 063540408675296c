"""A commit on a device that writes only what changes, in a launch for each width of elements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightsync.vllm.apply.writes import begin_patch, write_each
from weightsync.vllm.plan.int_views import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from weightsync.vllm.apply.host_find import ParamChange
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.cuda.direct_write import Direct
    from weightsync.vllm.cuda.scatter import Scatter
    from weightsync.vllm.cuda.staged_write import Staged
    from weightsync.vllm.cuda.uploader import StreamThrottle, Uploader
    from weightsync.vllm.plan.live_params import Targets

__all__ = ["DevicePatch", "fill_sent"]

_NAMES = 10


@dataclass
class DevicePatch:
    """Turns one version in the live parameters into another.

    Attributes:
        base: Content digest of the version that must be live.
        targets: The live destinations.
        scatters: Elements to write.
        rest: What is copied whole.
        patched: Always True.
        compared_all: Always False.
    """

    base: str
    targets: Targets
    scatters: Sequence[Scatter]
    rest: Staged | Direct
    patched = True
    compared_all = False

    @property
    def nbytes(self) -> int:
        """Bytes that a commit writes."""
        return sum(scatter.nbytes for scatter in self.scatters) + self.rest.nbytes

    def write(self, threads: SliceThreads) -> None:
        """Queue what changes; every other byte stays as it is."""
        self.targets.views()
        begin_patch()
        if self.scatters:
            write_each(
                threads,
                lambda index: self.scatters[index].write(),
                [scatter.nbytes for scatter in self.scatters],
            )
        if self.rest.nbytes:
            self.rest.write(threads)

    def verify(self, threads: SliceThreads) -> list[str]:
        """Look at what was written; return the parameters that do not hold it."""
        flags = [scatter.differs() for scatter in self.scatters]
        wrong = set(self.rest.verify(threads)) if self.rest.nbytes else set()
        # All at once: each answer of a device takes a while.
        answers = torch.stack(flags).tolist() if flags else []
        for scatter, bad in zip(self.scatters, answers, strict=True):
            if bad:
                wrong |= self._names(scatter)
        return sorted(wrong)

    def _names(self, scatter: Scatter) -> set[str]:
        at = scatter.positions[scatter.seen.nonzero()[:_NAMES, 0]].tolist()
        found = set()
        for name in self.targets.names:
            row = memory_of(self.targets.param(name))
            if row.element_size() != scatter.row.element_size():
                continue
            begin = scatter.place(row)
            if any(begin <= place < begin + row.numel() for place in at):
                found.add(name)
        return found


def fill_sent(
    changes: Iterable[ParamChange],
    made: Mapping[int, Scatter],
    targets: Targets,
    uploader: Uploader,
    pace: StreamThrottle,
) -> None:
    """Send elements that were found on the host; positions are widened on the device."""
    filled: Counter[int] = Counter()
    never: Callable[[], bool] = bool
    for change in changes:
        width = change.values.element_size()
        scatter, begin = made[width], filled[width]
        filled[width] = end = begin + change.values.numel()
        positions = scatter.positions[begin:end]
        uploader.send_all(positions, change.positions, pace, never)
        positions.add_(scatter.place(memory_of(targets.param(change.param))))
        uploader.send_all(scatter.values[begin:end], change.values, pace, never)
    pace.drain()
