"""A commit on a device that writes only what changes, in a launch for each width of elements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightsync.vllm.cuda.compare import unequal
from weightsync.vllm.words import StoppedError, memory_of, words_of
from weightsync.vllm.writing import begin_patch, write_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from weightsync.vllm.changes import Change
    from weightsync.vllm.crew import Crew
    from weightsync.vllm.cuda.blocks import Block
    from weightsync.vllm.cuda.direct import Direct
    from weightsync.vllm.cuda.scatter import Scatter
    from weightsync.vllm.cuda.staged import Staged
    from weightsync.vllm.cuda.upload import Pace, Uploader
    from weightsync.vllm.live import Targets

__all__ = ["DevicePatch", "fill_found", "fill_sent", "find"]

#: A piece is copied whole when more than one in so many of its elements changed.
_DENSE = 8
#: There is a patch when less than one in so many elements changes: writing one somewhere takes as
#: long as copying a few dozen in a row.
_WORTH = 32
#: One in so many pieces, if those are enough, can tell that it is not worth to look at all of them,
#: by so many elements of each: each launch of a step may have to wait for one of ours.
_SAMPLE, _ENOUGH, _GLANCE = 16, 8, 1 << 19
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
    patched: bool = True
    compared_all: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that a commit writes."""
        return sum(scatter.nbytes for scatter in self.scatters) + self.rest.nbytes

    def write(self, crew: Crew) -> None:
        """Queue what changes; every other byte stays as it is."""
        self.targets.views()
        begin_patch()
        if self.scatters:
            write_each(
                crew,
                lambda index: self.scatters[index].write(),
                [scatter.nbytes for scatter in self.scatters],
            )
        if self.rest.nbytes:
            self.rest.write(crew)

    def mismatched(self, crew: Crew) -> list[str]:
        """Look at what was written; return the parameters that do not hold it."""
        flags = [scatter.differs() for scatter in self.scatters]
        wrong = set(self.rest.mismatched(crew)) if self.rest.nbytes else set()
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


@dataclass(frozen=True)
class Found:
    """What differs between staging memory and the live parameters.

    Attributes:
        sparse: Pieces of which little differs, and how many of their elements.
        dense: Pieces of which much differs.
    """

    sparse: Sequence[tuple[Block, int]]
    dense: Sequence[Block]

    @property
    def counts(self) -> Mapping[int, int]:
        """Elements that differ, by their width."""
        counts: Counter[int] = Counter()
        for block, count in self.sparse:
            counts[block.dtype.itemsize] += count
        return counts


def find(staged: Staged, pace: Pace, stop: Callable[[], bool]) -> Found | None:
    """Return what differs; None: so much that a copy of everything is less work.

    Raises:
        StoppedError: `stop` returned True.
    """
    size = staged.mask.numel()
    pieces = [p for block in staged.blocks for p in block.pieces(size * block.dtype.itemsize)]
    sample = [next(p.pieces(_GLANCE * p.dtype.itemsize)) for p in pieces[::_SAMPLE]]
    if _all_dense(staged, sample, pace, stop):
        return None
    sparse, dense = [], []
    for piece, count in zip(pieces, _count(staged, pieces, pace, stop), strict=True):
        if count * _DENSE > piece.place.numel or (count and not piece.place.contiguous):
            dense.append(piece)
        elif count:
            sparse.append((piece, count))
    whole = sum(block.place.numel for block in staged.blocks)
    much = sum(piece.place.numel for piece in dense)
    if sum(count for _, count in sparse) * _WORTH + much >= whole:
        return None
    return Found(sparse, dense)


def _all_dense(
    staged: Staged, sample: Sequence[Block], pace: Pace, stop: Callable[[], bool]
) -> bool:
    if len(sample) < _ENOUGH:
        return False
    counts = _count(staged, sample, pace, stop)
    return all(
        count * _WORTH >= piece.place.numel for piece, count in zip(sample, counts, strict=True)
    )


def _count(
    staged: Staged, pieces: Sequence[Block], pace: Pace, stop: Callable[[], bool]
) -> list[int]:
    """Return how many elements of each piece differ."""
    counts = []
    try:
        for piece in pieces:
            if stop():
                raise StoppedError
            counts.append(_unequal(staged, piece).sum())
            pace.step()
    finally:
        pace.drain()
    numbers: list[int] = torch.stack(counts).tolist() if counts else []
    return numbers


def _unequal(staged: Staged, piece: Block) -> torch.Tensor:
    sides = (piece.live(staged.targets), piece.staged(staged.memory))
    live, wanted = map(words_of, sides)
    return unequal(live, wanted, staged.mask)


def fill_found(
    found: Found, made: Mapping[int, Scatter], staged: Staged, stop: Callable[[], bool]
) -> None:
    """Fill in the elements that `find` has counted.

    Raises:
        StoppedError: `stop` returned True.
    """
    filled: Counter[int] = Counter()
    for piece, count in found.sparse:
        if stop():
            raise StoppedError
        width = piece.dtype.itemsize
        scatter, begin = made[width], filled[width]
        filled[width] = end = begin + count
        # Waits for the device, which knows how many there are.
        places = _unequal(staged, piece).nonzero().reshape(-1)
        if places.numel() != count:
            msg = "the parameters were written while they were compared; prepare again"
            raise RuntimeError(msg)
        words = words_of(piece.staged(staged.memory))
        torch.index_select(words, 0, places, out=scatter.values[begin:end])
        first = scatter.place(piece.live(staged.targets))
        torch.add(places, first, out=scatter.positions[begin:end])


def fill_sent(
    changes: Iterable[Change],
    made: Mapping[int, Scatter],
    targets: Targets,
    uploader: Uploader,
    pace: Pace,
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
