"""Parameters in the host's memory: prepared, written and compared by the processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from weightsync.vllm.apply.byte_rows import HostExchange
from weightsync.vllm.apply.copy_table import CopyGeometry, CopyTable
from weightsync.vllm.apply.device_ops import Prep
from weightsync.vllm.apply.expected_digests import ExpectedDigests
from weightsync.vllm.apply.host_find import find_between
from weightsync.vllm.apply.host_patch import Copy, HostPatch, joined, split
from weightsync.vllm.apply.parallel import SliceThreads, background_thread_count, yield_cores
from weightsync.vllm.apply.writes import write_each
from weightsync.vllm.plan.int_views import tensor_digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from weightsync.vllm.apply.device_ops import (
        Exchange,
        MemoryRegistrar,
        PrefetchRequest,
        PrepareRequest,
        Stop,
    )
    from weightsync.vllm.apply.prepared import RankPrepared
    from weightsync.vllm.apply.writes import Writer
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["HostOps", "HostWriter"]

_Key = TypeVar("_Key", int, str)


@dataclass(frozen=True)
class HostWriter:
    """Writes all of a version.

    Attributes:
        target: It.
        expected: Its digests.
        table: Returns its copies, to where the parameters are.
        patched: Always False.
        compared_all: Always True.
    """

    target: RankPrepared
    expected: ExpectedDigests
    table: Callable[[RankPrepared], CopyTable]
    patched = False
    compared_all = True

    @property
    def nbytes(self) -> int:
        """Bytes that a commit writes."""
        return sum(
            view.nbytes for view in self.expected.ranges(self.target).views(self.target.targets)
        )

    def write(self, threads: SliceThreads) -> None:
        """Copy every slice into the live parameters."""
        table = self.table(self.target)
        write_each(threads, table.copy, table.sizes)

    def verify(self, threads: SliceThreads) -> list[str]:
        """Digest the live parameters; return those whose bytes are not those expected."""
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
        self._expected = ExpectedDigests(joined=True)
        # Of the plan that was used last.
        self._geometry: CopyGeometry | None = None
        self._tables: WeakKeyDictionary[RankPrepared, CopyTable] = WeakKeyDictionary()
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
        self._table(target)
        patch = self._find_patch(target, base, stop) if base is not None else None
        if patch is not None:
            self._patches[target] = patch
        else:
            self._expected.compute(target, self._threads, stop)
        return Prep()

    def _table(self, target: RankPrepared) -> CopyTable:
        """Return the copies of a version, made before the pause unless a parameter has moved."""
        places, known = target.targets.views(), self._tables.get(target)
        if known is None or known.places is not places:
            if self._geometry is None or self._geometry.plan is not target.plan:
                self._geometry = CopyGeometry(target.plan, places, target.sources)
            known = self._tables[target] = CopyTable(self._geometry, places, target.sources)
        return known

    def _find_patch(self, target: RankPrepared, base: RankPrepared, stop: Stop) -> HostPatch | None:
        """Return what changes from a version of the same plan; None: a copy is less work."""
        found = find_between(base, target, self._threads, stop)
        if found is None:
            return None
        views = target.targets.views()
        self._expected.take_same(target, base, found.differs)
        slices = target.plan.slices
        copies = [
            Copy(i, slices[i].param, source, tensor_digest_of(source, views[i].dtype, stop))
            for i, source in ((i, target.sources[i]) for i in sorted(found.dense))
        ]
        changes = split(joined(found.changes[index] for index in sorted(found.changes)))
        return HostPatch(base.content_digest, target.targets, changes, copies)

    def writer(self, target: RankPrepared, live: str) -> Writer:
        """See `DeviceOps`."""
        patch = self._patches.get(target)
        if patch is not None and patch.base == live:
            return patch
        return HostWriter(target, self._expected, self._table)

    def synchronize(self) -> None:
        """See `DeviceOps`: what was written is there."""

    def invalidate(self, target: RankPrepared) -> None:
        """See `DeviceOps`: the base of its patch is gone."""
        self._patches.pop(target, None)

    def compare(self, target: RankPrepared, stop: Stop) -> list[str]:
        """See `DeviceOps`."""
        return self._expected.mismatched(target, self._threads, stop)

    def digests(
        self, tensors: Mapping[_Key, torch.Tensor], stop: Stop | None = None
    ) -> dict[_Key, bytes]:
        """See `DeviceOps`: the host's threads do that."""
        del tensors, stop
        return {}

    def exchange(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Exchange:
        """See `DeviceOps`."""
        return HostExchange(pairs)

    def memory_stats(self) -> dict[str, int]:
        """See `DeviceOps`."""
        return {}

    def drop_staging(self) -> None:
        """See `DeviceOps`: nothing was taken."""

    def set_budget(self, size: int) -> None:
        """See `DeviceOps`: it needs none."""
