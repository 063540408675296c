"""What a version changes in the live parameters: found while vLLM generates, for the pause."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from weightsync.gpu.finder import KernelFinder
from weightsync.gpu.spans import fits
from weightsync.gpu.torch_finder import TorchFinder
from weightsync.vllm.cuda.uploader import StreamThrottle
from weightsync.vllm.plan.int_views import as_ints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from weightsync.gpu.finder import Finder, Pair
    from weightsync.vllm.cuda.blocks import Block
    from weightsync.vllm.cuda.scatter import Scatter
    from weightsync.vllm.cuda.staged_write import Staged

__all__ = ["FoundPatch", "PatchFinder", "PieceGroup", "fill", "groups_of"]

#: A piece is copied whole when more than one in so many of its elements changed.
_DENSE = 8
#: There is a patch when less than one in so many elements changes: writing one somewhere takes as
#: long as copying a few dozen in a row.
_WORTH = 32
#: One in so many pieces, if those are enough, can tell that it is not worth to look at all of them,
#: by so many elements of each: each launch of a step may have to wait for one of ours.
_SAMPLE, _ENOUGH, _GLANCE = 16, 8, 1 << 19
#: Bytes of glances that are looked at before that is waited for.
_GLANCES = 64 << 20


class PieceGroup(NamedTuple):
    """Pieces of one width that are looked at together.

    Attributes:
        pieces: At least one.
        finder: Finds what differs between their live and their staged side.
    """

    pieces: Sequence[Block]
    finder: Finder


@dataclass(frozen=True)
class FoundPatch:
    """What differs between staging memory and the live parameters.

    Attributes:
        sparse: Groups, which of their pieces have few elements that differ, and how many those are.
        dense: Pieces of which much differs.
        counts: Elements of the sparse ones that differ, by their width.
    """

    sparse: Sequence[tuple[PieceGroup, Sequence[bool], int]]
    dense: Sequence[Block]
    counts: Mapping[int, int]


class PatchFinder:
    """Finds what staged versions change, and keeps what it looks with while nothing moves."""

    def __init__(self) -> None:
        # With the views of the live parameters that they were made of.
        self._groups: WeakKeyDictionary[Staged, tuple[list[torch.Tensor], list[PieceGroup]]]
        self._groups = WeakKeyDictionary()

    def find(
        self, staged: Staged, pace: StreamThrottle, stop: Callable[[], bool]
    ) -> FoundPatch | None:
        """Return what differs; None: so much that a copy of everything is less work.

        Args:
            staged: The version, its views made.
            pace: Of the current stream.
            stop: Asked after every piece.

        Raises:
            StoppedError: `stop` returned True.
        """
        size = staged.mask.numel()
        pieces = [p for block in staged.blocks for p in block.pieces(size * block.dtype.itemsize)]
        if _all_dense(staged, pieces, stop):
            return None
        sparse: list[tuple[PieceGroup, Sequence[bool], int]] = []
        dense: list[Block] = []
        counts: Counter[int] = Counter()
        for group in self._groups_of(staged, pieces):
            chosen, taken = [], 0
            for piece, count in zip(group.pieces, _counts(group.finder, pace, stop), strict=True):
                few = 0 < count * _DENSE <= piece.place.numel and piece.place.contiguous
                chosen.append(few)
                if few:
                    taken += count
                elif count:
                    dense.append(piece)
            counts[group.pieces[0].dtype.itemsize] += taken
            sparse.append((group, chosen, taken))
        whole = sum(block.place.numel for block in staged.blocks)
        much = sum(piece.place.numel for piece in dense)
        if counts.total() * _WORTH + much >= whole:
            return None
        return FoundPatch(sparse, dense, +counts)

    def _groups_of(self, staged: Staged, pieces: Iterable[Block]) -> list[PieceGroup]:
        views = staged.targets.views()
        known = self._groups.get(staged)
        if known is None or known[0] is not views:
            known = self._groups[staged] = views, groups_of(staged, pieces)
        return known[1]


def groups_of(staged: Staged, pieces: Iterable[Block]) -> list[PieceGroup]:
    """Return what can be looked at together; call `staged.targets.views` first."""
    by_kind: dict[tuple[int, bool], list[tuple[Block, Pair]]] = defaultdict(list)
    for piece in pieces:
        pair = _pair(staged, piece)
        own = staged.kernels is not None and fits(*pair)
        by_kind[piece.dtype.itemsize, own].append((piece, pair))
    groups = []
    for (_, own), members in by_kind.items():
        pairs = [pair for _, pair in members]
        finder: Finder = TorchFinder(pairs, staged.mask)
        if own and staged.kernels is not None:
            finder = KernelFinder(staged.kernels, pairs)
        groups.append(PieceGroup([piece for piece, _ in members], finder))
    return groups


def _pair(staged: Staged, piece: Block) -> Pair:
    return as_ints(piece.live(staged.targets)), as_ints(piece.staged(staged.memory))


def _counts(finder: Finder, pace: StreamThrottle, stop: Callable[[], bool]) -> list[int]:
    try:
        return finder.count(pace.steps(stop))
    finally:
        # Nothing may look at parameters any more when this returns.
        pace.drain()


def _all_dense(staged: Staged, pieces: Sequence[Block], stop: Callable[[], bool]) -> bool:
    sample = [next(p.pieces(_GLANCE * p.dtype.itemsize)) for p in pieces[::_SAMPLE]]
    if len(sample) < _ENOUGH:
        return False
    finder = TorchFinder([_pair(staged, piece) for piece in sample], staged.mask)
    counts = _counts(finder, StreamThrottle(staged.memory.device, _GLANCES), stop)
    return all(
        count * _WORTH >= piece.place.numel for piece, count in zip(sample, counts, strict=True)
    )


def fill(
    found: FoundPatch, made: Mapping[int, Scatter], pace: StreamThrottle, stop: Callable[[], bool]
) -> None:
    """Fill in the elements that were counted.

    Raises:
        StoppedError: `stop` returned True.
        RuntimeError: Not as many differ as were counted.
    """
    filled: Counter[int] = Counter()
    for group, chosen, count in found.sparse:
        if not count:
            continue
        width = group.pieces[0].dtype.itemsize
        scatter, begin = made[width], filled[width]
        filled[width] = end = begin + count
        places, values = scatter.positions[begin:end], scatter.values[begin:end]
        row = scatter.row.data_ptr()
        if group.finder.take(chosen, row, places, values, pace.steps(stop)).item():
            msg = "the parameters were written while they were compared; prepare again"
            raise RuntimeError(msg)
