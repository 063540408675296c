"""The digests that live parameters must have once a version is live, and whether they have them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from weightsync.vllm.plan.int_views import joined_digest_of
from weightsync.vllm.plan.ranges import LiveRanges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.apply.prepared import RankPrepared
    from weightsync.vllm.plan.live_params import Targets

__all__ = ["ExpectedDigests"]


class ExpectedDigests:
    """Of each prepared version the digest of each range, computed once, when it is first needed.

    What is known of a version goes with it.

    Args:
        joined: Whether neighbouring slices are one range; else each slice is one.
    """

    def __init__(self, *, joined: bool = False) -> None:
        self._joined = joined
        self._known: WeakKeyDictionary[RankPrepared, list[bytes | None]] = WeakKeyDictionary()
        self._ranges: WeakKeyDictionary[Targets, LiveRanges] = WeakKeyDictionary()

    def ranges(self, target: RankPrepared) -> LiveRanges:
        """Return the ranges of a version's plan."""
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
        """Return the digest that a range must have; reads its sources at the first time.

        Raises:
            StoppedError: `stop` returned True.
        """
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
        """Compute every digest that is not known yet; reads this rank's part of the version once.

        Raises:
            StoppedError: `stop` returned True.
        """

        def compute(index: int) -> None:
            self.digest(target, index, stop)

        threads.each(compute, [view.nbytes for view in self.ranges(target).views(target.targets)])

    def take_proved(self, target: RankPrepared) -> None:
        """Expect of slices that are whole tensors what the server has proved of those.

        Each slice must be a range.
        """
        known = self.known(target)
        for index in target.plan.whole:
            known[index] = target.digests[target.plan.slices[index].tensor]

    def take_same(
        self, target: RankPrepared, base: RankPrepared, changed: Callable[[int], bool]
    ) -> None:
        """Expect what is expected of another version of the same plan where that is the same.

        Args:
            target: The version.
            base: The other one.
            changed: Tells of a slice, by its index, whether it differs.
        """
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

        Args:
            target: What must be live.
            threads: Does the work.
            stop: Asked before every piece; True raises `StoppedError`.
            found: Digests of live ranges that are known, by their index.
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
