"""Parameters in the host's memory: prepared, written, and compared with expected digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from weightsync.vllm.apply.device_ops import (
    Exchange,
    MemoryRegistrar,
    PrefetchRequest,
    PrepareRequest,
    PrepareResult,
    RankPrepared,
    Stop,
)
from weightsync.vllm.apply.host_params import find_between
from weightsync.vllm.apply.host_patch import Copy, HostExchange, HostPatch, joined, split
from weightsync.vllm.apply.parallel import SliceThreads, background_thread_count, yield_cores
from weightsync.vllm.apply.writes import CopyGeometry, CopyTable, ParamWriter, write_each
from weightsync.vllm.plan.halves import LiveRanges
from weightsync.vllm.plan.int_views import joined_digest_of, tensor_digest_of
from weightsync.vllm.plan.live_params import Targets
from weightsync.vllm.plan.load_plan import LoadPlan

if TYPE_CHECKING:
    import torch


class ExpectedDigests:
    """The digest of each range of prepared versions, computed once, when it is first needed.

    What is known of a version is freed with it. With `joined` neighbouring slices are one range.
    """

    def __init__(self, *, joined: bool = False) -> None:
        self._joined = joined
        self._known: WeakKeyDictionary[RankPrepared, list[bytes | None]] = WeakKeyDictionary()
        self._ranges: WeakKeyDictionary[Targets, LiveRanges] = WeakKeyDictionary()

    def ranges(self, target: RankPrepared) -> LiveRanges:
        found = self._ranges.get(target.targets)
        if found is None:
            found = LiveRanges(target.plan.slices, joined=self._joined)
            self._ranges[target.targets] = found
        return found

    def known(self, target: RankPrepared) -> list[bytes | None]:
        """Return what is known by now, by the index of the range; None: not computed yet."""
        found = self._known.get(target)
        if found is None:
            count = len(self.ranges(target).all) if self._joined else len(target.plan.slices)
            found = self._known.setdefault(target, [None] * count)
        return found

    def digest(self, target: RankPrepared, index: int, stop: Callable[[], bool] = bool) -> bytes:
        """Return the digest that a range must have; reads its sources at the first time."""
        known = self.known(target)
        digest = known[index]
        if digest is None:
            ranges = self.ranges(target)
            place = ranges.views(target.targets)[index]
            device = None if place.device.type == "cpu" else place.device
            sources = (target.sources[part.index] for part in ranges.all[index].parts)
            digest = joined_digest_of(sources, place.dtype, stop, device)
            known[index] = digest
        return digest

    def compute(
        self, target: RankPrepared, threads: SliceThreads, stop: Callable[[], bool]
    ) -> None:
        """Compute every digest that is not known yet; reads this rank's part at most once."""

        def compute(index: int) -> None:
            self.digest(target, index, stop)

        threads.each(compute, [view.nbytes for view in self.ranges(target).views(target.targets)])

    def take_proved(self, target: RankPrepared) -> None:
        """Expect of slices that are whole tensors what the server proved; each must be a range."""
        known = self.known(target)
        for index in target.plan.whole:
            known[index] = target.digests[target.plan.slices[index].tensor]

    def take_same(
        self, target: RankPrepared, base: RankPrepared, changed: Callable[[int], bool]
    ) -> None:
        """Expect what is expected of `base`, of the same plan, of slices that are not `changed`."""
        known, same = self.known(target), self.known(base)
        for index, each in enumerate(self.ranges(target).all):
            if not any(changed(part.index) for part in each.parts):
                known[index] = same[index]

    def mismatched(
        self,
        target: RankPrepared,
        threads: SliceThreads,
        stop: Callable[[], bool] = bool,
        found: Mapping[int, bytes] = MappingProxyType({}),
    ) -> list[str]:
        """Digest the live ranges; return the parameters whose bytes are not those expected.

        `target` must be live. `stop` is asked before every piece; True raises `StoppedError`.
        `found` has known digests of live ranges, by index.
        """
        ranges = self.ranges(target)
        views = ranges.views(target.targets)
        wrong: set[int] = set()

        def compare(index: int) -> None:
            wanted = self.digest(target, index, stop)
            if (found.get(index) or joined_digest_of([views[index]], stop=stop)) != wanted:
                wrong.add(index)

        threads.each(compare, [view.nbytes for view in views])
        return list(dict.fromkeys(ranges.all[index].param for index in sorted(wrong)))


_Key = TypeVar("_Key", int, str)


@dataclass(frozen=True)
class HostWriter:
    """Writes all of a version; `table` returns its copies, to where the parameters are."""

    target: RankPrepared
    expected: ExpectedDigests
    table: Callable[[RankPrepared], CopyTable]
    patched = False
    compared_all = True

    @property
    def nbytes(self) -> int:
        return sum(
            view.nbytes for view in self.expected.ranges(self.target).views(self.target.targets)
        )

    def write(self, threads: SliceThreads) -> None:
        table = self.table(self.target)
        write_each(threads, table.copy, table.sizes)

    def verify(self, threads: SliceThreads) -> list[str]:
        return self.expected.mismatched(self.target, threads)


class HostOps:
    """Reads versions where the server received them; see `DeviceOps`."""

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
        yield_cores()

    def warm_up(self, plan: LoadPlan) -> None:
        """See `DeviceOps`: nothing of it is slower at the first time."""

    def prefetch(self, request: PrefetchRequest, stop: Stop) -> None:
        """See `DeviceOps`: what was received lies where it is read."""

    def prepare(self, request: PrepareRequest, stop: Stop) -> PrepareResult:
        """See `DeviceOps`: what it reads it reads again in the pause."""
        target, base = request.target, request.base
        self._table(target)
        patch = self._find_patch(target, base, stop) if base is not None else None
        if patch is not None:
            self._patches[target] = patch
        else:
            self._expected.compute(target, self._threads, stop)
        return PrepareResult()

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

    def writer(self, target: RankPrepared, live: str) -> ParamWriter:
        patch = self._patches.get(target)
        if patch is not None and patch.base == live:
            return patch
        return HostWriter(target, self._expected, self._table)

    def synchronize(self) -> None:
        """See `DeviceOps`: what was written is there."""

    def invalidate(self, target: RankPrepared) -> None:
        self._patches.pop(target, None)

    def compare(self, target: RankPrepared, stop: Stop) -> list[str]:
        return self._expected.mismatched(target, self._threads, stop)

    def digests(
        self, tensors: Mapping[_Key, torch.Tensor], stop: Stop | None = None
    ) -> dict[_Key, bytes]:
        del tensors, stop
        return {}

    def exchange(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Exchange:
        return HostExchange(pairs)

    def memory_stats(self) -> dict[str, int]:
        return {}

    def drop_staging(self) -> None:
        """See `DeviceOps`: nothing was taken."""

    def set_budget(self, size: int) -> None:
        """See `DeviceOps`: it needs none."""
