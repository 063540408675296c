"""What a version changes in the live parameters: found while vLLM generates, for the pause."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.vllm.cuda.search import Search, TorchSearch, pairs_of, searches
from weightsync.vllm.cuda.uploader import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weightsync.vllm.cuda.blocks import Block
    from weightsync.vllm.cuda.scatter import Scatter
    from weightsync.vllm.cuda.staged_write import Staged

__all__ = ["Found", "fill", "find"]

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


@dataclass(frozen=True)
class Found:
    """What differs between staging memory and the live parameters.

    Attributes:
        sparse: Looks at pieces, and which of those have few elements that differ.
        dense: Pieces of which much differs.
        counts: Elements of the sparse ones that differ, by their width.
    """

    sparse: Sequence[tuple[Search, Sequence[bool]]]
    dense: Sequence[Block]
    counts: Mapping[int, int]


def find(staged: Staged, pace: Pace, stop: Callable[[], bool]) -> Found | None:
    """Return what differs; None: so much that a copy of everything is less work.

    Args:
        staged: The version, its views made.
        pace: Of the current stream.
        stop: Asked now and then.

    Raises:
        StoppedError: `stop` returned True.
    """
    size = staged.mask.numel()
    pieces = [p for block in staged.blocks for p in block.pieces(size * block.dtype.itemsize)]
    sample = [next(p.pieces(_GLANCE * p.dtype.itemsize)) for p in pieces[::_SAMPLE]]
    if _all_dense(TorchSearch(staged, sample), Pace(staged.memory.device, _GLANCES), stop):
        return None
    if staged.pairs is None:
        staged.pairs = pairs_of(staged, pieces)
    sparse: list[tuple[Search, Sequence[bool]]] = []
    dense: list[Block] = []
    counts: Counter[int] = Counter()
    for search in searches(staged, staged.pairs):
        chosen = []
        for piece, count in zip(search.pieces, search.count(pace, stop), strict=True):
            few = 0 < count * _DENSE <= piece.place.numel and piece.place.contiguous
            chosen.append(few)
            if few:
                counts[piece.dtype.itemsize] += count
            elif count:
                dense.append(piece)
        sparse.append((search, chosen))
    whole = sum(block.place.numel for block in staged.blocks)
    much = sum(piece.place.numel for piece in dense)
    if counts.total() * _WORTH + much >= whole:
        return None
    return Found(sparse, dense, counts)


def _all_dense(sample: Search, pace: Pace, stop: Callable[[], bool]) -> bool:
    if len(sample.pieces) < _ENOUGH:
        return False
    return all(
        count * _WORTH >= piece.place.numel
        for piece, count in zip(sample.pieces, sample.count(pace, stop), strict=True)
    )


def fill(found: Found, made: Mapping[int, Scatter], pace: Pace, stop: Callable[[], bool]) -> None:
    """Fill in the elements that `find` has counted.

    Raises:
        StoppedError: `stop` returned True.
    """
    filled: Counter[int] = Counter()
    for search, chosen in found.sparse:
        width = search.pieces[0].dtype.itemsize
        if any(chosen):
            filled[width] = search.take(chosen, made[width], filled[width], pace, stop)
