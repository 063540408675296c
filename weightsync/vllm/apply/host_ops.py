"""Parameters in the host's memory: prepared, written and compared by the processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from weightsync.vllm.apply.device_ops import Prep
from weightsync.vllm.apply.expected_digests import ExpectedDigests
from weightsync.vllm.apply.host_find import find_between
from weightsync.vllm.apply.host_patch import Copy, HostPatch, split
from weightsync.vllm.apply.parallel import SliceThreads, background_thread_count, yield_cores
from weightsync.vllm.apply.writes import write_each

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from weightsync.vllm.apply.device_ops import (
        MemoryRegistrar,
        PrefetchRequest,
        PrepareRequest,
        Stop,
    )
    from weightsync.vllm.apply.prepared import RankPrepared
    from weightsync.vllm.apply.writes import Writer
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["HostOps", "HostWriter"]


@dataclass(frozen=True)
class HostWriter:
    """Writes all of a version.

    Attributes:
        target: It.
        expected: Its digests.
        patched: Always False.
        compared_all: Always True.
    """

    target: RankPrepared
    expected: ExpectedDigests
    patched = False
    compared_all = True

    @property
    def nbytes(self) -> int:
        """Bytes that a commit writes."""
        return sum(place.nbytes for place in self.target.targets.views())

    def write(self, threads: SliceThreads) -> None:
        """Copy every slice into the live parameters."""
        places, sources = self.target.targets.views(), self.target.sources

        def copy(index: int) -> None:
            places[index].copy_(sources[index])

        write_each(threads, copy, [source.nbytes for source in sources])

    def verify(self, threads: SliceThreads) -> list[str]:
        """Digest the live slices; return the parameters whose bytes are not those expected."""
        return self.expected.mismatched(self.target, threads)


class HostOps:
    """Reads versions where the server received them; see `DeviceOps`.

    Args:
        device: Where the parameters are.
        ranks: Workers of the engine on this host.
    """

    stages = False
    registrar: MemoryRegistrar | None = None
    sent = 0

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        self._threads = SliceThreads(background_thread_count(device, ranks), yield_cores)
        self._expected = ExpectedDigests()
        self._patches: WeakKeyDictionary[RankPrepared, HostPatch] = WeakKeyDictionary()

    def enter_background(self) -> None:
        """See `DeviceOps`."""
        yield_cores()

    def warm_up(self, plan: LoadPlan) -> None:
        """See `DeviceOps`: nothing of it is slower at the first time."""

    def prefetch(self, request: PrefetchRequest, stop: Stop) -> None:
        """See `DeviceOps`: what was received lies where it is read."""

    def prepare(self, request: PrepareRequest, stop: Stop) -> Prep:
        """See `DeviceOps`: what it reads it reads again in the pause."""
        target, base = request.target, request.base
        patch = self._find_patch(target, base, stop) if base is not None else None
        if patch is not None:
            self._patches[target] = patch
        else:
            self._expected.compute(target, self._threads, stop)
        return Prep()

    def _find_patch(self, target: RankPrepared, base: RankPrepared, stop: Stop) -> HostPatch | None:
        """Return what changes from a version of the same plan; None: a copy is less work."""
        found = find_between(base, target, self._threads, stop)
        if found is None:
            return None
        slices = target.plan.slices
        same = set(range(len(slices))).difference(found.changes, found.dense)
        self._expected.take_same(target, base, same)
        copies = [
            Copy(i, slices[i].param, target.sources[i], self._expected.digest(target, i, stop))
            for i in sorted(found.dense)
        ]
        changes = split(found.changes[index] for index in sorted(found.changes))
        return HostPatch(base.content_digest, target.targets, changes, copies)

    def writer(self, target: RankPrepared, live: str) -> Writer:
        """See `DeviceOps`."""
        patch = self._patches.get(target)
        if patch is not None and patch.base == live:
            return patch
        return HostWriter(target, self._expected)

    def synchronize(self) -> None:
        """See `DeviceOps`: what was written is there."""

    def invalidate(self, target: RankPrepared) -> None:
        """See `DeviceOps`: the base of its patch is gone."""
        self._patches.pop(target, None)

    def compare(self, target: RankPrepared, stop: Stop) -> list[str]:
        """See `DeviceOps`."""
        return self._expected.mismatched(target, self._threads, stop)

    def digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """See `DeviceOps`: the host's threads do that."""
        del tensors
        return {}

    def memory_stats(self) -> dict[str, int]:
        """See `DeviceOps`."""
        return {}

    def set_budget(self, size: int) -> None:
        """See `DeviceOps`: it needs none."""
