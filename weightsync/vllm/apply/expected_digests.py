"""The digests that slices must have once a version is live, and whether they have them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from weightsync.vllm.plan.int_views import tensor_digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.apply.prepared import RankPrepared

__all__ = ["ExpectedDigests"]


class ExpectedDigests:
    """Of each prepared version the digest of each slice, computed once, when it is first needed.

    What is known of a version goes with it.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[RankPrepared, list[bytes | None]] = WeakKeyDictionary()

    def known(self, target: RankPrepared) -> list[bytes | None]:
        """Return what is known by now, by the index of the slice; None: not computed yet."""
        found = self._known.get(target)
        return found or self._known.setdefault(target, [None] * len(target.plan.slices))

    def digest(self, target: RankPrepared, index: int, stop: Callable[[], bool] = bool) -> bytes:
        """Return the digest that a slice must have; reads its source at the first time.

        Raises:
            StoppedError: `stop` returned True.
        """
        known = self.known(target)
        digest = known[index]
        if digest is None:
            place = target.targets.views()[index]
            device = None if place.device.type == "cpu" else place.device
            digest = tensor_digest_of(target.sources[index], place.dtype, stop, device)
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

        threads.each(compute, [source.nbytes for source in target.sources])

    def take_proved(self, target: RankPrepared) -> None:
        """Expect of slices that are whole tensors what the server has proved of those."""
        known = self.known(target)
        for index in target.plan.whole:
            known[index] = target.digests[target.plan.slices[index].tensor]

    def take_same(self, target: RankPrepared, base: RankPrepared, indices: Iterable[int]) -> None:
        """Expect of some slices what is expected of another version of the same plan."""
        known, same = self.known(target), self.known(base)
        for index in indices:
            known[index] = same[index]

    def mismatched(
        self,
        target: RankPrepared,
        threads: SliceThreads,
        stop: Callable[[], bool] = bool,
        found: Mapping[int, bytes] = MappingProxyType({}),
    ) -> list[str]:
        """Digest the live slices; return the parameters whose bytes are not those expected.

        Args:
            target: What must be live.
            threads: Does the work.
            stop: Asked before every piece; True raises `StoppedError`.
            found: Digests of live slices that are known, by their index.
        """
        views = target.targets.views()
        wrong: set[int] = set()

        def compare(index: int) -> None:
            wanted = self.digest(target, index, stop)
            if (found.get(index) or tensor_digest_of(views[index], stop=stop)) != wanted:
                wrong.add(index)

        threads.each(compare, [view.nbytes for view in views])
        return list(dict.fromkeys(target.plan.slices[index].param for index in sorted(wrong)))
