"""A commit on a device that writes only what changes: found while vLLM generates, then written."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from weightsync.gpu.device_find import Finder, KernelFinder, Pair, TorchFinder
from weightsync.gpu.device_kernels import fits
from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.apply.host_params import ParamChange
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.apply.writes import begin_patch, write_each
from weightsync.vllm.cuda.uploader import StreamThrottle, Uploader
from weightsync.vllm.plan.int_views import memory_of

if TYPE_CHECKING:
    from weightsync.vllm.cuda.memory_budget import Block
    from weightsync.vllm.cuda.scatter import Scatter
    from weightsync.vllm.cuda.staged_write import Direct, Staged
    from weightsync.vllm.plan.live_params import Targets


_NAMES = 10


@dataclass
class DevicePatch:
    """Turns one version, the content digest `base`, in the live parameters into another."""

    base: str
    targets: Targets
    scatters: Sequence[Scatter]
    rest: Staged | Direct
    patched = True
    compared_all = False

    @property
    def nbytes(self) -> int:
        return sum(scatter.nbytes for scatter in self.scatters) + self.rest.nbytes

    def write(self, threads: SliceThreads) -> None:
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
    """Pieces of one width, at least one, that are looked at together."""

    pieces: Sequence[Block]
    finder: Finder


@dataclass(frozen=True)
class FoundPatch:
    """What differs between staging memory and the live parameters.

    Attributes:
        sparse: Each group, which of its pieces differ in few elements, and in how many.
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
        """Return what differs; None if copying everything is less work.

        The views of `staged` must be made. `pace` is of the current stream. Raises StoppedError
        when `stop` returns True.
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
    """Fill in the elements that were counted; RuntimeError: not as many differ."""
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
