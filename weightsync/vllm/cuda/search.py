"""Which elements differ between live and staged memory: counted first, then taken."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from weightsync.gpu.device_kernels import Launch
from weightsync.gpu.spans import SPAN, THREADS, cut, fits
from weightsync.vllm.cuda.bit_compare import unequal
from weightsync.vllm.plan.int_views import StoppedError, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.cuda.blocks import Block
    from weightsync.vllm.cuda.scatter import Scatter
    from weightsync.vllm.cuda.staged_write import Staged
    from weightsync.vllm.cuda.uploader import Pace

__all__ = ["KernelSearch", "Pairs", "Search", "TorchSearch", "pairs_of", "searches"]

#: Spans of a launch: what else runs on an H200 waits for 0.2 ms of it.
_AT_ONCE = (256 << 20) // SPAN


class Search(Protocol):
    """Looks through pieces whose elements have one width.

    Attributes:
        pieces: What it looks through.
    """

    pieces: Sequence[Block]

    def count(self, pace: Pace, stop: Callable[[], bool]) -> list[int]:
        """Return how many elements of each piece differ.

        Args:
            pace: Of the current stream.
            stop: Asked now and then; True raises `StoppedError`.
        """

    def take(
        self,
        chosen: Sequence[bool],
        scatter: Scatter,
        begin: int,
        pace: Pace,
        stop: Callable[[], bool],
    ) -> int:
        """Fill in the places and the staged values of what `count` has counted.

        Args:
            chosen: The pieces whose elements are taken.
            scatter: Takes them,
            begin: from this one of its elements on.
            pace: Of the current stream.
            stop: Asked now and then; True raises `StoppedError`.

        Returns:
            One past the last element that was filled in.

        Raises:
            RuntimeError: Not as many differ as were counted.
        """


class Pairs(NamedTuple):
    """Pieces of one width, live and staged, as long as both lie where they do.

    Attributes:
        pieces: At least one.
        table: Rows of the kernels' table, on the device; None: the kernels cannot look at them.
        piece_of: The number of the piece of each row.
    """

    pieces: Sequence[Block]
    table: torch.Tensor | None = None
    piece_of: torch.Tensor | None = None


def pairs_of(staged: Staged, pieces: Iterable[Block]) -> list[Pairs]:
    """Return what can be looked at together; call `staged.targets.views` first."""
    groups: dict[tuple[int, bool], list[Block]] = defaultdict(list)
    for piece in pieces:
        ours = staged.kernels is not None and fits(*_sides(staged, piece))
        groups[piece.dtype.itemsize, ours].append(piece)
    return [_cut(staged, some) if ours else Pairs(some) for (_, ours), some in groups.items()]


def _cut(staged: Staged, pieces: Sequence[Block]) -> Pairs:
    rows = [cut(0, *_sides(staged, piece)) for piece in pieces]
    piece_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    device = staged.memory.device
    table = torch.from_numpy(np.concatenate(rows)).to(device)
    return Pairs(pieces, table, torch.from_numpy(piece_of).to(device))


def searches(staged: Staged, pairs: Iterable[Pairs]) -> list[Search]:
    """Return what looks through pieces of a staged version."""
    return [
        KernelSearch(some, staged.kernels)
        if some.table is not None and staged.kernels is not None
        else TorchSearch(staged, some.pieces)
        for some in pairs
    ]


@dataclass
class TorchSearch:
    """Looks at one piece after the other; see `Search`."""

    staged: Staged
    pieces: Sequence[Block]
    _counts: list[int] = field(default_factory=list)

    def count(self, pace: Pace, stop: Callable[[], bool]) -> list[int]:
        """See `Search`."""
        counts = []
        try:
            for piece in self.pieces:
                if stop():
                    raise StoppedError
                counts.append(self._unequal(piece).sum())
                pace.step(piece.nbytes)
        finally:
            pace.drain()
        self._counts = torch.stack(counts).tolist() if counts else []
        return self._counts

    def take(
        self,
        chosen: Sequence[bool],
        scatter: Scatter,
        begin: int,
        pace: Pace,
        stop: Callable[[], bool],
    ) -> int:
        """See `Search`."""
        for piece, count, wanted in zip(self.pieces, self._counts, chosen, strict=True):
            if not wanted:
                continue
            if stop():
                raise StoppedError
            end = begin + count
            # Waits for the device, which knows how many there are.
            places = self._unequal(piece).nonzero().reshape(-1)
            if places.numel() != count:
                raise _written_meanwhile()
            words = words_of(piece.staged(self.staged.memory))
            torch.index_select(words, 0, places, out=scatter.values[begin:end])
            first = scatter.place(piece.live(self.staged.targets))
            torch.add(places, first, out=scatter.positions[begin:end])
            pace.step()
            begin = end
        return begin

    def _unequal(self, piece: Block) -> torch.Tensor:
        live, wanted = map(words_of, _sides(self.staged, piece))
        return unequal(live, wanted, self.staged.mask)


class KernelSearch:
    """Looks at many pieces with each launch; see `Search`.

    What becomes of a count is computed on the device: the host, which runs the steps of vLLM, would
    take as long for it as the kernels do.

    Args:
        pairs: With a table.
        kernels: Of their device.
    """

    def __init__(self, pairs: Pairs, kernels: Kernels) -> None:
        assert pairs.table is not None  # noqa: S101 - see above
        assert pairs.piece_of is not None  # noqa: S101 - there is a table
        self.pieces = pairs.pieces
        self._bits = 8 * pairs.pieces[0].dtype.itemsize
        self._kernels = kernels
        self._table, self._piece_of = pairs.table, pairs.piece_of
        #: Of each row, and of each piece.
        self._counts = torch.empty(len(self._table), dtype=torch.int32, device=self._table.device)
        self._found: list[int] = []

    def count(self, pace: Pace, stop: Callable[[], bool]) -> list[int]:
        """See `Search`."""
        for part in _parts(len(self._table), stop):
            self._queue("count_changes", part, [self._table[part], self._counts[part]])
            pace.step()
        found = torch.zeros(len(self.pieces), dtype=torch.int64, device=self._table.device)
        self._found = found.index_add_(0, self._piece_of, self._counts.long()).tolist()
        return self._found

    def take(
        self,
        chosen: Sequence[bool],
        scatter: Scatter,
        begin: int,
        pace: Pace,
        stop: Callable[[], bool],
    ) -> int:
        """See `Search`."""
        device = self._table.device
        wanted = torch.tensor(chosen, device=device)[self._piece_of] & (self._counts > 0)
        table, counts = self._table[wanted], self._counts[wanted]
        borders = torch.zeros(len(table) + 1, dtype=torch.int64, device=device)
        torch.cumsum(counts, 0, dtype=torch.int64, out=borders[1:])
        borders += begin
        wrong = torch.zeros(1, dtype=torch.int32, device=device)
        row, positions, values = scatter.row.data_ptr(), scatter.positions, scatter.values
        for part in _parts(len(table), stop):
            own = borders[part.start : part.stop + 1]
            self._queue("take_changes", part, [table[part], own, row, positions, values, wrong])
            pace.step()
        if wrong.item():
            raise _written_meanwhile()
        some = zip(self._found, chosen, strict=True)
        return begin + sum(count for count, is_chosen in some if is_chosen)

    def _queue(self, name: str, part: slice, arguments: Sequence[torch.Tensor | int]) -> None:
        grid = part.stop - part.start, THREADS
        Launch(self._kernels, f"{name}_{self._bits}", grid, arguments).queue()


def _sides(staged: Staged, piece: Block) -> tuple[torch.Tensor, torch.Tensor]:
    return piece.live(staged.targets), piece.staged(staged.memory)


def _parts(count: int, stop: Callable[[], bool]) -> Iterator[slice]:
    for begin in range(0, count, _AT_ONCE):
        if stop():
            raise StoppedError
        yield slice(begin, min(begin + _AT_ONCE, count))


def _written_meanwhile() -> RuntimeError:
    return RuntimeError("the parameters were written while they were compared; prepare again")
